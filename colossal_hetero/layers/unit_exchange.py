"""Units on their way: weights once per optimizer step, gradients back once (ALGORITHMS 1.5).

Weights of many blocks travel in one message per pair of ranks; a message is waited for when its first block is about to
compute. Gradients return from each layer's last backward pass before they are used, so that whatever acts on gradients
as they appear (data parallelism, ZeRO, loss scaling, clipping) finds them complete on their owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .block import Block, BlockWorkload
from .column_migration import Move
from .transport import Pending, Transport
from .workload import Selector

__all__ = ["MESSAGE_BYTES", "UnitMail", "batch_numbers"]

MESSAGE_BYTES = 4 << 20
"""Blocks are put together until their weights are as large as this; larger messages would not be faster."""


@dataclass
class _Route:
    """Units of one block between this rank and another."""

    other: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(eq=False)
class _Parcel:
    """What this rank has to do with one block."""

    block: Block
    outward: list[_Route]
    """Own units and who computes them, in ascending order."""
    inward: list[_Route]
    """Others' units that this rank computes."""
    batch: _Batch | None = None
    passes: list[int] = field(default_factory=list)
    """Backward passes of each layer since its gradients last returned."""
    sums: list[list[Tensor] | None] = field(default_factory=list)
    """The taken units' gradients of each layer, added up since then."""

    def forget(self) -> None:
        self.passes = [0] * len(self.block.layers)
        self.sums = [None] * len(self.block.layers)


@dataclass(eq=False)
class _Batch:
    """Blocks whose weights travel together, and the messages that carry them, by the rank at the other end."""

    parcels: list[_Parcel] = field(default_factory=list)
    outgoing: dict[int, Tensor] = field(default_factory=dict)
    incoming: dict[int, Tensor] = field(default_factory=dict)
    pending: Pending = field(default_factory=lambda: Pending(()))

    def reserve(self) -> None:
        """Make room for the messages."""
        for messages, direction in ((self.outgoing, "outward"), (self.incoming, "inward")):
            lengths: dict[int, int] = {}
            for parcel in self.parcels:
                for route in getattr(parcel, direction):
                    elements = route.count * parcel.block.elements_per_unit
                    lengths[route.other] = lengths.get(route.other, 0) + elements
            like = self.parcels[0].block.parameters[0][0]
            messages.update({other: like.new_empty(length) for other, length in sorted(lengths.items())})


def batch_numbers(blocks: Sequence[Block], moves: Sequence[Sequence[Move]]) -> list[int]:
    """Which blocks' weights travel together: a number for each block, the same division on all ranks."""
    numbers: list[int] = []
    size, kind = 0, None
    for block, moved in zip(blocks, moves, strict=True):
        dtype = block.parameters[0][0].dtype
        if not numbers:
            numbers.append(0)
        elif size >= MESSAGE_BYTES or kind != dtype:
            numbers.append(numbers[-1] + 1)
            size = 0
        else:
            numbers.append(numbers[-1])
        kind = dtype
        size += sum(move.stop - move.start for move in moved) * block.elements_per_unit * dtype.itemsize
    return numbers


class UnitMail:
    """Moves units of blocks between one rank and the others of its group.

    Args:
        transport: of the group.
        is_last_pass: whether a layer's n-th backward pass since its gradients last returned is the last before they are
            used; the same on all ranks.
    """

    def __init__(self, transport: Transport, is_last_pass: Callable[[int], bool]) -> None:
        self._transport = transport
        self._is_last_pass = is_last_pass
        self._parcels: list[_Parcel] = []
        self._batches: list[_Batch] = []
        self._returning: list[tuple[Pending, list[tuple[int, Tensor]]]] = []
        """Gradients on their way to their owners, with the memory that they are sent from."""
        self._is_sent = False

    def assign(
        self,
        blocks: Sequence[Block],
        moves: Sequence[Sequence[Move]],
        kept: Sequence[int],
        select: Sequence[Selector | None],
    ) -> None:
        """From the next iteration on move units of every block as its ``moves`` say and keep ``kept`` of the own ones.

        Raises:
            RuntimeError: there is no memory for the units that this rank takes.
        """
        self.release(blocks)
        rank = self._transport.rank
        batches: dict[int, _Batch] = defaultdict(_Batch)
        numbers = batch_numbers(blocks, moves)
        for block, moved, count, rule, number in zip(blocks, moves, kept, select, numbers, strict=True):
            outward = [_Route(move.receiver, move.start, move.stop) for move in moved if move.sender == rank]
            inward = [_Route(move.sender, move.start, move.stop) for move in moved if move.receiver == rank]
            if count == block.units and not inward:
                continue
            parcel = _Parcel(block, outward, inward)
            parcel.forget()
            workload = BlockWorkload(
                given=sum(route.count for route in outward),
                taken=sum(route.count for route in inward),
                kept=count,
                select=rule,
            )
            block.assign(workload, self._receiver(parcel), self._returner(parcel))
            self._parcels.append(parcel)
            if outward or inward:
                parcel.batch = batches[number]
                parcel.batch.parcels.append(parcel)
        self._batches = list(batches.values())
        for batch in self._batches:
            batch.reserve()
        _rehearse_backward(self._parcels)

    def release(self, blocks: Sequence[Block]) -> None:
        """Nobody moves anything any more."""
        self.finish()
        self._parcels, self._batches = [], []
        for block in blocks:
            block.assign(None)

    def begin_iteration(self) -> None:
        """Start sending the units' weights. Collective over the group.

        A block that is called beforehand, by itself, starts it too.
        """
        if self._is_sent:
            return
        self._is_sent = True
        for batch in self._batches:
            for other, message in batch.outgoing.items():
                torch.cat([part.reshape(-1) for part in _weights(batch, other)], out=message)
            batch.pending = self._transport.exchange(list(batch.outgoing.items()), list(batch.incoming.items()))

    def weights_changed(self) -> None:
        """What has been sent is out of date."""
        for batch in self._batches:
            batch.pending.wait()
        for parcel in self._parcels:
            parcel.block.begin_iteration()
        self._is_sent = False

    def drop_gradients(self) -> None:
        """Forget gradients that have not returned."""
        for parcel in self._parcels:
            parcel.forget()

    def finish(self) -> None:
        """The iteration is over: gradients are about to be used, and then weights will have changed.

        Raises:
            RuntimeError: gradients of units that this rank computes for others never returned.
        """
        for pending, _ in self._returning:
            pending.wait()
        self._returning = []
        self.weights_changed()
        late = next((parcel.block.name for parcel in self._parcels if any(parcel.passes)), None)
        if late is not None:
            self.drop_gradients()
            raise RuntimeError(
                f"gradients of migrated units of {late or 'the model'} have not returned to their owner: the last "
                "backward pass before optimizer.step() has to run outside of no_sync()"
            )

    def _receiver(self, parcel: _Parcel) -> Callable[[], list[list[Tensor]]]:
        def receive() -> list[list[Tensor]]:
            if parcel.batch is None:
                return []
            self.begin_iteration()
            parcel.batch.pending.wait()
            routes = [_unpack(parcel, route) for route in parcel.inward]
            return [] if not routes else _joined(parcel.block, routes)

        return receive

    def _returner(self, parcel: _Parcel) -> Callable[[int, list[Tensor]], list[Tensor] | None]:
        def hand_over(layer: int, gradients: list[Tensor]) -> list[Tensor] | None:
            if parcel.batch is None:
                return None
            earlier = parcel.sums[layer]
            # Views of another layer's gradient stay as they are until they are sent.
            total = gradients if earlier is None else [a + b for a, b in zip(earlier, gradients, strict=True)]
            parcel.sums[layer] = total
            parcel.passes[layer] += 1
            if not self._is_last_pass(parcel.passes[layer]):
                return None
            parcel.passes[layer], parcel.sums[layer] = 0, None
            return self._return_gradients(parcel, layer, total)

        return hand_over

    def _return_gradients(self, parcel: _Parcel, layer: int, total: list[Tensor]) -> list[Tensor] | None:
        places = parcel.block.places[layer]
        parameters = parcel.block.parameters[layer]
        elements = sum(place.numel(tensor) for place, tensor in zip(places, parameters, strict=True))
        sends, start = [], 0
        for route in parcel.inward:
            parts = [view.narrow(place.unit_dim, start, route.count) for place, view in zip(places, total, strict=True)]
            sends.append((route.other, torch.cat([part.reshape(-1) for part in parts])))
            start += route.count
        if sends:
            # The owner may be late; whoever computes for it goes on meanwhile.
            self._returning.append((self._transport.exchange(sends, []), sends))
        receives = [(route.other, total[0].new_empty(route.count * elements)) for route in parcel.outward]
        if not receives:
            return None
        self._transport.exchange([], receives).wait()
        routes = [
            _split(message, places, parameters, route.count)[0]
            for route, (_, message) in zip(parcel.outward, receives, strict=True)
        ]
        return [torch.cat([route[n] for route in routes], place.unit_dim) for n, place in enumerate(places)]


def _rehearse_backward(parcels: Sequence[_Parcel]) -> None:
    """Take, for a moment, the memory that backward needs for taken units beside that for the own ones.

    That is their gradients, as much again until these have returned, and a whole one while it is put together; and the
    own ones, where they do not exist yet. Activations are not in it, which depend on the batch.

    Raises:
        RuntimeError: there is not so much.
    """
    room, largest = [], 0
    for parcel in parcels:
        taken = sum(route.count for route in parcel.inward)
        for layer, tensors, places in zip(
            parcel.block.layers, parcel.block.parameters, parcel.block.places, strict=True
        ):
            if taken and layer.weight.requires_grad:  # type: ignore[attr-defined]
                elements = sum(place.numel(tensor) for tensor, place in zip(tensors, places, strict=True))
                whole = sum(tensor.numel() for tensor in tensors)
                own = whole if layer.weight.grad is None else 0  # type: ignore[attr-defined]
                room.append(tensors[0].new_empty(2 * taken * elements + own))
                largest = max(largest, whole)
    if room:
        room.append(room[0].new_empty(largest))


def _weights(batch: _Batch, other: int) -> list[Tensor]:
    """Views of the units of all the batch's blocks that go to ``other``, in the order of blocks, layers, tensors."""
    return [
        place.view(tensor).narrow(place.unit_dim, route.start, route.count)
        for parcel in batch.parcels
        for route in parcel.outward
        if route.other == other
        for tensors, places in zip(parcel.block.parameters, parcel.block.places, strict=True)
        for tensor, place in zip(tensors, places, strict=True)
    ]


def _unpack(parcel: _Parcel, route: _Route) -> list[list[Tensor]]:
    """The units of ``route`` by layer and tensor, as views of the message that brought them."""
    assert parcel.batch is not None
    message = parcel.batch.incoming[route.other]
    offset = 0
    for earlier in parcel.batch.parcels:
        if earlier is parcel:
            break
        count = sum(other.count for other in earlier.inward if other.other == route.other)
        offset += count * earlier.block.elements_per_unit
    layers = []
    for tensors, places in zip(parcel.block.parameters, parcel.block.places, strict=True):
        views, used = _split(message[offset:], places, tensors, route.count)
        layers.append(views)
        offset += used
    return layers


def _split(message: Tensor, places: Sequence, tensors: Sequence[Tensor], count: int) -> tuple[list[Tensor], int]:
    """The first elements of ``message`` as ``count`` units of each of ``tensors``, and how many they were."""
    views, offset = [], 0
    for place, tensor in zip(places, tensors, strict=True):
        shape = list(place.view(tensor).shape)
        shape[place.unit_dim] = count
        length = count * place.numel(tensor)
        views.append(message[offset : offset + length].view(shape))
        offset += length
    return views, offset


def _joined(block: Block, routes: list[list[list[Tensor]]]) -> list[list[Tensor]]:
    """The units of several routes one after the other, by layer and tensor."""
    if len(routes) == 1:
        return routes[0]
    return [
        [torch.cat([route[layer][n] for route in routes], place.unit_dim) for n, place in enumerate(places)]
        for layer, places in enumerate(block.places)
    ]
