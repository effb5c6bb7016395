"""Loading of the pieces of all ranks from a checkpoint whose files are on several nodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .config import CheckpointError
from .exchange import AHEAD, BoxMemory, LayerRead, ReadAhead, exchange
from .pieces import Bitmap, Location, StorageTier, TensorPiece
from .places import Checkpoint, NodeCopy
from .reader import CheckpointReader
from .transfers import Fetch, Need, Read, Transfer, choose_sources, layer_order, reads_and_transfers

__all__ = ["load_pieces"]


class _Outcome(NamedTuple):
    problems: list[tuple[str, Location, str]]
    """Layers that this rank could not read, their locations, and the reasons."""
    left: list[Need]


def load_pieces(
    pieces: Sequence[TensorPiece], copies: Sequence[NodeCopy], reader: CheckpointReader, nodes: Sequence[str]
) -> int:
    """Fill the pieces of this rank; returns the bytes received from other ranks. Every rank calls it.

    Each box comes from the nearest place: the disk of this node, disks of other nodes, the shared folder. All are read
    at the same time; what is read once is sent to all that need it. If a file is damaged, another copy is used.
    """
    checkpoint = reader.checkpoint
    as_saved = [_as_saved(piece, checkpoint.dtypes) for piece in pieces]
    memory = BoxMemory(as_saved, checkpoint.shapes, checkpoint.dtypes)
    bitmap = _bitmap(copies, checkpoint, set(nodes))
    node_of = dict(enumerate(nodes))
    outcome = _Outcome([], [Need(each.layer, each.key, each.box, each.data.element_size()) for each in as_saved])
    received, problems = 0, list[str]()
    while True:
        outcomes: list[Any] = [None] * len(nodes)
        dist.all_gather_object(outcomes, outcome)
        for layer, location, problem in (each for of_rank in outcomes for each in of_rank.problems):
            bitmap.discard(layer, location)
            problems.append(problem)
        needs = {rank: of_rank.left for rank, of_rank in enumerate(outcomes)}
        if not any(needs.values()):
            break
        try:
            fetches = choose_sources(needs, node_of, bitmap)
        except LookupError as error:
            raise CheckpointError("; ".join([*problems, str(error)])) from None
        outcome, received_now = _load(fetches, node_of, memory, reader)
        received += received_now
        for _, _, problem in outcome.problems:
            warnings.warn(f"a checkpoint is damaged: {problem}; other copies are looked for", stacklevel=2)
    for piece, saved in zip(pieces, as_saved, strict=True):
        if saved is not piece:
            piece.data.copy_(saved.data)
    return received


def _as_saved(piece: TensorPiece, dtypes: Mapping[str, str]) -> TensorPiece:
    dtype = getattr(torch, dtypes[piece.key])
    if piece.data.dtype == dtype:
        return piece
    return replace(piece, data=torch.empty(piece.box.sizes, dtype=dtype))


def _bitmap(copies: Sequence[NodeCopy], checkpoint: Checkpoint, nodes: set[str]) -> Bitmap:
    bitmap = Bitmap(checkpoint.step)
    for copy in copies:
        if copy.node and copy.node not in nodes:
            continue
        location = Location(copy.node, StorageTier.DISK if copy.node else StorageTier.SHARED)
        for file in (checkpoint.files[name] for name in copy.files):
            for item in file.items:
                bitmap.add(file.layer, item.key, item.box, location)
    return bitmap


def _load(
    fetches: Mapping[int, Sequence[Fetch]], node_of: Mapping[int, str], memory: BoxMemory, reader: CheckpointReader
) -> tuple[_Outcome, int]:
    rank = dist.get_rank()
    reads, transfers = reads_and_transfers(fetches, node_of)
    order = layer_order(reads)
    sent = {each.layer for each in transfers if each.sender == rank}
    with ExitStack() as stack:
        readers = {
            location: stack.enter_context(ReadAhead(layers, AHEAD + 1))
            for location, layers in _layers_by_location(reads[rank], sent, order, memory, reader).items()
        }
        received = exchange(order, transfers, memory, list(readers.values()))
        for each in readers.values():
            each.wait_for_all()
    problems = [
        (layer, location, problem)
        for location, of_location in readers.items()
        for layer, problem in of_location.problems.items()
    ]
    left = _left(fetches[rank], problems, received.missing, memory)
    return _Outcome(problems, left), received.bytes


def _layers_by_location(
    reads: Sequence[Read], sent: set[str], order: Sequence[str], memory: BoxMemory, reader: CheckpointReader
) -> dict[Location, list[LayerRead]]:
    grouped: dict[Location, dict[str, list[Read]]] = {}
    for read in reads:
        grouped.setdefault(read.location, {}).setdefault(read.layer, []).append(read)

    @torch.no_grad()
    def load(of_layer: Sequence[Read]) -> None:
        targets = [memory.to_read(read) for read in of_layer]
        reader.load(targets)
        for target in targets:
            memory.keep(target)
            if target.layer not in sent:
                memory.free(target.key)

    return {
        location: [
            LayerRead(
                layer,
                is_sent=layer in sent and not all(memory.holds(read.key, read.box) for read in by_layer[layer]),
                read=partial(load, by_layer[layer]),
            )
            for layer in order
            if layer in by_layer
        ]
        for location, by_layer in sorted(grouped.items())
    }


def _left(
    fetches: Sequence[Fetch],
    problems: Sequence[tuple[str, Location, str]],
    missing: Sequence[Transfer],
    memory: BoxMemory,
) -> list[Need]:
    unread = {(layer, location) for layer, location, _ in problems}
    unsent = {(each.key, each.box) for each in missing}
    return [
        Need(read.layer, read.key, box, memory.tensor(read.key, box).element_size())
        for box, _, read in fetches
        if (read.layer, read.location) in unread or (read.key, box) in unsent
    ]
