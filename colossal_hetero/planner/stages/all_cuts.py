"""The times of all ways to cut a model over stages in a given order, as arrays.

The costs are those of :func:`~colossal_hetero.planner.stages.pipeline.evaluate`: with t the stages' times per
micro-batch and u their updates, K micro-batches take ``Σ t + (K − 1)·max t + max u``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel
from ..profile.layer_costs import LayerCosts
from .pipeline import Slot

__all__ = ["MAX_CUTS", "AllCuts", "CutTimes", "all_bounds"]

MAX_CUTS = 5_000
"""If there are more ways to cut the model, they are not all tried."""

_NO_LIMIT = 1 << 40


@dataclass(frozen=True, eq=False)
class CutTimes:
    """Times of a pipeline for each way to cut the model, ``[cuts]``."""

    fill_seconds: NDArray[np.float64]
    """Of one micro-batch through the empty pipeline, and of the longest update."""
    step_seconds: NDArray[np.float64]
    """That each further micro-batch adds."""
    max_micro_batches: NDArray[np.int64]
    """How many micro-batches fit in memory: 0 if not even one does. A stage that may recompute does so if more fit
    then: if there are fewer micro-batches than stages, it might not need to."""

    def seconds(self, micro_batches: int) -> NDArray[np.float64]:
        """Of an iteration; infinite where it does not fit in memory."""
        seconds = self.fill_seconds + (micro_batches - 1) * self.step_seconds
        return np.where(self.max_micro_batches >= micro_batches, seconds, np.inf)

    def after(self, micro_batches: int) -> CutTimes:
        """The times if so many micro-batches run in any case before those that are counted."""
        fill = self.fill_seconds + micro_batches * self.step_seconds
        return CutTimes(fill, self.step_seconds, self.max_micro_batches - micro_batches)


class _StageTimes(NamedTuple):
    """Of one stage for each way to cut the model, ``[cuts]``."""

    seconds: NDArray[np.float64]
    """Per micro-batch, without transfers."""
    update_seconds: NDArray[np.float64]
    max_micro_batches: NDArray[np.int64]


@functools.lru_cache(maxsize=256)
def all_bounds(blocks: int, stages: int) -> NDArray[np.int64] | None:
    """Every way to cut ``blocks`` blocks into stages, ``[cuts, stages + 1]``; None if there are too many or none."""
    if stages > blocks or math.comb(blocks - 1, stages - 1) > MAX_CUTS:
        return None
    combinations = list(itertools.combinations(range(1, blocks), stages - 1))
    inner = np.array(combinations, dtype=np.int64).reshape(len(combinations), stages - 1)
    ends = np.full((len(inner), 1), blocks)
    return np.concatenate([np.zeros_like(ends), inner, ends], axis=1)


class AllCuts:
    """Every way to cut a model over a number of stages. What depends on one stage only is computed once."""

    def __init__(self, bounds: NDArray[np.int64]) -> None:
        """``bounds`` are those of :func:`all_bounds`, ``[cuts, stages + 1]``."""
        self.bounds = bounds
        self._stages: dict[object, _StageTimes] = {}
        self._hops: dict[object, NDArray[np.float64]] = {}

    def times(self, slots: Sequence[Slot], hops: Sequence[Channel]) -> CutTimes:
        """Times of the pipeline of these slots, in the order of the stages.

        Args:
            slots: By stage.
            hops: The channels between neighbors, ``[stages − 1]``.
        """
        stages = [self._stage(stage, slot) for stage, slot in enumerate(slots)]
        sent = [self._hop(stage, slot, hop) for stage, (slot, hop) in enumerate(zip(slots[:-1], hops, strict=True))]
        total = longest = np.zeros(len(self.bounds))
        for stage, times in enumerate(stages):
            seconds = times.seconds
            for hop in sent[max(stage - 1, 0) : stage + 1]:
                seconds = seconds + hop
            total = total + seconds
            longest = np.maximum(longest, seconds)
        update = functools.reduce(np.maximum, [times.update_seconds for times in stages])
        most = functools.reduce(np.minimum, [times.max_micro_batches for times in stages])
        return CutTimes(total + update, longest, most)

    def _stage(self, stage: int, slot: Slot) -> _StageTimes:
        key = stage, slot.kind
        if key not in self._stages:
            stages = self.bounds.shape[1] - 1
            start, stop = self.bounds[:, stage], self.bounds[:, stage + 1]
            sums = slot.costs.cumulative
            work = sums.forward_seconds + sums.backward_seconds
            schedule = slot.costs.schedule_seconds * ((stage > 0) + (stage + 1 < stages))
            seconds = work[stop] - work[start] + schedule
            most = self._max_micro_batches(stage, slot.costs, slot.memory_bytes)
            if slot.recomputed is not None:
                more = self._max_micro_batches(stage, *slot.recomputed)
                again = more > most
                forward = sums.forward_seconds[stop] - sums.forward_seconds[start]
                seconds, most = np.where(again, seconds + forward, seconds), np.where(again, more, most)
            update = sums.update_seconds[stop] - sums.update_seconds[start]
            self._stages[key] = _StageTimes(seconds, update, most)
        return self._stages[key]

    def _max_micro_batches(self, stage: int, costs: LayerCosts, memory_bytes: float) -> NDArray[np.int64]:
        start, stop = self.bounds[:, stage], self.bounds[:, stage + 1]
        sums = costs.cumulative
        state, activation = (each[stop] - each[start] for each in (sums.state_bytes, sums.activation_bytes))
        most = np.full(len(self.bounds), _NO_LIMIT)
        for in_flight in range(1, self.bounds.shape[1] - stage):
            # Up to the last number, this is the number of micro-batches; with more of them no more are in flight.
            too_much = state + in_flight * activation > memory_bytes
            most = np.where(too_much, np.minimum(most, in_flight - 1), most)
        return most

    def _hop(self, stage: int, slot: Slot, channel: Channel) -> NDArray[np.float64]:
        key = stage, slot.costs, channel
        if key not in self._hops:
            self._hops[key] = slot.costs.hop_seconds(channel)[self.bounds[:, stage + 1]]
        return self._hops[key]
