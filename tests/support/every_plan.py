"""The best of all plans of a few lone devices, found by trying every one, without the planner's search.

A plan is priced as ``predict_plan`` does: each pipeline by ``evaluate`` over the channels of ``hop_channels``, and the
gradients of equal pipelines by ``concurrent_seconds``. A device that has the whole model also holds its gradients in
the buckets of DistributedDataParallel.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from colossal_hetero.planner.cluster.all_reduce import concurrent_seconds, synchronization_seconds
from colossal_hetero.planner.cluster.topology import Channel, Topology
from colossal_hetero.planner.cost.ranked_plan import MIN_GAIN
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.stages.pipeline import Pipeline, PipelineCost, Slot, Split, evaluate
from tests.support.shared_hops import hop_channels

__all__ = ["EveryPlan", "arrangements", "last_end"]

Arrangement = tuple[tuple[int, ...], ...]
"""Devices of each pipeline in the order of the stages."""


def arrangements(devices: Sequence[int]) -> Iterator[Arrangement]:
    """Every way to form pipelines of some of these devices, in every order of the stages."""

    def pipelines(left: Sequence[int], above: tuple[int, ...]) -> Iterator[Arrangement]:
        yield ()
        for length in range(1, len(left) + 1):
            for one in itertools.permutations(left, length):
                if one > above:
                    rest = [device for device in left if device not in one]
                    yield from ((one, *others) for others in pipelines(rest, one))

    yield from (each for each in pipelines(devices, ()) if each)


class EveryPlan:
    """All plans without tensor parallelism for one cluster, model and global batch."""

    def __init__(self, topology: Topology, profile: ModelProfile, global_batch: int) -> None:
        self.topology = topology
        self.profile = profile
        self.global_batch = global_batch
        self._costs: dict[object, PipelineCost] = {}

    def best_seconds(self, *, unequal: bool) -> float:
        """The time of the best plan that can be run; infinite if none fits in memory.

        A pipeline has at least as many micro-batches as stages.

        Args:
            unequal: Also pipelines that are not alike, if they are faster by ``MIN_GAIN`` than those that are.
        """
        equal = self._best_of(self._equal)
        if not unequal:
            return equal
        best = self._best_of(self._unequal)
        return best if best * MIN_GAIN < equal else equal

    def _best_of(self, try_all: Callable[..., float]) -> float:
        best = np.inf
        sizes = {times.micro_batch for times in self.profile.times if self.global_batch % times.micro_batch == 0}
        for arrangement in arrangements(range(len(self.topology.devices))):
            if max(map(len, arrangement)) > self.profile.blocks:
                continue
            try:
                hops = hop_channels(self.topology, arrangement)
            except ValueError:
                continue  # neighboring stages cannot reach each other
            for size in sorted(sizes):
                total = self.global_batch // size
                if len(arrangement) <= total:
                    best = min(best, try_all(arrangement, hops, size, total, best))
        return best

    def _equal(
        self, arrangement: Arrangement, hops: Sequence[Sequence[Channel]], size: int, total: int, best: float
    ) -> float:
        replicas, stages = len(arrangement), len(arrangement[0])
        count, rest = divmod(total, replicas)
        if rest or len(set(map(len, arrangement))) > 1 or (stages > 1 and stages > count):
            return best
        for bounds in self._all_bounds(stages):
            costs = [
                self._cost(each, channels, size, count, bounds)
                for each, channels in zip(arrangement, hops, strict=True)
            ]
            seconds = max(cost.seconds for cost in costs)
            if seconds < best and all(cost.fits for cost in costs):
                best = min(best, seconds + self._synchronization(arrangement, size, [bounds] * replicas))
        return best

    def _unequal(
        self, arrangement: Arrangement, hops: Sequence[Sequence[Channel]], size: int, total: int, best: float
    ) -> float:
        """Pipelines of any cuts and numbers of micro-batches; those that are alike are among them."""
        stages = sum(map(len, arrangement))
        if stages > total:
            return best
        choices = []
        for each, channels in zip(arrangement, hops, strict=True):
            choice = []
            counts = range(len(each), total - (stages - len(each)) + 1)
            for bounds in self._all_bounds(len(each)):
                costs = [self._cost(each, channels, size, count, bounds) for count in counts]
                too_few = [np.inf] * len(each)
                by_count = np.array([*too_few, *(cost.seconds if cost.fits else np.inf for cost in costs)])
                if by_count.min() < best:
                    choice.append((bounds, by_count))
            choices.append(choice)
        for chosen in itertools.product(*choices):
            seconds = last_end([by_count for _, by_count in chosen], total)
            if seconds < best:
                try:
                    summed = self._synchronization(arrangement, size, [bounds for bounds, _ in chosen])
                except ValueError:
                    continue
                best = min(best, seconds + summed)
        return best

    def _all_bounds(self, stages: int) -> list[tuple[int, ...]]:
        blocks = self.profile.blocks
        return [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), stages - 1)]

    def _cost(
        self, devices: Sequence[int], hops: Sequence[Channel], size: int, count: int, bounds: tuple[int, ...]
    ) -> PipelineCost:
        kinds = tuple((self.topology.devices[each].kind, self.topology.devices[each].speed) for each in devices)
        key = kinds, tuple(hops), size, count, bounds
        if key not in self._costs:
            buckets = sum(self.profile.sizes[0].parameter_bytes) if len(devices) == 1 else 0
            slots = tuple(
                Slot(kind.name, self.profile.costs(kind.name, 1, size, speed), kind.memory_bytes - buckets)
                for kind, speed in kinds
            )
            channels = [[Channel("unused", 1.0)] * len(slots) for _ in slots]
            for stage, channel in enumerate(hops):
                channels[stage][stage + 1] = channel
            pipeline = Pipeline(slots, tuple(map(tuple, channels)), count)
            self._costs[key] = evaluate(pipeline, Split(tuple(range(len(slots))), bounds))
        return self._costs[key]

    def _synchronization(self, arrangement: Arrangement, size: int, bounds: Sequence[tuple[int, ...]]) -> float:
        if len(arrangement) == 1:
            return 0.0
        device = self.topology.devices[arrangement[0][0]]
        gradient = self.profile.costs(device.kind.name, 1, size, device.speed).gradient_bytes
        if len(set(bounds)) == 1:
            sizes = [float(gradient[start:stop].sum()) for start, stop in itertools.pairwise(bounds[0])]
            try:
                return max(concurrent_seconds(self.topology, list(zip(*arrangement, strict=True)), sizes))
            except ValueError:
                return np.inf
        # Each run of blocks between two cuts is summed over the devices that hold it; a device sums its runs in turn.
        node_of = [device.node for device in self.topology.devices]
        on_node = Counter(node_of[device] for each in arrangement for device in each)
        spent: Counter[int] = Counter()
        for start, stop in itertools.pairwise(sorted(set(itertools.chain.from_iterable(bounds)))):
            group = [
                each[int(np.searchsorted(cut, start, side="right")) - 1]
                for each, cut in zip(arrangement, bounds, strict=True)
            ]
            nodes = Counter(node_of[device] for device in group)
            sharing = max(math.ceil(on_node[node] / here) for node, here in nodes.items()) if len(nodes) > 1 else 1
            seconds = synchronization_seconds(self.topology, group, float(gradient[start:stop].sum()), sharing)
            for one in group:
                spent[one] += seconds  # type: ignore[assignment]
        return max(spent.values())


def last_end(by_count: Sequence[NDArray[np.float64]], total: int) -> float:
    """The earliest end of the last pipeline over all divisions of ``total`` micro-batches, from their ends by count."""
    reached = np.full(total + 1, np.inf)
    reached[0] = 0.0
    for ends in by_count:
        after = np.full(total + 1, np.inf)
        for count in range(1, len(ends)):
            after[count:] = np.minimum(after[count:], np.maximum(reached[: total + 1 - count], ends[count]))
        reached = after
    return float(reached[total])
