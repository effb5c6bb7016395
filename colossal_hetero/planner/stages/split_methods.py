"""Which stage gets which blocks of the model, by name of the method; see docs/algorithms.md, section 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .adapt_search import adapt
from .exact import exact
from .local_search import simulated
from .pipeline import Pipeline, Split
from .rules import autohet, holmes, uniform, uniform_bounds

__all__ = ["METHODS", "split", "uniform_bounds"]

METHODS = ("exact", "simulated", "uniform", "holmes", "adapt", "autohet")

_SPLITS: dict[str, Callable[[Pipeline, Sequence[int] | None], Split | None]] = {
    "exact": exact,
    "simulated": simulated,
    "uniform": uniform,
    "holmes": holmes,
    "adapt": adapt,
    "autohet": autohet,
}


def split(pipeline: Pipeline, method: str = "exact", *, order: Sequence[int] | None = None) -> Split:
    """Divide the model over the slots.

    ``exact`` has the smallest ``evaluate(...).seconds`` of all splits and orders that fit in memory. With very many
    different slots (more than ``exact.MAX_STATES``) it tries only some good orders. ``adapt`` and ``autohet`` also
    respect memory. ``uniform`` and ``holmes`` do not, so check ``evaluate(...).fits``. ``simulated`` improves the
    result of ``exact`` under the event simulation, which helps if there are fewer than four micro-batches per stage.

    Args:
        pipeline: The pipeline to divide.
        method: One of ``METHODS``.
        order: The slot of each stage, if only the bounds are to be chosen. Without it, ``exact``, ``simulated`` and
            ``adapt`` choose the order, ``autohet`` puts the slowest slots first, and ``uniform`` and ``holmes`` keep
            the order of the slots.

    Raises:
        ValueError: The method is unknown, the order is not a permutation of the slots, there are more stages than
            blocks or no micro-batch, or (``exact``, ``simulated``, ``adapt``, ``autohet``) no split fits in memory.
    """
    if method not in _SPLITS:
        raise ValueError(f"unknown method {method!r}: valid are {', '.join(METHODS)}")
    _check(pipeline, order)
    found = _SPLITS[method](pipeline, None if order is None else tuple(order))
    if found is None:
        raise ValueError(_what_does_not_fit(pipeline, order))
    return found


def _check(pipeline: Pipeline, order: Sequence[int] | None) -> None:
    stages = len(pipeline.slots)
    if stages == 0:
        raise ValueError("no slots: a pipeline has at least one")
    if stages > pipeline.blocks:
        raise ValueError(
            f"{stages} stages for {pipeline.blocks} blocks: each stage holds at least one, so use at most "
            f"{pipeline.blocks} slots"
        )
    different = sorted({len(slot.costs.forward_seconds) for slot in pipeline.slots})
    if len(different) > 1:
        raise ValueError(f"the slots' costs are of models with {different} blocks: all must be of the same")
    if pipeline.micro_batches < 1:
        raise ValueError(f"{pipeline.micro_batches} micro-batches: an iteration has at least 1")
    if order is not None and sorted(order) != list(range(stages)):
        raise ValueError(f"order {list(order)} is no permutation of the slots 0 to {stages - 1}")


def _what_does_not_fit(pipeline: Pipeline, order: Sequence[int] | None) -> str:
    """A block that no slot can hold even alone, else what most is asked of the slot that the filling ends at."""
    stages = len(pipeline.slots)
    roomiest: list[tuple[float, int, int, float]] = []
    for block in range(pipeline.blocks):
        ways = []
        for index, slot in enumerate(pipeline.slots):
            stage = order.index(index) if order is not None else _latest_stage(block, pipeline.blocks, stages)
            in_flight = min(pipeline.micro_batches, stages - stage)
            need = float(slot.costs.state_bytes[block] + in_flight * slot.costs.activation_bytes[block])
            ways.append((need - slot.memory_bytes, block, index, need))
        roomiest.append(min(ways))
    over, block, index, need = max(roomiest)
    slot = pipeline.slots[index]
    if over > 0:
        return (
            f"no split fits in memory: block {block} alone needs {_gigabytes(need)} in slot {slot.name}, which has "
            f"{_gigabytes(slot.memory_bytes)}, and no other slot can hold it; use smaller micro-batches, more tensor "
            "parallelism, or devices with more memory"
        )
    return _where_filling_ends(pipeline, order)


def _latest_stage(block: int, blocks: int, stages: int) -> int:
    """The last stage that can hold a block, where the fewest micro-batches are in flight."""
    return min(block, stages - 1) if blocks else 0


def _where_filling_ends(pipeline: Pipeline, order: Sequence[int] | None) -> str:
    """Fill stage by stage, as much as fits, the slots as ordered or the smallest first; name the block left over."""
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
            "no split fits in memory, in any order; use smaller micro-batches, more tensor parallelism, or more devices"
        )
    what = f"block {start}" if stop == start else f"blocks {start} to {stop}"
    return (
        f"no split fits in memory: if the {stages} slots are filled one after the other, {what} in slot {slot.name} as "
        f"stage {stage}, with {in_flight} micro-batches in flight, need{'s' if stop == start else ''} "
        f"{_gigabytes(float(total[stop + 1] - total[start]))} of {_gigabytes(slot.memory_bytes)}; use smaller "
        "micro-batches, more tensor parallelism, or more devices"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
