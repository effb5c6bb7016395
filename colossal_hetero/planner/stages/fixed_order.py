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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel
from ..profile.layer_costs import LayerCosts
from .pipeline import Pipeline, Slot, Split, evaluate

LIMITS = 16
"""Number of limits that are tried at once."""

_Floats = NDArray[np.float64]


def exact(pipeline: Pipeline, order: Sequence[int] | None) -> Split | None:
    """The fastest split of the slots in this order; None if none fits in memory.

    Without an order, the best of a few: as given, and by speed and by memory, both ways. The search exchanges slots.
    """
    slots = range(len(pipeline.slots))
    rules = (
        lambda slot: slot,
        lambda slot: float(pipeline.slots[slot].costs.cumulative.forward_seconds[-1]),
        lambda slot: pipeline.slots[slot].memory_bytes,
    )
    orders = [sorted(slots, key=rule, reverse=reverse) for rule in rules for reverse in (False, True)]
    found: list[Split] = []
    for each in dict.fromkeys([tuple(order)] if order is not None else map(tuple, orders)):
        hops = [pipeline.channels[a][b] for a, b in itertools.pairwise(each)]
        cut = split_in_order([pipeline.slots[slot] for slot in each], hops, pipeline.micro_batches)
        if cut is not None:
            found.append(Split(each, cut.bounds))
    return min(found, key=lambda split: evaluate(pipeline, split).seconds, default=None)


def split_in_order(slots: Sequence[Slot], hops: Sequence[Channel], micro_batches: int) -> Split | None:
    """The fastest split that keeps the slots, by stage, in this order and fits in memory; None if none fits. ``hops``
    are the channels between neighboring stages, ``[stages − 1]``."""
    stages, blocks = len(slots), len(slots[0].costs.forward_seconds)
    if stages > blocks:
        return None
    seconds = _stage_seconds(slots, hops, micro_batches)
    if stages == 1:
        return Split((0,), (0, blocks)) if np.isfinite(seconds[0, 0, blocks]) else None
    repetitions = micro_batches - 1
    shortest = min_longest(seconds)
    if not np.isfinite(shortest):
        return None
    sums, cuts = min_sums(seconds, np.array([shortest, np.inf]))
    best, bounds = sums[0] + repetitions * shortest, cuts[0]
    # A limit is worth trying if it would be better with the smallest possible sum.
    limits = np.unique(seconds[np.isfinite(seconds) & (seconds > shortest)])
    limits = limits[limits * repetitions + sums[1] < best]
    sum_above = np.full(len(limits), sums[1])
    while len(limits):
        promising = np.flatnonzero(repetitions * limits + sum_above < best * (1 - 1e-12))
        if not len(promising):
            break
        tried = promising[np.unique(np.linspace(0, len(promising) - 1, LIMITS).astype(int))]
        found, cuts = min_sums(seconds, limits[tried])
        totals = found + repetitions * limits[tried]
        if totals.min() < best:
            best, bounds = totals.min(), cuts[int(totals.argmin())]
        # Below a limit that was tried, no sum is smaller than the sum at that limit.
        above = np.searchsorted(tried, np.arange(len(limits)))
        known = np.append(found, sums[1])[above]
        sum_above = np.maximum(sum_above, known)
        untried = np.ones(len(limits), dtype=bool)
        untried[tried] = False
        limits, sum_above = limits[untried], sum_above[untried]
    return Split(tuple(range(stages)), tuple(int(bound) for bound in bounds))


def _stage_seconds(slots: Sequence[Slot], hops: Sequence[Channel], micro_batches: int) -> _Floats:
    """Time per micro-batch of each stage with blocks ``[a, b)``, ``[stages, a, b]``; infinite if it does not fit."""
    stages, before = len(slots), None
    seconds = []
    for stage, (slot, after) in enumerate(zip(slots, [*hops, None], strict=True)):
        in_flight = min(micro_batches, stages - stage)
        seconds.append(_seconds_of_stage(slot, in_flight, before, after))
        before = None if after is None else (slot.costs, after)
    return np.stack(seconds)


@functools.lru_cache(maxsize=512)
def _seconds_of_stage(
    slot: Slot,
    in_flight: int,
    before: tuple[LayerCosts, Channel] | None,
    after: Channel | None,
) -> _Floats:
    """One stage of :func:`_stage_seconds`, ``[a, b]``."""
    costs = slot.costs
    blocks = len(costs.forward_seconds)
    nothing = np.zeros(blocks + 1)
    received = nothing if before is None else before[0].hop_seconds(before[1])
    sent = nothing if after is None else costs.hop_seconds(after)
    work = _from_zero(costs.forward_seconds + costs.backward_seconds)
    each = (work + sent)[None, :] - (work - received)[:, None]
    each += costs.schedule_seconds * ((before is not None) + (after is not None))
    each += _seconds_to_fit(slot, in_flight)
    return each


@functools.lru_cache(maxsize=128)
def _seconds_to_fit(slot: Slot, in_flight: int) -> _Floats:
    """Seconds for recomputing the blocks ``[a, b)`` if they only fit then, ``[a, b]``; infinite if they never fit."""
    seconds = np.where(_fit(slot.costs, slot.memory_bytes, in_flight), 0.0, np.inf)
    if slot.recomputed is not None:
        again = slot.costs.cumulative.forward_seconds
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


def min_longest(seconds: _Floats) -> float:
    """The smallest possible ``max t`` of all splits, in seconds; infinite if no split fits."""
    reached = seconds[0, 0]
    for stage in seconds[1:]:
        reached = np.maximum(reached[:, None], stage).min(axis=0)
    return float(reached[-1])


def min_sums(seconds: _Floats, limits: _Floats) -> tuple[_Floats, list[list[int]]]:
    """For each limit, the smallest Σ t of the splits with no stage above the limit, ``[limits]``, and their bounds."""
    chosen = []
    sums = np.where(seconds[0, 0] <= limits[:, None], seconds[0, 0], np.inf)
    for number, stage in enumerate(seconds[1:], 2):
        if number == len(seconds):
            stage = stage[:, -1:]  # the last stage ends with the last block
        through = sums[:, :, None] + np.where(stage <= limits[:, None, None], stage, np.inf)
        chosen.append(through.argmin(axis=1))
        sums = through.min(axis=1)
    cuts = []
    for number in range(len(limits)):
        bounds = [seconds.shape[1] - 1]
        for starts in reversed(chosen):
            bounds.append(int(starts[number, bounds[-1] if len(bounds) > 1 else 0]))
        cuts.append([0, *reversed(bounds)])
    return sums[:, -1], cuts


# All cuts ------------------------------------------------------------------------------------------------------------
# Costs of :func:`.evaluate` for all ways to cut a model over stages in a given order: with t the stages' times per
# micro-batch and u their updates, K micro-batches take ``Σ t + (K − 1)·max t + max u``.


MAX_CUTS = 5_000
"""Ways to cut a model that are all tried, at most."""

_NO_LIMIT = 1 << 40


@dataclass(frozen=True, eq=False)
class CutTimes:
    """Times of a pipeline for each way to cut the model, ``[cuts]``."""

    fill_seconds: NDArray[np.float64]
    """Time of one micro-batch through the empty pipeline, and of the longest update."""
    step_seconds: NDArray[np.float64]
    """Time that each further micro-batch adds."""
    max_micro_batches: NDArray[np.int64]
    """Micro-batches that fit in memory. A stage that may recompute does so if more fit then, even if not needed."""

    def seconds(self, micro_batches: int) -> NDArray[np.float64]:
        """Seconds of an iteration; infinite where it does not fit in memory."""
        seconds = self.fill_seconds + (micro_batches - 1) * self.step_seconds
        return np.where(self.max_micro_batches >= micro_batches, seconds, np.inf)

    def after(self, micro_batches: int) -> CutTimes:
        """The times if so many micro-batches run in any case before those that are counted."""
        fill = self.fill_seconds + micro_batches * self.step_seconds
        return CutTimes(fill, self.step_seconds, self.max_micro_batches - micro_batches)


class _StageTimes(NamedTuple):
    """Times of one stage for each way to cut the model, ``[cuts]``."""

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
        """Times of a pipeline with these slots by stage, and channels between neighbors, ``[stages − 1]``."""
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
        key = stage, slot
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
