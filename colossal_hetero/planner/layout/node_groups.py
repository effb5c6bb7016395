"""Tensor-parallel groups by the network they have in common, and stages made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from ..cluster.topology import Topology

__all__ = ["Cell", "Island", "Stage", "cells_of", "islands_of", "orders", "stages_of"]

MAX_ORDERED = 6
"""Islands up to which every order of them is tried."""

Cell = tuple[int, ...]
"""A tensor-parallel group."""
Stage = tuple[Cell, ...]
"""By replica."""
Island = tuple[tuple[Cell, ...], ...]
"""Nodes of a cluster with one kind of fastest NIC, each the tensor-parallel groups that it holds."""


def islands_of(topology: Topology, tensor_parallel: int) -> list[Island]:
    """All nodes that hold a tensor-parallel group, by cluster and fastest kind of NIC."""
    nodes: dict[tuple[int, str], list[tuple[Cell, ...]]] = defaultdict(list)
    for node in topology.nodes:
        cells = tuple(cells_of(topology, node.devices, tensor_parallel))
        if cells:
            nodes[node.cluster, node.nics[0].kind if node.nics else node.name].append(cells)
    return [tuple(island) for island in nodes.values()]


def cells_of(topology: Topology, devices: Sequence[int], tensor_parallel: int) -> Iterator[Cell]:
    """A node's devices in groups of one kind; what remains over stays out."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for device in devices:
        kinds[topology.devices[device].kind.name].append(device)
    for alike in kinds.values():
        for start in range(0, len(alike) - tensor_parallel + 1, tensor_parallel):
            yield tuple(alike[start : start + tensor_parallel])


def orders(islands: list[Island]) -> Iterator[tuple[Island, ...]]:
    """All orders of few islands; of many, as launched and by size. Nodes come as launched, then by size."""
    by_size: list[Island] = [tuple(sorted(island, key=lambda cells: -len(cells))) for island in islands]
    for ordered in (islands, by_size):
        if len(ordered) <= MAX_ORDERED:
            yield from permutations(ordered)
        else:
            yield tuple(ordered)
            yield tuple(sorted(ordered, key=lambda island: -sum(map(len, island))))


def stages_of(order: Sequence[Island], pipeline: int, replicas: int, compact: bool) -> tuple[Stage, ...] | None:
    """Whole stages of each island in turn, within nodes as far as they go; if these are too few, what is left over in
    all of them makes the rest, each stage behind the island that it begins in. None if there are too few.

    Args:
        compact: if there are more whole stages than needed, take those of the first islands; otherwise those within a
            node first.
    """
    found: list[_Found] = []
    left: list[tuple[int, Cell]] = []
    for place, island in enumerate(order):
        inside, _ = _cut([cell for cells in island for cell in cells[: len(cells) // replicas * replicas]], replicas)
        across, rest = _cut([cell for cells in island for cell in cells[len(cells) // replicas * replicas :]], replicas)
        found += [_Found(0, place, stage) for stage in inside] + [_Found(1, place, stage) for stage in across]
        left += [(place, cell) for cell in rest]
    if len(found) < pipeline:
        for start in range(0, len(left) - replicas + 1, replicas):
            chosen = left[start : start + replicas]
            found.append(_Found(2, chosen[0][0], tuple(cell for _, cell in chosen)))
    if len(found) < pipeline:
        return None
    found.sort(key=lambda one: (one.spread == 2, one.place if compact else 0, one.spread, one.place))
    kept = sorted(found[:pipeline], key=lambda one: (one.place, one.spread == 2, one.stage))
    return tuple(one.stage for one in kept)


@dataclass(frozen=True)
class _Found:
    spread: Literal[0, 1, 2]
    """Within a node, an island, or over several islands."""
    place: int
    """Of its first island in the order."""
    stage: Stage


def _cut(cells: list[Cell], replicas: int) -> tuple[list[Stage], list[Cell]]:
    """As many stages as there are, and what is left."""
    stop = len(cells) // replicas * replicas
    return [tuple(cells[start : start + replicas]) for start in range(0, stop, replicas)], cells[stop:]
