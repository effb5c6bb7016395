"""A plan in a list of plans, best first, with a reason for its place."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Plan

__all__ = ["MIN_UNEQUAL_GAIN", "MIN_WIDER_GAIN", "ROUNDING", "RankedPlan", "compared", "ranking_seconds"]

MIN_UNEQUAL_GAIN = 1.01
"""A plan whose replicas are not alike comes before one with equal replicas if it is faster by this factor at least.

Predicted times are wrong by more than 1 % (``benchmarks/pipeline``, ``benchmarks/planner``), so a smaller gain means
nothing, and equal replicas leave more choices: Colossal-AI's own plugin, other schedules, ZeRO stage 2, LoRA."""

MIN_WIDER_GAIN = 1.01
"""If simple plans are preferred, one with ZeRO stage 1, recomputation or stages of several forms comes first only if it
is faster by this factor at least, for the same reasons."""

ROUNDING = 1e-9
"""Times that differ by a smaller share count as equal."""


@dataclass(frozen=True)
class RankedPlan:
    """A plan and why it is where it is in the list."""

    plan: Plan
    reason: str
    """Why it is the best, or how much slower than the best it is and what most of that comes from."""


def ranking_seconds(seconds: float, *, equal: bool) -> float:
    """The time by which plans are compared: ``seconds`` of an iteration, or more if replicas are not alike.

    See :data:`MIN_UNEQUAL_GAIN`.
    """
    return seconds if equal else seconds * MIN_UNEQUAL_GAIN


def compared(
    seconds: float, best_seconds: float, *, what: str = "replicas that are not alike", gain: float = MIN_UNEQUAL_GAIN
) -> str:
    """How much slower a plan is than the best one, e.g. "3.1 % slower".

    It can be faster if it is not as simple: ``what`` it has must be faster by the factor ``gain``, see
    :data:`MIN_UNEQUAL_GAIN` and :data:`MIN_WIDER_GAIN`.
    """
    percent = 100 * (seconds / best_seconds - 1)
    if percent >= -100 * ROUNDING:
        return f"{max(percent, 0.0):.1f} % slower"
    return f"{-percent:.1f} % faster, but {what} must be faster by {100 * (gain - 1):.0f} %"
