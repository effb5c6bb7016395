"""How long stages of different tensor-parallel degrees take to sum their gradients.

[Note: sums of unlike stages] The members of a sum are the tensor-parallel groups that hold a block, one of every
pipeline. Groups of one degree have a ring for each place in the group. If degrees differ, there are as many rings as
the smallest group has members, each with an equal share of the gradients. A larger group divides its part over more
devices, so that as many bytes leave its node; rings are as fast as the smallest group can send. For equal degrees this
is what ``gradient_times.py`` says.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cluster.all_reduce import concurrent_seconds, synchronization_seconds
from ..cluster.topology import Topology
from ..slots.tp_groups import cut_points

__all__ = ["SummingStage", "UnlikeSumming"]


class SummingStage(NamedTuple):
    """What a stage sums."""

    ranks: tuple[int, ...]
    """Of its tensor-parallel group."""
    gradient_bytes: NDArray[np.float64]
    """By block, per device."""


class UnlikeSumming:
    """The sums of given pipelines, for any cuts. See [Note: sums of unlike stages].

    Args:
        topology: Machines.
        stages: In the order of the blocks, ``[pipelines][stages]``.
    """

    def __init__(self, topology: Topology, stages: Sequence[Sequence[SummingStage]]) -> None:
        self._topology = topology
        self._stages = stages
        node_of = [device.node for device in topology.devices]
        self._nodes = [[node_of[stage.ranks[0]] for stage in row] for row in stages]
        self._groups_on = Counter(itertools.chain.from_iterable(self._nodes))

    def seconds(self, bounds: Sequence[tuple[int, ...]]) -> float:
        """Seconds until every stage has summed the gradients of its blocks, all stages at once.

        Args:
            bounds: Of the stages of each pipeline.

        Raises:
            ValueError: Ranks cannot reach each other.
        """
        return self._of_equal_cuts(bounds[0]) if len(set(bounds)) == 1 else self._of_any_cuts(bounds)

    def _of_equal_cuts(self, bounds: tuple[int, ...]) -> float:
        rings: list[list[int]] = []
        sizes: list[float] = []
        for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
            holders = [row[stage] for row in self._stages]
            lanes, gradients = _lanes(holders)
            for lane in range(lanes):
                rings.append([holder.ranks[lane] for holder in holders])
                sizes.append(float(gradients[start:stop].sum()))
        return max(concurrent_seconds(self._topology, rings, sizes))

    def _of_any_cuts(self, bounds: Sequence[tuple[int, ...]]) -> float:
        cuts = cut_points(bounds)
        stage_of = np.array([np.searchsorted(cut, cuts[:-1], side="right") - 1 for cut in bounds])
        spent: Counter[tuple[int, int]] = Counter()
        for (start, stop), held in zip(itertools.pairwise(cuts), stage_of.T.tolist(), strict=True):
            holders = [row[stage] for row, stage in zip(self._stages, held, strict=True)]
            lanes, gradients = _lanes(holders)
            nodes = Counter(row[stage] for row, stage in zip(self._nodes, held, strict=True))
            # A ring leaves a node once, no matter how many of its members are in the node.
            sharing = lanes * max(math.ceil(self._groups_on[node] / here) for node, here in nodes.items())
            ring = [holder.ranks[0] for holder in holders]
            seconds = synchronization_seconds(self._topology, ring, float(gradients[start:stop].sum()), sharing)
            for member in enumerate(held):
                spent[member] += seconds  # type: ignore[assignment]
        return float(max(spent.values()))


def _lanes(holders: Sequence[SummingStage]) -> tuple[int, NDArray[np.float64]]:
    """The number of rings over these stages, and the bytes that each sums, by block."""
    smallest = min(holders, key=lambda holder: len(holder.ranks))
    return len(smallest.ranks), smallest.gradient_bytes
