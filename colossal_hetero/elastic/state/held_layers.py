"""Which part of the model's state each device holds, and what it lacks for another plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...planner.plans.plan import Plan

__all__ = ["HeldLayers", "layers_by_rank", "missing_bytes"]


class HeldLayers(NamedTuple):
    """The layers on one device: parameters and optimizer state of blocks, or one tensor-parallel part of each."""

    ranges: tuple[tuple[int, int], ...]
    """``[a, b)`` of blocks."""
    part: int = 0
    """Which part, from 0."""
    parts: int = 1
    """The tensor-parallel degree."""


def layers_by_rank(plan: Plan) -> dict[int, HeldLayers]:
    """What each rank of a plan holds."""
    return {
        rank: HeldLayers(stage.block_ranges, part, len(stage.ranks))
        for replica in plan.replicas
        for stage in replica.stages
        for part, rank in enumerate(stage.ranks)
    }


def missing_bytes(held: HeldLayers | None, needed: HeldLayers | None, block_bytes: Sequence[float]) -> float:
    """Bytes that a device must get for what is ``needed`` on it, if it holds ``held``.

    Args:
        held: What it holds; None for nothing.
        needed: What it needs; None for nothing.
        block_bytes: Bytes of parameters and optimizer state by block, all tensor-parallel parts together.
    """
    if needed is None:
        return 0.0
    total = sum(sum(block_bytes[start:stop]) for start, stop in needed.ranges) / needed.parts
    if held is None:
        return total
    start = max(needed.part / needed.parts, held.part / held.parts)
    stop = min((needed.part + 1) / needed.parts, (held.part + 1) / held.parts)
    kept = sum(block_bytes[block] for block in _blocks(needed) & _blocks(held)) * max(stop - start, 0.0)
    return max(total - kept, 0.0)


def _blocks(layers: HeldLayers) -> set[int]:
    return {block for start, stop in layers.ranges for block in range(start, stop)}
