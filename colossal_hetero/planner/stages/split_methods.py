"""The methods that divide the blocks of a model over the stages, by name; see docs/algorithms.md, section 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .fixed_order import exact
from .pipeline import Pipeline, Split
from .rules import adapt, autohet, holmes, uniform, uniform_bounds

__all__ = ["METHODS", "split", "uniform_bounds"]

METHODS = ("exact", "uniform", "holmes", "adapt", "autohet")

_SPLITS: dict[str, Callable[[Pipeline, Sequence[int] | None], Split | None]] = {
    "exact": exact,
    "uniform": uniform,
    "holmes": holmes,
    "adapt": adapt,
    "autohet": autohet,
}


def split(
    pipeline: Pipeline,
    method: str = "exact",
    *,
    order: Sequence[int] | None = None,
) -> Split:
    """Divide the model over the slots.

    ``exact`` has the smallest ``evaluate(...).seconds``, without updates, of all splits in this order that fit in
    memory, or of those in a few orders. ``adapt`` and ``autohet`` also respect memory; for ``uniform`` and ``holmes``,
    check ``evaluate(...).fits``.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: valid are {', '.join(METHODS)}")
    _check(pipeline, order)
    fixed = None if order is None else tuple(order)
    found = _SPLITS[method](pipeline, fixed)
    if found is None:
        raise ValueError(_memory_message(pipeline, order))
    return found


def _check(pipeline: Pipeline, order: Sequence[int] | None) -> None:
    stages = len(pipeline.slots)
    if stages == 0:
        raise ValueError("no slots: a pipeline needs at least one")
    if stages > pipeline.blocks:
        raise ValueError(
            f"{stages} stages for {pipeline.blocks} blocks: each stage needs at least one block, so use at most "
            f"{pipeline.blocks} slots"
        )
    different = sorted({len(slot.costs.forward_seconds) for slot in pipeline.slots})
    if len(different) > 1:
        raise ValueError(f"the slots have costs for different numbers of blocks: {different}; they must be the same")
    if pipeline.micro_batches < 1:
        raise ValueError(f"{pipeline.micro_batches} micro-batches: an iteration must have at least 1")
    if order is not None and sorted(order) != list(range(stages)):
        raise ValueError(f"order {list(order)} is not a permutation of the slots 0 to {stages - 1}")


def _memory_message(pipeline: Pipeline, order: Sequence[int] | None) -> str:
    """Error message that names a block which no slot can hold even alone, or else the first stage that overflows."""
    stages = len(pipeline.slots)
    best_by_block: list[tuple[float, int, int, float]] = []
    for block in range(pipeline.blocks):
        by_slot = []
        for index, slot in enumerate(pipeline.slots):
            # The last stage that can hold the block has the fewest micro-batches in flight.
            stage = order.index(index) if order is not None else min(block, stages - 1)
            in_flight = min(pipeline.micro_batches, stages - stage)
            need = float(slot.costs.state_bytes[block] + in_flight * slot.costs.activation_bytes[block])
            by_slot.append((need - slot.memory_bytes, block, index, need))
        best_by_block.append(min(by_slot))
    over, block, index, need = max(best_by_block)
    slot = pipeline.slots[index]
    if over > 0:
        return (
            f"no split fits in memory: block {block} alone needs {_gigabytes(need)} in slot {slot.name}, which has "
            f"{_gigabytes(slot.memory_bytes)}, and no other slot can hold it; use smaller micro-batches, more tensor "
            "parallelism, or devices with more memory"
        )
    return _overflow_message(pipeline, order)


def _overflow_message(pipeline: Pipeline, order: Sequence[int] | None) -> str:
    """Error message on the blocks that do not fit if stages are filled in turn, or by memory without an order."""
    stages = len(pipeline.slots)
    if order is None:
        order = sorted(range(stages), key=lambda index: pipeline.slots[index].memory_bytes)
    start = 0
    for stage, index in enumerate(order):
        slot = pipeline.slots[index]
        in_flight = min(pipeline.micro_batches, stages - stage)
        totals = slot.costs.cumulative
        total = totals.state_bytes + in_flight * totals.activation_bytes
        stop = int(np.searchsorted(total, total[start] + slot.memory_bytes, side="right")) - 1
        if stop == start or (stage == stages - 1 and stop < pipeline.blocks):
            break
        start = min(stop, pipeline.blocks - (stages - stage - 1))
    else:
        return (
            "no split fits in memory in any order; use smaller micro-batches, more tensor parallelism, or more devices"
        )
    what = f"block {start}" if stop == start else f"blocks {start} to {stop}"
    return (
        f"no split fits in memory: if the slots are filled in turn, {what} in slot {slot.name} as stage {stage}, with "
        f"{in_flight} micro-batch{'' if in_flight == 1 else 'es'} in flight, need{'s' if stop == start else ''} "
        f"{_gigabytes(float(total[stop + 1] - total[start]))}, but the slot has {_gigabytes(slot.memory_bytes)}; use "
        "smaller micro-batches, more tensor parallelism, or more devices"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
