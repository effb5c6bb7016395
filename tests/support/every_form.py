"""The best of all plans of a few devices in the whole search space, found by trying every one, without the planner.

A stage is a tensor-parallel group of any devices of one kind in a node, with or without recomputation; with ZeRO stage
0 or 1. Pipelines are priced one by one by ``evaluate_stages`` with what each stage was given, over the channels of
``unlike_hop_channels``. Sums of gradients are worked out here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from colossal_hetero.planner.cluster.all_reduce import concurrent_seconds, synchronization_seconds
from colossal_hetero.planner.cluster.shared_hops import StageNode, unlike_hop_channels
from colossal_hetero.planner.cluster.topology import Channel, Topology
from colossal_hetero.planner.cost.ranked_plan import MIN_UNEQUAL_GAIN
from colossal_hetero.planner.cost.tp_groups import WHOLE, SearchSpace
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.profile.stage_costs import stage_costs
from colossal_hetero.planner.stages.pipeline import Slot, evaluate_stages
from tests.support.every_plan import last_end

__all__ = ["EveryForm", "spaces_to_prove"]


Stage = tuple[int, ...]
"""Devices of a stage."""
Pipelines = tuple[tuple[Stage, ...], ...]


class EveryForm:
    """All plans for one cluster, model and global batch in a search space."""

    def __init__(
        self, topology: Topology, profile: ModelProfile, global_batch: int, space: SearchSpace = WHOLE
    ) -> None:
        self.topology = topology
        self.profile = profile
        self.global_batch = global_batch
        self.space = space
        self._known: dict[object, float] = {}

    def best_seconds(self, *, unequal: bool) -> float:
        """As :meth:`.every_plan.EveryPlan.best_seconds`."""
        best = {True: np.inf, False: np.inf}
        sizes = sorted(
            {times.micro_batch for times in self.profile.times if self.global_batch % times.micro_batch == 0}
        )
        for pipelines in self._all_pipelines(tuple(range(len(self.topology.devices)))):
            if not pipelines or max(map(len, pipelines)) > self.profile.blocks:
                continue
            degrees = {len(stage) for pipeline in pipelines for stage in pipeline}
            if len(degrees) > 1 and not self.space.mixed_degrees:
                continue
            nodes = [[self._node(stage) for stage in pipeline] for pipeline in pipelines]
            try:
                hops = unlike_hop_channels(self.topology, nodes)
            except ValueError:
                continue  # neighboring stages cannot reach each other
            for size, zero in itertools.product(sizes, self.space.zero_stages):
                total = self.global_batch // size
                if not all(self._measured(stage, size) for row in pipelines for stage in row):
                    continue
                best[True] = min(best[True], self._equal(pipelines, hops, size, total, zero, best[True]))
                if unequal:
                    best[False] = min(best[False], self._unequal(pipelines, hops, size, total, zero, best[False]))
        return best[False] if best[False] * MIN_UNEQUAL_GAIN < best[True] else best[True]

    def _all_pipelines(self, left: tuple[int, ...]) -> Iterator[Pipelines]:
        """Every way to form pipelines of some of these devices; those of a pipeline's lowest device come first."""
        if not left:
            yield ()
            return
        yield from self._all_pipelines(left[1:])
        for number in range(len(left)):
            for others in itertools.combinations(left[1:], number):
                rest = tuple(device for device in left[1:] if device not in others)
                for one in self._all_stages((left[0], *others)):
                    yield from ((one, *more) for more in self._all_pipelines(rest))

    def _all_stages(self, devices: tuple[int, ...]) -> Iterator[tuple[Stage, ...]]:
        """Every pipeline that uses all of these devices."""
        if not devices:
            yield ()
            return
        for number in range(1, len(devices) + 1):
            for ranks in itertools.combinations(devices, number):
                rest = tuple(device for device in devices if device not in ranks)
                if self._is_stage(ranks):
                    yield from ((ranks, *others) for others in self._all_stages(rest))

    def _is_stage(self, ranks: tuple[int, ...]) -> bool:
        devices = [self.topology.devices[rank] for rank in ranks]
        if len({(device.kind.name, device.node) for device in devices}) > 1:
            return False
        return len(ranks) in self.profile.tensor_parallel_degrees(devices[0].kind.name)

    def _measured(self, stage: Stage, size: int) -> bool:
        known = self.profile.micro_batches(self.topology.devices[stage[0]].kind.name, len(stage))
        return known[0] <= size <= known[-1]

    def _node(self, stage: Stage) -> StageNode:
        return StageNode(self.topology.devices[stage[0]].node, len(stage))

    def _all_bounds(self, stages: int) -> list[tuple[int, ...]]:
        blocks = self.profile.blocks
        return [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), stages - 1)]

    def _equal(
        self, pipelines: Pipelines, hops: Sequence[Sequence[Channel]], size: int, total: int, zero: int, best: float
    ) -> float:
        stages, (count, rest) = len(pipelines[0]), divmod(total, len(pipelines))
        if rest or not count or len(set(map(len, pipelines))) > 1 or (stages > 1 and stages > count):
            return best
        shards = len(pipelines) if zero else None
        for bounds in self._all_bounds(stages):
            seconds = max(
                self._seconds(each, channels, size, count, bounds, shards)
                for each, channels in zip(pipelines, hops, strict=True)
            )
            if seconds < best:
                best = min(best, seconds + self._sums(pipelines, [bounds] * len(pipelines), size))
        return best

    def _unequal(
        self, pipelines: Pipelines, hops: Sequence[Sequence[Channel]], size: int, total: int, zero: int, best: float
    ) -> float:
        stages, shards = sum(map(len, pipelines)), len(pipelines) if zero else None
        if stages > total:
            return best
        choices: list[list[tuple[tuple[int, ...], NDArray[np.float64]]]] = []
        for each, channels in zip(pipelines, hops, strict=True):
            counts = range(len(each), total - (stages - len(each)) + 1)
            choice = []
            for bounds in self._all_bounds(len(each)):
                ends = [self._seconds(each, channels, size, count, bounds, shards) for count in counts]
                by_count = np.array([np.inf] * len(each) + ends)
                if by_count.min() < best:
                    choice.append((bounds, by_count))
            choices.append(choice)
        for chosen in itertools.product(*choices):
            seconds = last_end([by_count for _, by_count in chosen], total)
            if seconds < best:
                best = min(best, seconds + self._sums(pipelines, [bounds for bounds, _ in chosen], size))
        return best

    def _seconds(
        self,
        stages: Sequence[Stage],
        hops: Sequence[Channel],
        size: int,
        count: int,
        bounds: tuple[int, ...],
        pipelines: int | None,
    ) -> float:
        """Of a pipeline with the best choice of stages that recompute; infinite if it fits with none."""
        looks = tuple(self._look(stage) for stage in stages)
        key = looks, tuple(hops), size, count, bounds, pipelines
        if key not in self._known:
            may = (False, True) if self.space.recompute else (False,)
            choices = [[self._slot(stage, size, len(stages), pipelines, again) for again in may] for stage in stages]
            costs = [evaluate_stages(chosen, hops, count, bounds) for chosen in itertools.product(*choices)]
            self._known[key] = min((cost.seconds for cost in costs if cost.fits), default=np.inf)
        return self._known[key]

    def _look(self, stage: Stage) -> tuple[object, ...]:
        devices = [self.topology.devices[rank] for rank in stage]
        return devices[0].kind, min(device.speed for device in devices), len(stage)

    def _slot(self, stage: Stage, size: int, stages: int, pipelines: int | None, again: bool) -> Slot:
        kind, speed, degree = self._look(stage)
        costs = stage_costs(
            self.profile,
            kind.name,
            tensor_parallel=degree,
            micro_batch=size,
            speed=speed,
            recompute=again,
            zero_shards=pipelines or 1,
        )
        return Slot(kind.name, costs, costs.memory_for_blocks(kind.usable_bytes, stages))

    def _sums(self, pipelines: Pipelines, bounds: Sequence[tuple[int, ...]], size: int) -> float:
        """Seconds until all gradients are summed; infinite if devices cannot reach each other."""
        try:
            if len(set(bounds)) == 1:
                return self._sums_of_equal(pipelines, bounds[0])
            return self._sums_of_runs(pipelines, bounds)
        except ValueError:
            return np.inf

    def _gradients(self, holders: Sequence[Stage], start: int, stop: int) -> tuple[int, float]:
        """The smallest degree, which is the number of rings, and the bytes of each."""
        smallest = min(map(len, holders))
        sizes = next(each for each in self.profile.sizes if each.tensor_parallel == smallest)
        by_layer = [0.0, *sizes.parameter_bytes[1:-1], 0.0]
        by_layer[1] += sizes.parameter_bytes[0]
        by_layer[-2] += sizes.parameter_bytes[-1]
        return smallest, sum(by_layer[1 + start : 1 + stop]) * self.profile.gradient_factor

    def _sums_of_equal(self, pipelines: Pipelines, bounds: tuple[int, ...]) -> float:
        rings, sizes = [], []
        for place, (start, stop) in enumerate(itertools.pairwise(bounds)):
            holders = [pipeline[place] for pipeline in pipelines]
            number, gradient_bytes = self._gradients(holders, start, stop)
            rings += [[stage[0] for stage in holders]] * number
            sizes += [gradient_bytes] * number
        return max(concurrent_seconds(self.topology, rings, sizes))

    def _sums_of_runs(self, pipelines: Pipelines, bounds: Sequence[tuple[int, ...]]) -> float:
        """Each run of blocks between two cuts is summed over the groups that hold it; a stage sums its runs in turn."""
        node_of = [device.node for device in self.topology.devices]
        on_node = Counter(node_of[stage[0]] for pipeline in pipelines for stage in pipeline)
        spent: dict[Stage, float] = {}
        for start, stop in itertools.pairwise(sorted(set(itertools.chain.from_iterable(bounds)))):
            holders = [
                next(stage for stage, end in zip(pipeline, cut[1:], strict=True) if start < end)
                for pipeline, cut in zip(pipelines, bounds, strict=True)
            ]
            number, gradient_bytes = self._gradients(holders, start, stop)
            members = [stage[0] for stage in holders]
            here = Counter(node_of[member] for member in members)
            sharing = number * max(math.ceil(on_node[node] / count) for node, count in here.items())
            seconds = synchronization_seconds(self.topology, members, gradient_bytes, sharing)
            for stage in holders:
                spent[stage] = spent.get(stage, 0.0) + seconds
        return max(spent.values())


def spaces_to_prove(number: int) -> SearchSpace:
    """The whole search space, and parts of it in which other plans are the best, by turns."""
    spaces = (
        WHOLE,
        SearchSpace(mixed_degrees=True, recompute=True),
        SearchSpace(mixed_degrees=True, zero_stages=(0, 1)),
        SearchSpace(mixed_degrees=True),
        SearchSpace(recompute=True, zero_stages=(0, 1)),
        SearchSpace(recompute=True),
        SearchSpace(zero_stages=(1,), recompute=True),
    )
    return spaces[number % len(spaces)]
