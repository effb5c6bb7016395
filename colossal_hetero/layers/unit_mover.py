"""Moves of a block's units to other ranks for good: weights, gradients and optimizer state. Parameters stay the same
objects, which optimizers, hooks and users may go on holding, and get tensors of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..colossalai_support.accelerator import is_out_of_memory
from .block import Block
from .column_migration import MovedRange, moved_count
from .transport import Transport
from .unit_layout import UnitPlace, UnitRange
from .workload import values_of

# A *holding* lists the units that a rank holds, in the order of its tensors. Ordinarily every rank holds its own.

Holding = tuple[UnitRange, ...]


class Piece(NamedTuple):
    """Units that are adjacent both where they are and where they go."""

    source: int  # the rank that holds them so far
    first: int  # their place among the units that this rank holds so far
    length: int


def unit_count(holding: Holding) -> int:
    return sum(stop - start for _, start, stop in holding)


def holdings(units: int, ranks: int, moves: Sequence[MovedRange]) -> tuple[Holding, ...]:
    """Holdings of all ranks after ``moves``, if each rank held its own ``units`` before."""
    given = [moved_count(move for move in moves if move.sender == rank) for rank in range(ranks)]
    return tuple(
        (
            UnitRange(rank, 0, units - given[rank]),
            *(UnitRange(move.sender, move.start, move.stop) for move in moves if move.receiver == rank),
        )
        for rank in range(ranks)
    )


def pieces_of(after: Holding, before: Sequence[Holding]) -> list[Piece]:
    """Pieces of the holding ``after``, in its order, at their places in the holdings ``before``, which are by rank."""
    pieces: list[Piece] = []
    for owner, start, stop in after:
        while start < stop:
            piece = _find(owner, start, stop, before)
            pieces.append(piece)
            start += piece.length
    return pieces


def _find(owner: int, start: int, stop: int, before: Sequence[Holding]) -> Piece:
    for rank, holding in enumerate(before):
        place = 0
        for units in holding:
            if units.owner == owner and units.start <= start < units.stop:
                return Piece(rank, place + start - units.start, min(stop, units.stop) - start)
            place += units.stop - units.start
    raise AssertionError(f"no rank holds unit {start} of rank {owner}")


class StateSlot(NamedTuple):
    """A tensor with the shape of a parameter, which has an element for each of the parameter's elements."""

    name: str
    tensor: Tensor
    put: Callable[[Tensor], None]


SlotsOf = Callable[[Tensor], Sequence[StateSlot]]


class _UnitTensor(NamedTuple):
    place: UnitPlace
    slot: StateSlot

    def units(self, tensor: Tensor, first: int, count: int) -> Tensor:
        return self.place.view(tensor).narrow(self.place.unit_dim, first, count)

    def shape(self, count: int) -> list[int]:
        shape = list(self.place.view(self.slot.tensor).shape)
        shape[self.place.unit_dim] = count
        return shape


class UnitMover:
    def __init__(self, transport: Transport, slots_of: SlotsOf, all_agree: Callable[[bool], bool]) -> None:
        self._transport = transport
        self._slots_of = slots_of
        self._all_agree = all_agree

    def contents(self, block: Block) -> list[str]:
        """Names and dtypes that move with each unit of the block; they must be the same on all ranks."""
        return [f"{block.name} {unit.slot.name} {unit.slot.tensor.dtype}" for unit in self._tensors(block)]

    @torch.no_grad()
    def move(self, block: Block, before: Sequence[Holding], after: Sequence[Holding]) -> bool:
        """Let each rank hold the units ``after`` instead of those ``before``; collective over the group. Returns False,
        with nothing changed, if some rank has too little memory."""
        rank = self._transport.rank
        wanted = [pieces_of(holding, before) for holding in after]
        tensors = self._tensors(block)
        created: list[Tensor] = []
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        fits = True
        try:
            counts = unit_count(before[rank]), unit_count(after[rank])
            created = [_resized(unit, *counts) for unit in tensors]
            sends = [
                (other, message)
                for other, pieces in enumerate(wanted)
                for message in (_messages(tensors, pieces, rank) if other != rank else ())
            ]
            receives = [
                (piece.source, unit.slot.tensor.new_empty(unit.shape(piece.length)))
                for unit in tensors
                for piece in wanted[rank]
                if piece.source != rank
            ]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        if not self._all_agree(fits):
            return False
        self._transport.exchange(sends, receives).wait()
        _fill(tensors, created, wanted[rank], rank, iter(receives))
        for unit, tensor in zip(tensors, created, strict=True):
            unit.slot.put(tensor)
        return True

    def _tensors(self, block: Block) -> list[_UnitTensor]:
        return [
            _UnitTensor(place, slot)
            for parameters, places in zip(block.unit_parameters, block.places, strict=True)
            for parameter, place in zip(parameters, places, strict=True)
            for slot in (*_own_slots(parameter), *self._slots_of(parameter))
        ]


def _own_slots(parameter: Tensor) -> list[StateSlot]:
    slots = [StateSlot("values", values_of(parameter), partial(put_data, parameter))]
    if parameter.grad is not None:
        slots.append(StateSlot("gradient", parameter.grad, partial(setattr, parameter, "grad")))
    return slots


def put_data(tensor: Tensor, values: Tensor) -> None:
    """Let ``tensor``, a leaf, hold ``values``, which may have another shape. It has no gradient then."""
    tensor.grad = None  # torch refuses a gradient of another shape
    # A graph that is still alive, such as that of the last loss, keeps the node that adds up gradients, with the old
    # shape. torch makes a new one when the type changes.
    tensor.data = values.new_empty(0, dtype=torch.float16 if values.dtype != torch.float16 else torch.float32)
    tensor.data = values


def _resized(unit: _UnitTensor, before: int, after: int) -> Tensor:
    shape = list(unit.slot.tensor.shape)
    shape[unit.place.dim] = shape[unit.place.dim] // before * after
    return torch.empty(shape, dtype=unit.slot.tensor.dtype, device=unit.slot.tensor.device)


def _messages(tensors: Sequence[_UnitTensor], pieces: Sequence[Piece], source: int) -> list[Tensor]:
    """The units of ``pieces`` that rank ``source`` holds: a message for each tensor and piece, in this order."""
    own = [piece for piece in pieces if piece.source == source]
    return [unit.units(unit.slot.tensor, piece.first, piece.length).contiguous() for unit in tensors for piece in own]


def _fill(
    tensors: Sequence[_UnitTensor],
    created: Sequence[Tensor],
    pieces: Sequence[Piece],
    rank: int,
    received: Iterator[tuple[int, Tensor]],
) -> None:
    for unit, tensor in zip(tensors, created, strict=True):
        place = 0
        for piece in pieces:
            is_own = piece.source == rank
            values = unit.units(unit.slot.tensor, piece.first, piece.length) if is_own else next(received)[1]
            unit.units(tensor, place, piece.length).copy_(values)
            place += piece.length
