"""The methods that divide the blocks of a model over the stages, by name; see docs/algorithms.md, section 3.

Colossal-AI's equal parts, Holmes' partition by speed, AutoHet's balance, and ``exact`` and ADAPT's cost of
``fixed_order.py``.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel
from .fixed_order import adapt, exact, fits, min_longest, min_sum_bounds, windows
from .pipeline import Slot


def split(
    slots: Sequence[Slot],
    hops: Sequence[Channel],
    micro_batches: int,
    method: str = "exact",
    *,
    below: float = math.inf,
) -> tuple[int, ...]:
    """Bounds of the stages in these slots, in this order; ``hops`` are the channels between them, ``[stages − 1]``.
    ``exact`` has the smallest seconds of :func:`.evaluate`, without updates, of all splits that fit in memory, and has
    to take less than ``below``. ``adapt`` and ``autohet`` also respect memory; ``uniform`` and ``holmes`` do not.
    """
    stages, blocks = len(slots), len(slots[0].costs.forward_seconds)
    if stages > blocks:
        raise ValueError(
            f"{stages} stages for {blocks} blocks: each stage needs at least one block, so use at most {blocks} slots"
        )
    found = exact(slots, hops, micro_batches, below) if method == "exact" else RULES[method](slots, hops, micro_batches)
    if found is None:
        raise ValueError(_memory_message(slots, micro_batches) if below == math.inf else "no split is fast enough")
    return found


def _memory_message(slots: Sequence[Slot], micro_batches: int) -> str:
    """Error message that names a block which no slot can hold even alone, or else the bytes that all need and have."""
    stages, blocks = len(slots), len(slots[0].costs.forward_seconds)
    needs = np.array(
        [
            slot.costs.state_bytes + min(micro_batches, stages - stage) * slot.costs.activation_bytes
            for stage, slot in enumerate(slots)
        ]
    )
    # Blocks before and behind it are in other stages.
    first = np.arange(stages)[:, None]
    needs[(np.arange(blocks) < first) | (np.arange(blocks) > first + blocks - stages)] = np.inf
    over = needs - np.array([slot.memory_bytes for slot in slots])[:, None]
    block = int(over.min(axis=0).argmax())
    index = int(over[:, block].argmin())
    problem = (
        f"block {block} alone needs {_gigabytes(needs[index, block])} in slot {slots[index].name}, which has "
        f"{_gigabytes(slots[index].memory_bytes)}, and no other slot can hold it"
        if over[index, block] > 0
        else f"the blocks need at least {_gigabytes(float(needs.min(axis=0).sum()))} and the slots have "
        f"{_gigabytes(sum(slot.memory_bytes for slot in slots))}; stages hold whole blocks, and early stages keep "
        "several micro-batches in flight"
    )
    return (
        f"no split fits in memory: {problem}; use smaller micro-batches, more tensor parallelism, or devices with more "
        "memory"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


HOLMES_ALPHA = 1.05
"""α of Holmes' Eq. 2; the value is from section 4.4."""

ROUNDING = 1e-9  # relative rounding error of speeds and loads


def _speeds(slots: Sequence[Slot]) -> NDArray[np.float64]:
    """Speed of each slot, in micro-batches per second if the slot ran all blocks, ``[stages]``."""
    totals = [slot.costs.cumulative for slot in slots]
    return np.array([1.0 / max(float(t.forward_seconds[-1] + t.backward_seconds[-1]), 1e-30) for t in totals])


def uniform_bounds(blocks: int, stages: int) -> tuple[int, ...]:
    """Bounds of Colossal-AI's ``PipelineStageManager.distribute_layers``: equal parts, larger ones in the middle."""
    parts = np.full(stages, blocks // stages)
    extra = blocks % stages
    start = stages // 2 - extra // 2
    parts[start : start + extra] += 1
    return _bounds(parts)


def uniform(slots: Sequence[Slot], hops: Sequence[Channel], micro_batches: int) -> tuple[int, ...]:
    return uniform_bounds(len(slots[0].costs.forward_seconds), len(slots))


def holmes(slots: Sequence[Slot], hops: Sequence[Channel], micro_batches: int) -> tuple[int, ...]:
    """Holmes' self-adapting partition (docs/algorithms.md, 3): in order of speed, a stage of speed S gets
    ``⌊α·N·S/ΣS⌋`` of the N blocks; the slowest stages share the rest. If all are equally fast, the parts are equal."""
    measured = [slot.training_speed for slot in slots]
    speeds = _speeds(slots) if None in measured else np.array(measured, dtype=float)
    slowest = speeds <= speeds.min() * (1 + ROUNDING)
    parts = np.zeros(len(slots), dtype=int)
    blocks = left = len(slots[0].costs.forward_seconds)
    waiting = len(slots)
    for stage in np.argsort(-speeds, kind="stable"):
        if slowest[stage]:
            continue
        wanted = math.floor(HOLMES_ALPHA * blocks * speeds[stage] / speeds.sum() + ROUNDING)
        waiting -= 1
        parts[stage] = min(max(wanted, 1), left - waiting)
        left -= parts[stage]
    parts[slowest] = np.diff(uniform_bounds(left, int(slowest.sum())))
    return _bounds(parts)


def autohet(slots: Sequence[Slot], hops: Sequence[Channel], micro_batches: int) -> tuple[int, ...] | None:
    """AutoHet's balance (section III-C, Eq. 4): of the splits that fit in memory with the smallest ``max l/g``, with l
    a stage's blocks and g its speed, one with the smallest ``Σ l/g``; None if none fits. The printed ``max g/l`` is
    smallest if one stage does all the work; the text asks for balance."""
    speed = _speeds(slots)
    blocks = np.arange(len(slots[0].costs.forward_seconds) + 1)
    shares = speed / speed.sum() * blocks[-1]
    lengths = blocks - blocks[:, None]
    possible = [fits(slot, min(micro_batches, len(slots) - stage)) & (lengths > 0) for stage, slot in enumerate(slots)]
    loads = windows(list(np.where(possible, lengths / shares[:, None, None], np.inf)))
    longest = min_longest(loads)
    return None if longest == math.inf else min_sum_bounds(loads, loads, longest * (1 + ROUNDING))


def _bounds(parts: NDArray[np.int_]) -> tuple[int, ...]:
    return (0, *(int(bound) for bound in np.cumsum(parts)))


RULES: dict[str, Callable[[Sequence[Slot], Sequence[Channel], int], tuple[int, ...] | None]] = {
    "uniform": uniform,
    "holmes": holmes,
    "adapt": adapt,
    "autohet": autohet,
}
"""By name; a method gives None if no split fits in memory."""

METHODS = ("exact", *RULES)
