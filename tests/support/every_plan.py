"""The best of all plans of a few devices in 1F1B, found by trying every one, without the planner.

A stage is a tensor-parallel group of any devices of one kind in a node, with or without recomputation; with ZeRO stage
0 or 1. All stages of a plan have one degree. Pipelines are priced one by one by ``evaluate`` with what each
stage was given, over the channels of ``hop_channels``. Sums of gradients are worked out here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colossal_hetero.planner.cluster.all_reduce import concurrent_seconds, synchronization_seconds
from colossal_hetero.planner.cluster.topology import Channel, Topology
from colossal_hetero.planner.cost.ranked_plan import MIN_GAIN
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.stages.pipeline import Slot, evaluate
from tests.support.shared_hops import hop_channels

__all__ = ["EveryPlan", "wishes_to_prove"]


Stage = tuple[int, ...]
"""Devices of a stage."""
Pipelines = tuple[tuple[Stage, ...], ...]


class EveryPlan:
    """All plans for one cluster, model and global batch."""

    def __init__(
        self,
        topology: Topology,
        profile: ModelProfile,
        global_batch: int,
        *,
        recompute: bool = False,
        zero_stages: Sequence[int] = (0,),
    ) -> None:
        self.topology = topology
        self.profile = profile
        self.global_batch = global_batch
        self.recompute = recompute
        self.zero_stages = zero_stages
        self._known: dict[object, float] = {}

    def best_seconds(self, *, unequal: bool) -> float:
        """The time of the best plan; infinite if none fits in memory. Plans whose replicas are not alike must be
        faster by ``MIN_GAIN`` than others, and so must plans with ZeRO stage 1 or recomputation."""
        may_recompute = (False, True) if self.recompute else (False,)
        found: list[tuple[float, float]] = []
        for zero, again in itertools.product(self.zero_stages, may_recompute):
            for equal in (True, False) if unequal else (True,):
                seconds = self._least_seconds(zero, again, equal)
                found.append((seconds * (1 if equal else MIN_GAIN) * (MIN_GAIN if zero or again else 1), seconds))
        return min(found)[1]

    def _least_seconds(self, zero: int, again: bool, equal: bool) -> float:
        best = np.inf
        sizes = {times.micro_batch for times in self.profile.times if self.global_batch % times.micro_batch == 0}
        degrees = {times.tensor_parallel for times in self.profile.times}
        for degree in sorted(degrees):
            for pipelines in self._all_pipelines(tuple(range(len(self.topology.devices))), degree):
                if not pipelines or max(map(len, pipelines)) > self.profile.blocks:
                    continue
                if zero and len(pipelines) == 1:
                    continue  # there is nothing to divide
                lanes = [[stage[place] for stage in row] for row in pipelines for place in range(degree)]
                try:
                    hops = hop_channels(self.topology, lanes)[::degree]
                except ValueError:
                    continue  # neighboring stages cannot reach each other
                for size in sorted(sizes):
                    if all(self._measured(stage, size) for row in pipelines for stage in row):
                        total = self.global_batch // size
                        try_all = self._equal if equal else self._unequal
                        best = min(best, try_all(pipelines, hops, size, total, zero, again, best))
        return best

    def _all_pipelines(self, left: tuple[int, ...], degree: int) -> Iterator[Pipelines]:
        """Every way to form pipelines of some of these devices; those of a pipeline's lowest device come first."""
        if not left:
            yield ()
            return
        yield from self._all_pipelines(left[1:], degree)
        for number in range(degree - 1, len(left), degree):
            for others in itertools.combinations(left[1:], number):
                rest = tuple(device for device in left[1:] if device not in others)
                for one in self._all_stages((left[0], *others), degree):
                    yield from ((one, *more) for more in self._all_pipelines(rest, degree))

    def _all_stages(self, devices: tuple[int, ...], degree: int) -> Iterator[tuple[Stage, ...]]:
        """Every pipeline that uses all of these devices."""
        if not devices:
            yield ()
            return
        for ranks in itertools.combinations(devices, degree):
            rest = tuple(device for device in devices if device not in ranks)
            if self._is_stage(ranks):
                yield from ((ranks, *others) for others in self._all_stages(rest, degree))

    def _is_stage(self, ranks: tuple[int, ...]) -> bool:
        devices = [self.topology.devices[rank] for rank in ranks]
        if len({(device.kind.name, device.node) for device in devices}) > 1:
            return False
        return len(ranks) in self.profile.tensor_parallel_degrees(devices[0].kind.name)

    def _measured(self, stage: Stage, size: int) -> bool:
        known = self.profile.micro_batches(self.topology.devices[stage[0]].kind.name, len(stage))
        return known[0] <= size <= known[-1]

    def _all_bounds(self, stages: int) -> list[tuple[int, ...]]:
        blocks = self.profile.blocks
        return [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), stages - 1)]

    def _equal(
        self,
        pipelines: Pipelines,
        hops: Sequence[Sequence[Channel]],
        size: int,
        total: int,
        zero: int,
        again: bool,
        best: float,
    ) -> float:
        stages, (count, rest) = len(pipelines[0]), divmod(total, len(pipelines))
        if rest or not count or len(set(map(len, pipelines))) > 1 or (stages > 1 and stages > count):
            return best
        shards = len(pipelines) if zero else None
        for bounds in self._all_bounds(stages):
            seconds = max(
                self._seconds(each, channels, size, count, bounds, shards, again)
                for each, channels in zip(pipelines, hops, strict=True)
            )
            if seconds < best:
                best = min(best, seconds + self._sums(pipelines, [bounds] * len(pipelines)))
        return best

    def _unequal(
        self,
        pipelines: Pipelines,
        hops: Sequence[Sequence[Channel]],
        size: int,
        total: int,
        zero: int,
        again: bool,
        best: float,
    ) -> float:
        stages, shards = sum(map(len, pipelines)), len(pipelines) if zero else None
        if stages > total:
            return best
        choices: list[list[tuple[tuple[int, ...], NDArray[np.float64]]]] = []
        for each, channels in zip(pipelines, hops, strict=True):
            counts = range(len(each), total - (stages - len(each)) + 1)
            choice = []
            for bounds in self._all_bounds(len(each)):
                ends = [self._seconds(each, channels, size, count, bounds, shards, again) for count in counts]
                by_count = np.array([np.inf] * len(each) + ends)
                if by_count.min() < best:
                    choice.append((bounds, by_count))
            choices.append(choice)
        for chosen in itertools.product(*choices):
            seconds = _last_end([by_count for _, by_count in chosen], total)
            if seconds < best:
                best = min(best, seconds + self._sums(pipelines, [bounds for bounds, _ in chosen]))
        return best

    def _seconds(
        self,
        stages: Sequence[Stage],
        hops: Sequence[Channel],
        size: int,
        count: int,
        bounds: tuple[int, ...],
        pipelines: int | None,
        again: bool,
    ) -> float:
        """Of a pipeline with the best choice of stages that recompute; infinite if it fits with none."""
        looks = tuple(self._look(stage) for stage in stages)
        key = looks, tuple(hops), size, count, bounds, pipelines, again
        if key not in self._known:
            may = (False, True) if again else (False,)
            choices = [[self._slot(stage, size, len(stages), pipelines, each) for each in may] for stage in stages]
            costs = [evaluate(chosen, hops, count, bounds) for chosen in itertools.product(*choices)]
            self._known[key] = min((cost.seconds for cost in costs if cost.fits), default=np.inf)
        return self._known[key]

    def _look(self, stage: Stage) -> tuple[object, ...]:
        devices = [self.topology.devices[rank] for rank in stage]
        return devices[0].kind, min(device.speed for device in devices), len(stage)

    def _slot(self, stage: Stage, size: int, stages: int, pipelines: int | None, again: bool) -> Slot:
        kind, speed, degree = self._look(stage)
        costs = self.profile.costs(kind.name, degree, size, speed, recompute=again, zero_shards=pipelines or 1)
        return Slot(kind.name, costs, costs.memory_for_blocks(kind.usable_bytes, stages))

    def _sums(self, pipelines: Pipelines, bounds: Sequence[tuple[int, ...]]) -> float:
        """Seconds until all gradients are summed; infinite if devices cannot reach each other."""
        try:
            if len(set(bounds)) == 1:
                return self._sums_of_equal(pipelines, bounds[0])
            return self._sums_of_runs(pipelines, bounds)
        except ValueError:
            return np.inf

    def _gradient_bytes(self, degree: int, start: int, stop: int) -> float:
        """Bytes that each ring sums for these blocks; there are as many rings as a group has members."""
        sizes = next(each for each in self.profile.sizes if each.tensor_parallel == degree)
        by_layer = [0.0, *sizes.parameter_bytes[1:-1], 0.0]
        by_layer[1] += sizes.parameter_bytes[0]
        by_layer[-2] += sizes.parameter_bytes[-1]
        return sum(by_layer[1 + start : 1 + stop]) * self.profile.gradient_factor

    def _sums_of_equal(self, pipelines: Pipelines, bounds: tuple[int, ...]) -> float:
        degree = len(pipelines[0][0])
        rings, sizes = [], []
        for place, (start, stop) in enumerate(itertools.pairwise(bounds)):
            rings += [[pipeline[place][0] for pipeline in pipelines]] * degree
            sizes += [self._gradient_bytes(degree, start, stop)] * degree
        return max(concurrent_seconds(self.topology, rings, sizes))

    def _sums_of_runs(self, pipelines: Pipelines, bounds: Sequence[tuple[int, ...]]) -> float:
        """Each run of blocks between two cuts is summed over the groups that hold it; a stage sums its runs in turn."""
        degree, node_of = len(pipelines[0][0]), [device.node for device in self.topology.devices]
        on_node = Counter(node_of[stage[0]] for pipeline in pipelines for stage in pipeline)
        spent: dict[Stage, float] = {}
        for start, stop in itertools.pairwise(sorted(set(itertools.chain.from_iterable(bounds)))):
            holders = [
                next(stage for stage, end in zip(pipeline, cut[1:], strict=True) if start < end)
                for pipeline, cut in zip(pipelines, bounds, strict=True)
            ]
            members = [stage[0] for stage in holders]
            here = Counter(node_of[member] for member in members)
            sharing = degree * max(math.ceil(on_node[node] / count) for node, count in here.items())
            size = self._gradient_bytes(degree, start, stop)
            seconds = synchronization_seconds(self.topology, members, size, sharing)
            for stage in holders:
                spent[stage] = spent.get(stage, 0.0) + seconds
        return max(spent.values())


def wishes_to_prove(number: int) -> dict[str, Any]:
    """Everything that plans can have, and parts of it in which other plans are the best, by turns."""
    wishes = (
        dict(recompute=True, zero_stages=(0, 1)),
        dict(recompute=False, zero_stages=(0, 1)),
        dict(recompute=True, zero_stages=(0,)),
        dict(recompute=False, zero_stages=(0,)),
        dict(recompute=True, zero_stages=(1,)),
    )
    return wishes[number % len(wishes)]


def _last_end(by_count: Sequence[NDArray[np.float64]], total: int) -> float:
    """The earliest end of the last pipeline over all divisions of ``total`` micro-batches, from their ends by count."""
    reached = np.full(total + 1, np.inf)
    reached[0] = 0.0
    for ends in by_count:
        after = np.full(total + 1, np.inf)
        for count in range(1, len(ends)):
            after[count:] = np.minimum(after[count:], np.maximum(reached[: total + 1 - count], ends[count]))
        reached = after
    return float(reached[total])
