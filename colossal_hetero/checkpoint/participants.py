"""Exchange of what ranks hold before they save, and division of the files among them."""

from __future__ import annotations

import secrets
import socket
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from ..common.ranks import of_every_rank
from .pieces import Box, TensorPiece


class ShardFile(NamedTuple):
    layer: str
    shard: str


@dataclass(frozen=True, order=True)
class Holding:
    rank: int
    node: str
    layer: str
    shard: str
    key: str
    box: Box
    bytes: int

    @property
    def file(self) -> ShardFile:
        return ShardFile(self.layer, self.shard)


@dataclass(frozen=True)
class FileDivision:
    """Files that each rank writes. Ranks that write nothing are left out."""

    local: Mapping[int, tuple[ShardFile, ...]]
    """Files for its node's local folder, by rank. On each node every file that a rank holds is written once."""
    shared: Mapping[int, tuple[ShardFile, ...]]
    """Files for the shared folder, by rank, each written once. A rank uploads what it has written locally."""


File = TypeVar("File", bound=Hashable)
Holder = TypeVar("Holder", bound=Hashable)


def spread(sizes: Mapping[File, int], holders: Mapping[File, Sequence[Holder]]) -> dict[File, Holder]:
    """Give each file to one of its holders, so that the largest load is small: greedily, then by moves that help."""
    order = {file: index for index, file in enumerate(sizes)}
    loads: dict[Holder, int] = {holder: 0 for file in sizes for holder in holders[file]}
    chosen: dict[File, Holder] = {}
    for file in sorted(sizes, key=lambda file: (len(holders[file]), -sizes[file], order[file])):
        chosen[file] = min(holders[file], key=lambda holder: loads[holder])
        loads[chosen[file]] += sizes[file]
    while loads:
        most = max(loads.values())
        moves = [
            (max(loads[other] + sizes[file], most - sizes[file]), order[file], file, other)
            for file, holder in chosen.items()
            if loads[holder] == most
            for other in holders[file]
            if loads[other] + sizes[file] < most
        ]
        if not moves:
            break
        _, _, file, other = min(moves, key=lambda move: move[:2])
        loads[chosen[file]] -= sizes[file]
        loads[other] += sizes[file]
        chosen[file] = other
    return chosen


def divide_files(holdings: Iterable[Holding], *, with_local: bool = True) -> FileDivision:
    boxes: dict[ShardFile, dict[int, set[tuple[str, Box]]]] = defaultdict(lambda: defaultdict(set))
    nodes: dict[int, str] = {}
    sizes: dict[ShardFile, int] = {}
    held: dict[tuple[int, ShardFile], int] = defaultdict(int)
    for holding in sorted(holdings):
        boxes[holding.file][holding.rank].add((holding.key, holding.box))
        nodes[holding.rank] = holding.node
        held[holding.rank, holding.file] += holding.bytes
    for file in sorted(boxes):
        (first, reference), *others = boxes[file].items()
        for rank, own in others:
            if own != reference:
                key, box = min(own ^ reference)
                raise ValueError(
                    f"ranks {first} and {rank} hold shard {file.shard} of {file.layer}, but only one of them holds "
                    f"elements {box.offsets} to +{box.sizes} of {key}; ranks with different boxes of a layer must give "
                    "its shard different names"
                )
        sizes[file] = held[first, file]
    uploading = spread(sizes, {file: sorted({nodes[rank] for rank in boxes[file]}) for file in sizes})
    local: dict[int, list[ShardFile]] = defaultdict(list)
    shared: dict[int, list[ShardFile]] = defaultdict(list)
    for node in sorted(set(nodes.values())):
        ranks = {file: [rank for rank in boxes[file] if nodes[rank] == node] for file in sizes}
        written = {
            file: size for file, size in sizes.items() if ranks[file] and (with_local or uploading[file] == node)
        }
        for file, rank in spread(written, ranks).items():
            if with_local:
                local[rank].append(file)
            if uploading[file] == node:
                shared[rank].append(file)
    return FileDivision(
        {rank: tuple(sorted(files)) for rank, files in sorted(local.items())},
        {rank: tuple(sorted(files)) for rank, files in sorted(shared.items())},
    )


@dataclass(frozen=True)
class Participants:
    """State that is equal on all ranks, except for :attr:`rank`."""

    rank: int
    nodes: tuple[str, ...]
    holdings: tuple[Holding, ...]
    run: str  # name that differs between all runs that save into the same folders

    @property
    def node(self) -> str:
        return self.nodes[self.rank]

    @property
    def leaders(self) -> dict[str, int]:
        """First rank of each node, which finishes the node's local folder."""
        return {node: self.nodes.index(node) for node in sorted(set(self.nodes))}


def holdings_of(rank: int, node: str, pieces: Iterable[TensorPiece]) -> tuple[Holding, ...]:
    return tuple(
        Holding(rank, node, each.layer, each.shard, each.key, each.box, each.data.numel() * each.data.element_size())
        for each in pieces
    )


def gather_participants(pieces: Sequence[TensorPiece], node: str | None = None) -> Participants:
    """Exchange what each rank holds. All ranks call it, before the first save and when that has changed."""
    node = node or socket.gethostname()
    run = secrets.token_hex(4)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Participants(0, (node,), holdings_of(0, node, pieces), run)
    rank = dist.get_rank()
    everyone = of_every_rank((node, holdings_of(rank, node, pieces), run))
    return Participants(
        rank,
        tuple(node for node, _, _ in everyone),
        tuple(holding for _, holdings, _ in everyone for holding in holdings),
        everyone[0][2],
    )
