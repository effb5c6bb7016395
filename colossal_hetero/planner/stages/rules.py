"""Splits by a rule: Colossal-AI's equal parts, Holmes' by speed, AutoHet's by speed and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .pipeline import Pipeline, Split

__all__ = ["HOLMES_ALPHA", "autohet", "holmes", "speeds", "uniform", "uniform_bounds"]

HOLMES_ALPHA = 1.05
"""Holmes, section 4.4."""

ROUNDING = 1e-9


def speeds(pipeline: Pipeline) -> NDArray[np.float64]:
    """Models per second of each slot if it ran all blocks ``[slots]``."""
    totals = [slot.costs.cumulative for slot in pipeline.slots]
    return np.array([1.0 / max(float(t.forward_seconds[-1] + t.backward_seconds[-1]), 1e-30) for t in totals])


def uniform_bounds(blocks: int, stages: int) -> tuple[int, ...]:
    """Colossal-AI's own division (``PipelineStageManager.distribute_layers``): equal parts, and one block more for the
    stages in the middle if it does not come out even.
    """
    parts = np.full(stages, blocks // stages)
    extra = blocks % stages
    start = stages // 2 - extra // 2
    parts[start : start + extra] += 1
    return _bounds(parts)


def uniform(pipeline: Pipeline, order: Sequence[int] | None) -> Split:
    """Colossal-AI's division."""
    return Split(_as_given(pipeline, order), uniform_bounds(pipeline.blocks, len(pipeline.slots)))


def holmes(pipeline: Pipeline, order: Sequence[int] | None, alpha: float = HOLMES_ALPHA) -> Split:
    """Holmes' self-adapting partition (section 3.3, Eq. 2): of N blocks a stage of speed S gets ``⌊α·N·S/ΣS⌋``, from
    the fastest on; the slowest stages share what is left.

    Each stage gets one block at least, which the paper does not say. If all are equally fast, the parts are equal.
    """
    order = _as_given(pipeline, order)
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
    """AutoHet's balance (section III-C, Eq. 4): the least ``max l/g`` that fits in memory, with l a stage's blocks and
    g its speed; of several the one with the least ``Σ l/g``. Without an order the weaker slots come first. None if
    nothing fits.

    The print has ``max g/l``, which is least if all the work is at one stage; the text asks for balance.
    """
    speed = speeds(pipeline)
    if order is None:
        order = tuple(int(slot) for slot in np.argsort(speed, kind="stable"))
    by_stage = speed[list(order)] / speed.sum() * pipeline.blocks
    lengths = np.arange(1, pipeline.blocks - len(order) + 2)
    candidates = np.unique(lengths / by_stage[:, None])
    low = _memory_low(pipeline, order)
    first, last = 0, len(candidates)
    while first < last:
        middle = (first + last) // 2
        if _least_loads(pipeline, by_stage, low, float(candidates[middle])) is None:
            first = middle + 1
        else:
            last = middle
    if first == len(candidates):
        return None
    bounds = _least_loads(pipeline, by_stage, low, float(candidates[first]))
    assert bounds is not None
    return Split(tuple(order), bounds)


def _least_loads(
    pipeline: Pipeline, speed: NDArray[np.float64], low: NDArray[np.int_], limit: float
) -> tuple[int, ...] | None:
    """Bounds with the least ``Σ l/g`` with each ``l/g ≤ limit``; None if there are none."""
    blocks = pipeline.blocks
    place = np.arange(blocks + 1)
    least = np.full(blocks + 1, np.inf)
    least[0] = 0.0
    chosen = []
    for stage, rate in enumerate(speed):
        loads = (place - place[:, None]) / rate
        allowed = (loads > 0) & (loads <= limit * (1 + ROUNDING)) & (place[:, None] >= low[stage])
        sums = np.where(allowed, least[:, None] + loads, np.inf)
        chosen.append(sums.argmin(axis=0))
        least = sums.min(axis=0)
    if least[-1] == np.inf:
        return None
    bounds = [blocks]
    for starts in reversed(chosen):
        bounds.append(int(starts[bounds[-1]]))
    return tuple(reversed(bounds))


def _memory_low(pipeline: Pipeline, order: Sequence[int]) -> NDArray[np.int_]:
    """Earliest start of each stage by memory, for each end ``[stages, blocks + 1]``."""
    low = []
    for stage, slot in enumerate(pipeline.slots[index] for index in order):
        in_flight = min(pipeline.micro_batches, len(order) - stage)
        total = slot.costs.cumulative.state_bytes + in_flight * slot.costs.cumulative.activation_bytes
        low.append(np.searchsorted(total, total - slot.memory_bytes, side="left"))
    return np.array(low)


def _as_given(pipeline: Pipeline, order: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(range(len(pipeline.slots))) if order is None else tuple(order)


def _bounds(parts: NDArray[np.int_]) -> tuple[int, ...]:
    return (0, *(int(bound) for bound in np.cumsum(parts)))
