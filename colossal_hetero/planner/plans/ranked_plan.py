"""A plan in a list of plans, best first, with a reason for its place."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Plan

__all__ = ["RankedPlan"]


@dataclass(frozen=True)
class RankedPlan:
    """A plan and why it is where it is in the list."""

    plan: Plan
    reason: str
    """Why it is the best, or how much slower than the best it is and what most of that comes from."""
