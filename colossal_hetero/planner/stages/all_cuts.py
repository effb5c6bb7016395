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

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel
from .pipeline import Slot

__all__ = ["MAX_CUTS", "CutTimes", "all_bounds", "cut_times"]

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
    """How many micro-batches fit in memory: 0 if not even one does."""

    def seconds(self, micro_batches: int) -> NDArray[np.float64]:
        """Of an iteration; infinite where it does not fit in memory."""
        seconds = self.fill_seconds + (micro_batches - 1) * self.step_seconds
        return np.where(self.max_micro_batches >= micro_batches, seconds, np.inf)


@functools.lru_cache(maxsize=256)
def all_bounds(blocks: int, stages: int) -> NDArray[np.int64] | None:
    """Every way to cut ``blocks`` blocks into stages, ``[cuts, stages + 1]``; None if there are too many or none."""
    if stages > blocks or math.comb(blocks - 1, stages - 1) > MAX_CUTS:
        return None
    combinations = list(itertools.combinations(range(1, blocks), stages - 1))
    inner = np.array(combinations, dtype=np.int64).reshape(len(combinations), stages - 1)
    ends = np.full((len(inner), 1), blocks)
    return np.concatenate([np.zeros_like(ends), inner, ends], axis=1)


def cut_times(slots: Sequence[Slot], hops: Sequence[Channel], bounds: NDArray[np.int64]) -> CutTimes:
    """Times of the pipeline of these slots, in the order of the stages.

    Args:
        slots: By stage.
        hops: The channels between neighbors, ``[stages − 1]``.
        bounds: ``[cuts, stages + 1]``.
    """
    stages = len(slots)
    total = np.zeros(len(bounds))
    longest, update = np.zeros(len(bounds)), np.zeros(len(bounds))
    most = np.full(len(bounds), _NO_LIMIT)
    before = np.zeros(len(bounds))
    for stage, slot in enumerate(slots):
        start, stop = bounds[:, stage], bounds[:, stage + 1]
        sums = slot.costs.cumulative
        after = slot.costs.hop_seconds(hops[stage])[stop] if stage + 1 < stages else np.zeros(len(bounds))
        seconds = sums.forward_seconds[stop] - sums.forward_seconds[start]
        seconds = seconds + sums.backward_seconds[stop] - sums.backward_seconds[start] + before + after
        total += seconds
        longest = np.maximum(longest, seconds)
        update = np.maximum(update, sums.update_seconds[stop] - sums.update_seconds[start])
        state = sums.state_bytes[stop] - sums.state_bytes[start]
        activation = sums.activation_bytes[stop] - sums.activation_bytes[start]
        for in_flight in range(1, stages - stage + 1):
            # Up to the last number, this is the number of micro-batches; with more of them no more are in flight.
            too_much = state + in_flight * activation > slot.memory_bytes
            most = np.where(too_much, np.minimum(most, in_flight - 1), most)
        before = after
    return CutTimes(total + update, longest, most)
