"""Splits by a rule: Colossal-AI's equal parts, Holmes' partition by speed, AutoHet's balance by speed and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .pipeline import Pipeline, Split, earliest_starts

__all__ = ["HOLMES_ALPHA", "autohet", "holmes", "speeds", "uniform", "uniform_bounds"]

HOLMES_ALPHA = 1.05
"""α of Holmes' Eq. 2; the value is from section 4.4."""

ROUNDING = 1e-9
"""Relative rounding error of speeds and loads."""


def speeds(pipeline: Pipeline) -> NDArray[np.float64]:
    """Speed of each slot, in micro-batches per second if the slot ran all blocks, ``[slots]``."""
    totals = [slot.costs.cumulative for slot in pipeline.slots]
    return np.array([1.0 / max(float(t.forward_seconds[-1] + t.backward_seconds[-1]), 1e-30) for t in totals])


def uniform_bounds(blocks: int, stages: int) -> tuple[int, ...]:
    """Bounds of Colossal-AI's ``PipelineStageManager.distribute_layers``: equal parts, larger ones in the middle."""
    parts = np.full(stages, blocks // stages)
    extra = blocks % stages
    start = stages // 2 - extra // 2
    parts[start : start + extra] += 1
    return _bounds(parts)


def uniform(pipeline: Pipeline, order: Sequence[int] | None) -> Split:
    """Colossal-AI's division into equal parts, see :func:`uniform_bounds`."""
    return Split(_order_or_default(pipeline, order), uniform_bounds(pipeline.blocks, len(pipeline.slots)))


def holmes(pipeline: Pipeline, order: Sequence[int] | None, alpha: float = HOLMES_ALPHA) -> Split:
    """Holmes' self-adapting partition (section 3.3, Eq. 2): in order of speed, a stage of speed S gets ``⌊α·N·S/ΣS⌋``
    of the N blocks; the slowest stages share the rest. Differences: each stage gets at least one block, and if all are
    equally fast, the parts are equal."""
    order = _order_or_default(pipeline, order)
    by_stage = speeds(pipeline)[list(order)]
    slowest = by_stage <= by_stage.min() * (1 + ROUNDING)
    parts = np.zeros(len(order), dtype=int)
    left, waiting = pipeline.blocks, len(order)
    for stage in np.argsort(-by_stage, kind="stable"):
        if slowest[stage]:
            continue
        wanted = math.floor(alpha * pipeline.blocks * by_stage[stage] / by_stage.sum() + ROUNDING)
        waiting -= 1
        parts[stage] = min(max(wanted, 1), left - waiting)
        left -= parts[stage]
    parts[slowest] = np.diff(uniform_bounds(left, int(slowest.sum())))
    return Split(order, _bounds(parts))


def autohet(pipeline: Pipeline, order: Sequence[int] | None) -> Split | None:
    """AutoHet's balance (section III-C, Eq. 4): of the splits that fit in memory with the smallest ``max l/g``, with l
    a stage's blocks and g its speed, one with the smallest ``Σ l/g``; None if none fits. Without an order, slower slots
    come first. The printed ``max g/l`` is smallest if one stage does all the work; the text asks for balance."""
    speed = speeds(pipeline)
    if order is None:
        order = tuple(int(slot) for slot in np.argsort(speed, kind="stable"))
    by_stage = speed[list(order)] / speed.sum() * pipeline.blocks
    lengths = np.arange(1, pipeline.blocks - len(order) + 2)
    candidates = np.unique(lengths / by_stage[:, None])
    earliest = _earliest_by_memory(pipeline, order)
    first, last = 0, len(candidates)
    while first < last:
        middle = (first + last) // 2
        if _min_loads(pipeline, by_stage, earliest, float(candidates[middle])) is None:
            first = middle + 1
        else:
            last = middle
    if first == len(candidates):
        return None
    bounds = _min_loads(pipeline, by_stage, earliest, float(candidates[first]))
    assert bounds is not None
    return Split(tuple(order), bounds)


def _min_loads(
    pipeline: Pipeline, speed: NDArray[np.float64], earliest: NDArray[np.int_], limit: float
) -> tuple[int, ...] | None:
    """Bounds of the split with the smallest ``Σ l/g`` in which each ``l/g ≤ limit``; None if there is no such split."""
    blocks = pipeline.blocks
    place = np.arange(blocks + 1)
    min_sums = np.full(blocks + 1, np.inf)
    min_sums[0] = 0.0
    chosen = []
    for stage, rate in enumerate(speed):
        loads = (place - place[:, None]) / rate
        allowed = (loads > 0) & (loads <= limit * (1 + ROUNDING)) & (place[:, None] >= earliest[stage])
        sums = np.where(allowed, min_sums[:, None] + loads, np.inf)
        chosen.append(sums.argmin(axis=0))
        min_sums = sums.min(axis=0)
    if min_sums[-1] == np.inf:
        return None
    bounds = [blocks]
    for starts in reversed(chosen):
        bounds.append(int(starts[bounds[-1]]))
    return tuple(reversed(bounds))


def _earliest_by_memory(pipeline: Pipeline, order: Sequence[int]) -> NDArray[np.int_]:
    """Earliest start of each stage by memory, for each end, ``[stages, blocks + 1]``."""
    earliest = []
    for stage, slot in enumerate(pipeline.slots[index] for index in order):
        in_flight = min(pipeline.micro_batches, len(order) - stage)
        earliest.append(earliest_starts(slot.kind, in_flight))
    return np.array(earliest)


def _order_or_default(pipeline: Pipeline, order: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(range(len(pipeline.slots))) if order is None else tuple(order)


def _bounds(parts: NDArray[np.int_]) -> tuple[int, ...]:
    return (0, *(int(bound) for bound in np.cumsum(parts)))
