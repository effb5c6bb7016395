"""Time that the pipelines of a candidate take to sum their gradients."""

import heapq
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from ..cluster.all_reduce import ConcurrentRings, synchronization_seconds
from ..cluster.topology import Topology

Groups = Sequence[Sequence[tuple[int, ...]]]
"""Ranks of the tensor-parallel group of each stage of each pipeline."""

Ring = tuple[int, ...]
"""The nodes of the members of a ring, ascending."""


class GradientTimes:
    """Times on one cluster, each computed once. Nodes of one kind have equal links, so sets of rings that differ only
    by nodes of one kind take equally long if the order of the nodes, in which a ring visits them, is the same."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.node_of = [device.node for device in topology.devices]
        self._alike: dict[object, Callable[[int, float], float]] = {}
        self._rings: dict[object, float] = {}

    def equal_cuts(
        self, node_kind: NDArray[np.int64], rings: Sequence[Ring], width: int
    ) -> Callable[[int, float], float]:
        """The seconds of each stage for so many bytes, if pipelines are cut alike and all stages sum something:
        ``width`` equal rings for each."""
        nodes = sorted(set(itertools.chain.from_iterable(rings)))
        number = {node: place for place, node in enumerate(nodes)}
        key = (width, tuple(node_kind[nodes].tolist()), tuple(tuple(map(number.__getitem__, ring)) for ring in rings))
        if key not in self._alike:
            concurrent = ConcurrentRings(self.topology, [ring for ring in rings for _ in range(width)])
            self._alike[key] = cache(lambda stage, size: concurrent.seconds(rings[stage], size))
        return self._alike[key]

    def ring_seconds(
        self, node_kind: Sequence[int], members: Mapping[int, int], ranks: Iterable[int], size: float, sharing: int
    ) -> float:
        """Seconds of a ring of these ranks, so many members in a node, that sums ``size`` bytes; see
        ``synchronization_seconds``."""
        alike = tuple(sorted([(node_kind[node], count) for node, count in members.items()]))
        key = (len(members) == 1, alike, size, sharing)
        if key not in self._rings:
            self._rings[key] = synchronization_seconds(self.topology, list(ranks), size, sharing)
        return self._rings[key]


class Summing:
    """The sums of gradients of given pipelines, for any cuts. Blocks that the same stages hold are summed together."""

    def __init__(
        self, times: GradientTimes, node_kind: NDArray[np.int64], groups: Groups, gradient_bytes: NDArray[np.float64]
    ) -> None:
        self._times, self._node_kind, self._groups = times, node_kind, groups
        self._nodes = [[times.node_of[ranks[0]] for ranks in pipeline] for pipeline in groups]
        self._width = len(groups[0][0])
        self._total: list[float] = [0.0, *np.cumsum(gradient_bytes).tolist()]

    def seconds(self, bounds: Sequence[tuple[int, ...]], below: float = math.inf) -> float:
        """Seconds until every stage has summed the gradients of its blocks, all stages at once; or any time that is not
        less than ``below`` if this is not, either."""
        if len(self._groups) == 1:
            return 0.0
        return self._of_equal_cuts(bounds[0], below) if len(set(bounds)) == 1 else self._of_any_cuts(bounds, below)

    def _of_equal_cuts(self, bounds: tuple[int, ...], below: float) -> float:
        sizes = [self._total[stop] - self._total[start] for start, stop in itertools.pairwise(bounds)]
        if min(sizes) <= 0:
            # Rings that sum nothing leave their share of the networks to the others.
            used = [(ring, size) for ring, size in zip(self._rings, sizes, strict=True) if size > 0]
            concurrent = ConcurrentRings(self._times.topology, [ring for ring, _ in used for _ in range(self._width)])
            return max((concurrent.seconds(ring, size) for ring, size in used), default=0.0)
        longest = 0.0
        for size, stage in sorted(zip(sizes, itertools.count()), reverse=True):
            longest = max(longest, self._equal_cuts(stage, size))
            if not longest < below:
                break
        return longest

    @cached_property
    def _rings(self) -> list[Ring]:
        """Ring of each stage, if all pipelines have equally many."""
        return [tuple(sorted(members)) for members in zip(*self._nodes, strict=True)]

    @cached_property
    def _equal_cuts(self) -> Callable[[int, float], float]:
        return self._times.equal_cuts(self._node_kind, self._rings, self._width)

    def _of_any_cuts(self, bounds: Sequence[tuple[int, ...]], below: float) -> float:
        slots_on = Counter(itertools.chain.from_iterable(self._nodes))
        cuts = sorted(set(itertools.chain.from_iterable(bounds)))
        stage_of = [[bisect_right(cut, start) - 1 for start in cuts[:-1]] for cut in bounds]
        spent: Counter[tuple[int, int]] = Counter()
        kind_of = self._node_kind.tolist()
        for (start, stop), stages in zip(itertools.pairwise(cuts), zip(*stage_of, strict=True), strict=True):
            ring = (pipeline[stage][0] for pipeline, stage in zip(self._groups, stages, strict=True))
            count_on = Counter([nodes[stage] for nodes, stage in zip(self._nodes, stages, strict=True)])
            # A ring leaves a node once, no matter how many of its members are in the node.
            sharing = self._width * max(math.ceil(slots_on[node] / count) for node, count in count_on.items())
            size = self._total[stop] - self._total[start]
            seconds = self._times.ring_seconds(kind_of, count_on, ring, size, sharing)
            for member in enumerate(stages):
                spent[member] += seconds  # type: ignore[assignment]
            if not max(spent.values()) < below:
                break
        return float(max(spent.values()))


def even_end(ends: NDArray[np.float64], steps: NDArray[np.float64], micro_batches: int) -> float:
    """Time at which pipelines end that get some of so many further micro-batches, if these could be divided."""
    order = np.argsort(ends, kind="stable")
    return float(((micro_batches + np.cumsum((ends / steps)[order])) / np.cumsum((1.0 / steps)[order])).min())


def divide_micro_batches(
    fill: Sequence[float] | NDArray[np.float64],
    longest: Sequence[float] | NDArray[np.float64],
    micro_batches: int,
    minimum: Sequence[int],
    most: Sequence[int] | NDArray[np.int64] | None = None,
) -> list[int]:
    """Numbers of micro-batches with which the last pipeline ends as early as possible, ``[pipelines]``.

    The first micro-batch of a pipeline takes ``fill`` seconds and each further one ``longest``. Beyond the ``minimum``,
    pipelines get those that end first, up to ``most``.
    """
    fewest, steps = np.asarray(minimum), np.maximum(np.asarray(longest), 1e-15)
    ends = np.asarray(fill) + (fewest - 1) * steps
    limits = np.full(len(ends), micro_batches) if most is None else np.asarray(most)
    level = even_end(ends, steps, micro_batches - int(fewest.sum())) * (1 - 1e-12)  # no whole micro-batch ends later
    counts = np.minimum(fewest + np.maximum((level - ends) // steps, 0).astype(np.int64), limits)
    following = [
        (end, number)
        for number, end in enumerate((ends + (counts - fewest + 1) * steps).tolist())
        if counts[number] < limits[number]
    ]
    heapq.heapify(following)
    for _ in range(micro_batches - int(counts.sum())):
        end, number = heapq.heappop(following)
        counts[number] += 1
        if counts[number] < limits[number]:
            heapq.heappush(following, (end + float(steps[number]), number))
    return [int(count) for count in counts]
