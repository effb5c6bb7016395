"""How long the pipelines of a candidate take to sum their gradients."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster.all_reduce import concurrent_seconds, synchronization_seconds
from ..cluster.topology import Topology
from ..slots.tp_groups import cut_points

__all__ = ["GradientTimes"]

Groups = Sequence[Sequence[tuple[int, ...]]]
"""Ranks of the tensor-parallel group of each stage of each pipeline."""


class GradientTimes:
    """Times on one cluster. What was computed once is looked up."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._node_of = [device.node for device in topology.devices]
        self._rings: dict[object, float] = {}
        self._of_size: dict[object, tuple[float, ...]] = {}

    def seconds(
        self,
        node_kind: NDArray[np.int64],
        groups: Groups,
        bounds: Sequence[tuple[int, ...]],
        gradient_bytes: NDArray[np.float64],
    ) -> float:
        """Seconds until every stage has summed the gradients of its blocks, all stages at once.

        A block's gradients are summed over the stages that hold it; blocks that the same stages hold are summed
        together.

        Args:
            node_kind: By node; nodes of one kind have equal links.
            groups: The ranks of each stage.
            bounds: Of the stages of each pipeline.
            gradient_bytes: By block, per device.

        Raises:
            ValueError: Ranks cannot reach each other.
        """
        if len(groups) == 1:
            return 0.0
        if len(set(bounds)) == 1:
            return self._of_equal_cuts(groups, bounds[0], gradient_bytes)
        width = len(groups[0][0])
        node_of = self._node_of
        slots_on = Counter(node_of[ranks[0]] for pipeline in groups for ranks in pipeline)
        cuts = cut_points(bounds)
        total = np.concatenate([[0.0], np.cumsum(gradient_bytes)])
        spent: Counter[int] = Counter()
        stage_of = [np.searchsorted(cut, cuts[:-1], side="right") - 1 for cut in bounds]
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            ring = [pipeline[int(stages[number])][0] for pipeline, stages in zip(groups, stage_of, strict=True)]
            nodes = Counter(node_of[rank] for rank in ring)
            # A ring leaves a node once, no matter how many of its members are in the node.
            sharing = width * max(math.ceil(slots_on[node] / count) for node, count in nodes.items())
            alike = Counter((int(node_kind[node]), count) for node, count in nodes.items())
            key = (len(nodes) == 1, frozenset(alike.items()), float(total[stop] - total[start]), sharing)
            if key not in self._rings:
                self._rings[key] = synchronization_seconds(self.topology, ring, key[2], sharing)
            for rank in ring:
                spent[rank] += self._rings[key]  # type: ignore[assignment]
        return float(max(spent.values()))

    def _of_equal_cuts(self, groups: Groups, bounds: tuple[int, ...], gradient_bytes: NDArray[np.float64]) -> float:
        rings, stage_of = [], []
        for stage, members in enumerate(zip(*groups, strict=True)):
            rings += list(zip(*members, strict=True))
            stage_of += [stage] * len(members[0])
        sizes = [float(gradient_bytes[start:stop].sum()) for start, stop in itertools.pairwise(bounds)]
        if min(sizes) <= 0:
            return max(concurrent_seconds(self.topology, rings, [sizes[stage] for stage in stage_of]))
        # If all rings sum something, the time of each depends on its own size only, and on the nodes of all rings.
        same = tuple(tuple(sorted(self._node_of[rank] for rank in ring)) for ring in rings)
        for size in sizes:
            if (same, size) not in self._of_size:
                self._of_size[same, size] = concurrent_seconds(self.topology, rings, [size] * len(rings))
        return max(self._of_size[same, sizes[stage]][ring] for ring, stage in enumerate(stage_of))
