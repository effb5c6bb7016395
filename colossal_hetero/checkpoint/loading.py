"""Fill the pieces of all ranks from a checkpoint whose files are on several nodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..processes.every_rank import on_every_rank
from .copies import SavedIndex, WholeCheckpoint
from .exchange import exchange, piece_with
from .format.pieces import TensorPiece
from .placement.bitmap import Bitmap, Location, StorageTier
from .placement.sources import Fetch, Need, choose_sources
from .placement.transfers import Transfer, transfers_between
from .reading.reader import CheckpointReader
from .storage.errors import CheckpointError

__all__ = ["load_pieces"]


def load_pieces(
    pieces: Sequence[TensorPiece],
    checkpoint: WholeCheckpoint,
    index: SavedIndex,
    reader: CheckpointReader,
    nodes: Sequence[str],
) -> int:
    """Fill the pieces of this rank. Every rank calls it.

    Each box comes from the nearest place: the disk of this node, disks of other nodes, the shared folder. If a file
    turns out to be damaged, another copy is used.

    Args:
        pieces: with tensors of the checkpoint.
        checkpoint: the same on all ranks.
        index: its content.
        reader: of the folders that this rank reaches, for this checkpoint only.
        nodes: of each rank.

    Returns:
        the number of bytes that this rank received from other nodes.

    Raises:
        RuntimeError: on every rank, if a rank cannot read something and there is no other copy.
    """
    converted = [_as_saved(piece, index) for piece in pieces]
    targets = [target for target, _ in converted]
    received = 0
    if _others_are_needed(checkpoint, nodes) or not _load_alone(targets, checkpoint.step, reader, nodes):
        received = _load_with_peers(targets, checkpoint, index, reader, nodes)
    for target, piece in converted:
        if target is not piece:
            piece.data.copy_(target.data)
    return received


def _as_saved(piece: TensorPiece, index: SavedIndex) -> tuple[TensorPiece, TensorPiece]:
    """The piece with memory of the type that was saved, and the piece."""
    dtype = getattr(torch, index.dtypes[piece.key])
    if piece.data.dtype == dtype:
        return piece, piece
    return replace(piece, data=torch.empty(piece.box.sizes, dtype=dtype)), piece


def _others_are_needed(checkpoint: WholeCheckpoint, nodes: Sequence[str]) -> bool:
    """Whether a node has files that another one lacks."""
    files = {copy.node: copy.files for copy in checkpoint.copies if copy.node}
    everything = frozenset().union(*files.values())
    return any(files.get(node, frozenset()) != everything for node in nodes)


def _load_alone(pieces: Sequence[TensorPiece], step: int, reader: CheckpointReader, nodes: Sequence[str]) -> bool:
    """Let each rank read what it needs from its own folders; False on all ranks if files are damaged on one of them.

    Raises:
        RuntimeError: files are damaged, and there are no other nodes.
    """

    def load() -> bool:
        try:
            reader.load(pieces, step)
        except CheckpointError:
            if len(set(nodes)) == 1:
                raise
            return False
        return True

    return all(on_every_rank(load, f"loading the checkpoint of step {step}"))


def _load_with_peers(
    pieces: Sequence[TensorPiece],
    checkpoint: WholeCheckpoint,
    index: SavedIndex,
    reader: CheckpointReader,
    nodes: Sequence[str],
) -> int:
    rank, step, received = dist.get_rank(), checkpoint.step, 0
    node_of = dict(enumerate(nodes))
    bitmap = _bitmap(checkpoint, index, set(nodes))
    own = [Need(piece.layer, piece.key, piece.box, piece.data.element_size()) for piece in pieces]
    needs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(needs, own)
    by_key: dict[str, list[TensorPiece]] = {}
    for piece in pieces:
        by_key.setdefault(piece.key, []).append(piece)
    for layer in sorted({need.layer for of_rank in needs for need in of_rank}):
        of_layer = {number: [need for need in found if need.layer == layer] for number, found in enumerate(needs)}
        problems: list[str] = []
        while True:
            try:
                fetches = choose_sources(step, of_layer, node_of, bitmap)
            except LookupError as error:
                raise CheckpointError("; ".join([str(error), *problems])) from None
            transfers = transfers_between(fetches, node_of)
            outgoing: dict[Transfer, Tensor] = {}
            failure = _read(fetches[rank], transfers, by_key, index, reader, outgoing, node_of[rank], step)
            if failure is not None:
                warnings.warn(f"a checkpoint is damaged: {failure[1]}; other copies are looked for", stacklevel=2)
            failures: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(failures, failure)
            if not any(failures):
                break
            for reason in failures:
                if reason is not None:
                    location, problem = reason
                    problems.append(problem)
                    bitmap.discard(step, layer, location)
        received += exchange(transfers, outgoing, by_key)
    return received


def _bitmap(checkpoint: WholeCheckpoint, index: SavedIndex, nodes: set[str]) -> Bitmap:
    bitmap = Bitmap()
    for copy in checkpoint.copies:
        if copy.node and copy.node not in nodes:
            continue
        location = Location(copy.node, StorageTier.DISK if copy.node else StorageTier.SHARED)
        for name in copy.files:
            for item in index.files[name].items:
                bitmap.add(checkpoint.step, index.files[name].layer, item.key, item.box, location)
    return bitmap


def _read(
    fetches: Sequence[Fetch],
    transfers: Sequence[Transfer],
    pieces: Mapping[str, Sequence[TensorPiece]],
    index: SavedIndex,
    reader: CheckpointReader,
    outgoing: dict[Transfer, Tensor],
    node: str,
    step: int,
) -> tuple[Location, str] | None:
    """Read what this rank needs from folders that it reaches, and what it sends, into ``outgoing``.

    Returns:
        the first location with something that cannot be read, and why; None if there is none.
    """
    reads: dict[Location, list[TensorPiece]] = {}
    for fetch in fetches:
        if fetch.location.tier == StorageTier.SHARED or fetch.location.node == node:
            piece = piece_with(pieces[fetch.key], fetch.box)
            data = piece.data[piece.box.slices_of(fetch.box)] if fetch.box.sizes else piece.data
            reads.setdefault(fetch.location, []).append(replace(piece, box=fetch.box, data=data))
    for transfer in transfers:
        if transfer.sender == dist.get_rank():
            outgoing[transfer] = torch.empty(transfer.box.sizes, dtype=getattr(torch, index.dtypes[transfer.key]))
            sent = TensorPiece(
                transfer.layer, transfer.key, index.shapes[transfer.key], transfer.box, outgoing[transfer], ""
            )
            reads.setdefault(Location(node, transfer.tier), []).append(sent)
    for location, targets in sorted(reads.items(), key=lambda each: each[0]):
        try:
            reader.load(targets, step)
        except CheckpointError as error:
            return location, str(error)
    return None
