"""Moves of a model's state between ranks' memories, to where a new plan needs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..checkpoint.exchange import BoxMemory, fetch_boxes
from ..checkpoint.pieces import Bitmap, Box, Location, StorageTier, TensorPiece, cover, whole
from ..checkpoint.transfers import Need, choose_sources
from ..common.ranks import of_every_rank

COPIES = 2  # ranks that take what a leaving member holds


class HoldingsLost(Exception):
    """No rank has some elements any more."""


class HeldBox(NamedTuple):
    """A box of a tensor of shape ``shape`` that a rank has in its memory."""

    layer: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    box: Box


def all_holdings(held: Iterable[TensorPiece]) -> list[list[HeldBox]]:
    """Boxes that each rank holds. Every rank calls it, with its own pieces."""
    return of_every_rank(
        [
            HeldBox(each.layer, each.key, tuple(each.shape), str(each.data.dtype).removeprefix("torch."), each.box)
            for each in held
        ]
    )


def inheritance(holdings: Sequence[Sequence[HeldBox]], leaving: Sequence[bool]) -> list[list[HeldBox]]:
    """Boxes that each rank takes from leaving ones: then :data:`COPIES` ranks hold them, in case another member dies.

    Ranks that lack the fewest elements of a box take these; of several, the one that has taken the fewest so far.
    """
    kept: dict[tuple[int, str], list[Box]] = {}
    stayers = [rank for rank, leaves in enumerate(leaving) if not leaves]
    for rank in stayers:
        for each in holdings[rank]:
            kept.setdefault((rank, each.key), []).append(each.box)
    taken: list[list[HeldBox]] = [[] for _ in holdings]
    elements = dict.fromkeys(stayers, 0)
    for each in (each for rank, leaves in enumerate(leaving) if leaves for each in holdings[rank]):
        lacking = {rank: cover(each.box, kept.get((rank, each.key), []))[1] for rank in stayers}
        sizes = {rank: sum(box.numel for box in boxes) for rank, boxes in lacking.items()}
        for heir in sorted(stayers, key=lambda rank: (sizes[rank], elements[rank], rank))[:COPIES]:
            taken[heir] += [each._replace(box=box) for box in lacking[heir]]
            elements[heir] += sizes[heir]
            kept.setdefault((heir, each.key), []).extend(lacking[heir])
    return taken


def empty_piece(holding: HeldBox) -> TensorPiece:
    data = torch.empty(holding.box.sizes, dtype=getattr(torch, holding.dtype))
    return TensorPiece(holding.layer, holding.key, holding.shape, holding.box, data, "")


def move_pieces(
    needed: Sequence[TensorPiece], held: Sequence[TensorPiece], holdings: Sequence[Sequence[HeldBox]]
) -> int:
    """Fill the needed pieces of this rank from what all ranks hold; returns the bytes received. Every rank calls it.

    What a rank holds itself is copied, other elements come from the rank that gives the fewest bytes. One layer after
    the other is on its way, so that memory for few layers is needed.
    """
    node_of = {number: str(number) for number in range(len(holdings))}
    bitmap, shapes, dtypes = _bitmap(holdings)
    needs = of_every_rank([Need(each.layer, each.key, each.box, each.data.element_size()) for each in needed])
    try:
        fetches = choose_sources(dict(enumerate(needs)), node_of, bitmap)
    except LookupError:
        raise HoldingsLost(", ".join(dict.fromkeys(_incomplete(holdings)))) from None
    sources: dict[str, list[TensorPiece]] = {}
    for piece in held:
        sources.setdefault(piece.key, []).append(piece)
    outcome = fetch_boxes(fetches, node_of, BoxMemory(needed, shapes, dtypes), partial(_copy, held=sources))
    assert not outcome.left and not outcome.problems
    return outcome.received_bytes


def _incomplete(holdings: Sequence[Sequence[HeldBox]]) -> Iterator[str]:
    """Layers of which no rank has some elements."""
    boxes: dict[tuple[str, str, tuple[int, ...]], set[Box]] = {}
    for each in itertools.chain.from_iterable(holdings):
        boxes.setdefault((each.layer, each.key, each.shape), set()).add(each.box)
    return (layer for (layer, _, shape), held in boxes.items() if cover(whole(shape), sorted(held))[1])


def _bitmap(holdings: Sequence[Sequence[HeldBox]]) -> tuple[Bitmap, dict[str, tuple[int, ...]], dict[str, str]]:
    bitmap, shapes, dtypes = Bitmap(), {}, {}
    for rank, of_rank in enumerate(holdings):
        for each in of_rank:
            bitmap.add(each.layer, each.key, each.box, Location(str(rank), StorageTier.MEMORY))
            shapes[each.key], dtypes[each.key] = each.shape, each.dtype
    return bitmap, shapes, dtypes


def _copy(targets: Sequence[TensorPiece], held: Mapping[str, Sequence[TensorPiece]]) -> None:
    for target in targets:
        sources = held[target.key]
        parts, left = cover(target.box, [piece.box for piece in sources])
        assert not left, target
        for index, part in parts:
            source = sources[index]
            target.data[target.box.slices_of(part)].copy_(source.data[source.box.slices_of(part)])
