"""The best split for a given order of the slots, in milliseconds, so that thousands of pipelines can be compared.

The search minimizes ``Σ t + (K − 1)·max t``, with t a stage's time per micro-batch; optimizer updates are left out. For
several limits τ on ``max t`` at once, a dynamic program over stages and blocks finds the smallest Σ t. A higher limit
never gives a larger sum, so for all limits between two values, the sum at the upper value with the maximum at the lower
value is a lower bound. Ranges of τ that cannot contain a better split are dropped; the others are divided further.
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
from ..profile.layer_costs import LayerCosts
from .pipeline import Slot

LIMITS = 16  # number of limits that are tried at once

_Floats = NDArray[np.float64]


def exact(
    slots: Sequence[Slot], hops: Sequence[Channel], micro_batches: int, below: float = np.inf
) -> tuple[int, ...] | None:
    """Bounds of the fastest split that fits in memory; None if none that fits takes less than ``below`` seconds."""
    if len(slots) > len(slots[0].costs.forward_seconds):
        return None
    seconds = _stage_seconds(slots, hops, micro_batches)
    return fastest(seconds, seconds, micro_batches - 1, below)


def adapt(slots: Sequence[Slot], hops: Sequence[Channel], micro_batches: int) -> tuple[int, ...] | None:
    """Bounds of the split with the smallest cost of ADAPT, ``Σ Comp + (K − 1)·max Comp`` (Eq. 6.4), with Comp the
    forward and backward time of a stage, plus the transfer over each cut once (Eq. 6.2); None if none fits in memory.
    The paper also looks for the order of devices, depth-first; here it is that of the slots."""
    work = _work_seconds(slots, micro_batches)
    costs, size = work.copy(), work.shape[1]
    for stage, (slot, hop) in enumerate(zip(slots[:-1], hops, strict=True)):
        costs[stage] += slot.costs.hop_seconds(hop)[stage + 1 : stage + 1 + size]
    return fastest(costs, work, micro_batches - 1)


def fastest(costs: _Floats, seconds: _Floats, repetitions: int, below: float = np.inf) -> tuple[int, ...] | None:
    """Bounds of the split with the smallest ``Σ costs + repetitions · max seconds``, both as :func:`windows`; None if
    none that fits takes less than ``below``."""
    shortest = min_longest(seconds)
    if not np.isfinite(shortest):
        return None
    sum_at_shortest, least = _min_sums(costs, seconds, np.array([shortest, np.inf]))
    if not repetitions * shortest + least < below:
        return None
    best, limit = sum_at_shortest + repetitions * shortest, shortest
    # A limit is worth trying if it would be better with the smallest possible sum.
    limits = seconds[np.isfinite(seconds) & (seconds > shortest)]
    limits = np.unique(limits[limits * repetitions + least < min(best, below)])
    sum_above = np.full(len(limits), least)
    while len(limits):
        promising = np.flatnonzero(repetitions * limits + sum_above < best * (1 - 1e-12))
        if not len(promising):
            break
        tried = promising[np.unique(np.linspace(0, len(promising) - 1, LIMITS).astype(int))]
        found = _min_sums(costs, seconds, limits[tried])
        totals = found + repetitions * limits[tried]
        if totals.min() < best:
            best, limit = totals.min(), limits[tried[totals.argmin()]]
        # Below a limit that was tried, no sum is smaller than the sum at that limit.
        above = np.searchsorted(tried, np.arange(len(limits)))
        known = np.append(found, least)[above]
        sum_above = np.maximum(sum_above, known)
        untried = np.ones(len(limits), dtype=bool)
        untried[tried] = False
        limits, sum_above = limits[untried], sum_above[untried]
    return min_sum_bounds(costs, seconds, limit) if best < below else None


def _work_seconds(slots: Sequence[Slot], micro_batches: int) -> _Floats:
    """Forward and backward seconds of each stage, as :func:`windows`; infinite if the blocks do not fit."""
    return windows([_block_seconds(slot, min(micro_batches, len(slots) - stage)) for stage, slot in enumerate(slots)])


def _stage_seconds(slots: Sequence[Slot], hops: Sequence[Channel], micro_batches: int) -> _Floats:
    """:func:`_work_seconds` with transfers."""
    seconds = _work_seconds(slots, micro_batches)
    size = seconds.shape[1]
    for stage, (slot, hop) in enumerate(zip(slots[:-1], hops, strict=True)):
        sent = slot.costs.hop_seconds(hop)[stage + 1 : stage + 1 + size]
        seconds[stage] += sent
        seconds[stage + 1] += sent[:, None]
    return seconds


@functools.lru_cache(maxsize=512)
def _block_seconds(slot: Slot, in_flight: int) -> _Floats:
    """Seconds of the blocks ``[a, b)`` without transfers, ``[a, b]``: with recomputation if they fit only then, and
    infinite if they never fit."""
    work = _from_zero(slot.costs.forward_seconds + slot.costs.backward_seconds)
    seconds = np.where(_fit(slot.costs, slot.memory_bytes, in_flight), work[None, :] - work[:, None], np.inf)
    if slot.recomputed is not None:
        again = work + slot.costs.cumulative.forward_seconds
        possible = _fit(*slot.recomputed, in_flight) & ~np.isfinite(seconds)
        seconds = np.where(possible, again[None, :] - again[:, None], seconds)
    seconds[np.tril_indices_from(seconds)] = np.inf  # a stage has a block
    return seconds


def _fit(costs: LayerCosts, memory_bytes: float, in_flight: int) -> NDArray[np.bool_]:
    """True if the blocks ``[a, b)`` fit in memory, ``[a, b]``."""
    held = _from_zero(costs.state_bytes + in_flight * costs.activation_bytes)
    return np.asarray(held[None, :] - held[:, None] <= memory_bytes)


def _from_zero(values: _Floats) -> _Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def fits(slot: Slot, in_flight: int) -> NDArray[np.bool_]:
    """:func:`_fit` of a slot, which recomputes if it must and may."""
    fit = _fit(slot.costs, slot.memory_bytes, in_flight)
    return fit if slot.recomputed is None else fit | _fit(*slot.recomputed, in_flight)


def windows(by_stage: Sequence[_Floats]) -> _Floats:
    """Of values by stage for blocks ``[a, b)``, ``[a, b]``, those of splits in which each stage has a block: stage s
    with blocks ``[s + i, s + j + 1)``, ``[stages, i, j]``."""
    size = len(by_stage[0]) - len(by_stage)
    return np.stack([each[s : s + size, s + 1 : s + 1 + size] for s, each in enumerate(by_stage)])


def min_longest(seconds: _Floats) -> float:
    """The smallest possible ``max t`` of all splits, for :func:`windows` of seconds; infinite if no split fits."""
    reached = seconds[0, 0]
    for stage in seconds[1:]:
        reached = np.maximum(reached[:, None], stage).min(axis=0)
    return float(reached[-1])


def _min_sums(costs: _Floats, seconds: _Floats, limits: _Floats) -> _Floats:
    """For each limit, the smallest Σ costs of the splits with no stage above the limit, ``[limits]``."""
    limits = limits[:, None, None]
    sums = np.where(seconds[0, 0] <= limits[:, 0], costs[0, 0], np.inf)
    for number, (cost, stage) in enumerate(zip(costs[1:], seconds[1:], strict=True), 2):
        if number == len(seconds):
            cost, stage = cost[:, -1:], stage[:, -1:]  # the last stage ends with the last block
        sums = (sums[:, :, None] + np.where(stage <= limits, cost, np.inf)).min(axis=1)
    return np.asarray(sums[:, -1])


def min_sum_bounds(costs: _Floats, seconds: _Floats, limit: float) -> tuple[int, ...]:
    """Bounds of the split with the smallest Σ costs of those with no stage above ``limit``."""
    allowed = np.where(seconds <= limit, costs, np.inf)
    sums, starts = allowed[0, 0], []
    for stage in allowed[1:]:
        through = sums[:, None] + stage
        starts.append(through.argmin(axis=0))
        sums = through.min(axis=0)
    place = len(sums) - 1
    bounds = [len(seconds) + place]
    for number in range(len(starts), 0, -1):
        place = int(starts[number - 1][place])
        bounds.append(number + place)
    return (0, *reversed(bounds))


MAX_CUTS = 5_000  # ways to cut a model that are all tried, at most

_NO_LIMIT = 1 << 40


@dataclass(frozen=True, eq=False)
class CutTimes:
    """Times of a pipeline, as of :func:`.evaluate`, for each way to cut the model in a given order of stages,
    ``[cuts]``."""

    fill_seconds: NDArray[np.float64]  # time of one micro-batch through the empty pipeline, and of the longest update
    step_seconds: NDArray[np.float64]
    max_micro_batches: NDArray[np.int64]
    """Micro-batches that fit in memory. A stage that may recompute does so if more fit then, even if not needed."""

    def seconds(self, micro_batches: int) -> NDArray[np.float64]:
        seconds = self.fill_seconds + (micro_batches - 1) * self.step_seconds
        return np.where(self.max_micro_batches >= micro_batches, seconds, np.inf)

    def after(self, micro_batches: int) -> CutTimes:
        """The times if so many micro-batches run in any case before those that are counted."""
        fill = self.fill_seconds + micro_batches * self.step_seconds
        return CutTimes(fill, self.step_seconds, self.max_micro_batches - micro_batches)


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
        self.bounds = bounds
        self._stages: dict[object, tuple[_Floats, _Floats, NDArray[np.int64]]] = {}
        """Of a stage: seconds per micro-batch without transfers, of the update, and the most micro-batches."""
        self._hops: dict[object, NDArray[np.float64]] = {}

    def times(self, slots: Sequence[Slot], hops: Sequence[Channel]) -> CutTimes:
        """Times of a pipeline with these slots by stage, and channels between neighbors, ``[stages − 1]``."""
        stages = [self._stage(stage, slot) for stage, slot in enumerate(slots)]
        sent = []
        for stage, (slot, hop) in enumerate(zip(slots[:-1], hops, strict=True)):
            key = stage, slot.costs, hop
            if key not in self._hops:
                self._hops[key] = slot.costs.hop_seconds(hop)[self.bounds[:, stage + 1]]
            sent.append(self._hops[key])
        total = longest = np.zeros(len(self.bounds))
        for stage, (seconds, *_) in enumerate(stages):
            for taken in sent[max(stage - 1, 0) : stage + 1]:
                seconds = seconds + taken
            total = total + seconds
            longest = np.maximum(longest, seconds)
        update = functools.reduce(np.maximum, [each for _, each, _ in stages])
        most = functools.reduce(np.minimum, [each for _, _, each in stages])
        return CutTimes(total + update, longest, most)

    def _stage(self, stage: int, slot: Slot) -> tuple[_Floats, _Floats, NDArray[np.int64]]:
        key = stage, slot
        if key not in self._stages:
            start, stop = self.bounds[:, stage], self.bounds[:, stage + 1]
            sums = slot.costs.cumulative
            work = sums.forward_seconds + sums.backward_seconds
            seconds = work[stop] - work[start]
            most = self._max_micro_batches(stage, slot.costs, slot.memory_bytes)
            if slot.recomputed is not None:
                more = self._max_micro_batches(stage, *slot.recomputed)
                again = more > most
                forward = sums.forward_seconds[stop] - sums.forward_seconds[start]
                seconds, most = np.where(again, seconds + forward, seconds), np.where(again, more, most)
            update = sums.update_seconds[stop] - sums.update_seconds[start]
            self._stages[key] = seconds, update, most
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
