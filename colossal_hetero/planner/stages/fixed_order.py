"""The best split for a given order of the slots, in milliseconds, so that thousands of pipelines can be compared.

The search minimizes ``Σ t + (K − 1)·max t``, with t a stage's time per micro-batch; optimizer updates are left out. For
a limit τ on ``max t``, a dynamic program over stages and blocks finds the smallest Σ t. It is run for several limits at
once. A higher limit never gives a larger sum. So for all limits between two values, a lower bound is the sum at the
upper value with the maximum at the lower value. Ranges of τ that cannot contain a better split are dropped; the others
are divided further.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel
from ..profile.layer_costs import LayerCosts
from .pipeline import Slot, SlotForm, Split

__all__ = ["split_in_order"]

LIMITS = 16
"""Number of limits that are tried at once."""

_Floats = NDArray[np.float64]


def split_in_order(slots: Sequence[Slot], hops: Sequence[Channel], micro_batches: int) -> Split | None:
    """The fastest split that keeps the slots in this order and fits in memory; None if none fits.

    Args:
        slots: By stage.
        hops: The channels between neighboring stages, ``[stages − 1]``.
        micro_batches: Per iteration, K.
    """
    stages, blocks = len(slots), len(slots[0].costs.forward_seconds)
    if stages > blocks:
        return None
    seconds = _stage_seconds(slots, hops, micro_batches)
    if stages == 1:
        return Split((0,), (0, blocks)) if np.isfinite(seconds[0, 0, blocks]) else None
    repetitions = micro_batches - 1
    shortest = _min_longest(seconds)
    if not np.isfinite(shortest):
        return None
    sums, cuts = _min_sums(seconds, np.array([shortest, np.inf]))
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
        found, cuts = _min_sums(seconds, limits[tried])
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
        seconds.append(_seconds_of_stage(slot.kind, in_flight, before, after))
        before = None if after is None else (slot.costs, after)
    return np.stack(seconds)


@functools.lru_cache(maxsize=512)
def _seconds_of_stage(
    form: SlotForm,
    in_flight: int,
    before: tuple[LayerCosts, Channel] | None,
    after: Channel | None,
) -> _Floats:
    """One stage of :func:`_stage_seconds`, ``[a, b]``.

    Args:
        form: Costs of the blocks in the stage's slot, and its memory.
        in_flight: Micro-batches whose activations the stage holds.
        before: The costs in the slot before, and the channel from there; None for the first stage.
        after: The channel to the next stage; None for the last one.
    """
    costs = form.costs
    blocks = len(costs.forward_seconds)
    nothing = np.zeros(blocks + 1)
    received = nothing if before is None else before[0].hop_seconds(before[1])
    sent = nothing if after is None else costs.hop_seconds(after)
    work = np.concatenate([[0.0], np.cumsum(costs.forward_seconds + costs.backward_seconds)])
    each = (work + sent)[None, :] - (work - received)[:, None]
    each += costs.schedule_seconds * ((before is not None) + (after is not None))
    some = np.triu(np.ones(each.shape, dtype=bool), 1)
    seconds = np.where(some & _fit(costs, form.memory_bytes, in_flight), each, np.inf)
    if form.recomputed is not None:
        again = costs.cumulative.forward_seconds
        possible = some & _fit(*form.recomputed, in_flight) & ~np.isfinite(seconds)
        seconds = np.where(possible, each + (again[None, :] - again[:, None]), seconds)
    return seconds


def _fit(costs: LayerCosts, memory_bytes: float, in_flight: int) -> NDArray[np.bool_]:
    """Whether the blocks ``[a, b)`` fit in memory, ``[a, b]``."""
    held = np.concatenate([[0.0], np.cumsum(costs.state_bytes + in_flight * costs.activation_bytes)])
    return np.asarray(held[None, :] - held[:, None] <= memory_bytes)


def _min_longest(seconds: _Floats) -> float:
    """The smallest possible ``max t`` of all splits, in seconds; infinite if no split fits."""
    reached = seconds[0, 0]
    for stage in seconds[1:]:
        reached = np.maximum(reached[:, None], stage).min(axis=0)
    return float(reached[-1])


def _min_sums(seconds: _Floats, limits: _Floats) -> tuple[_Floats, list[list[int]]]:
    """For each limit, the smallest Σ t of the splits with no stage above the limit, ``[limits]``, and their bounds."""
    chosen = []
    sums = np.where(seconds[0, 0] <= limits[:, None], seconds[0, 0], np.inf)
    for stage in seconds[1:]:
        through = sums[:, :, None] + np.where(stage <= limits[:, None, None], stage, np.inf)
        chosen.append(through.argmin(axis=1))
        sums = through.min(axis=1)
    cuts = []
    for number in range(len(limits)):
        bounds = [seconds.shape[1] - 1]
        for starts in reversed(chosen):
            bounds.append(int(starts[number, bounds[-1]]))
        cuts.append([0, *reversed(bounds)])
    return sums[:, -1], cuts
