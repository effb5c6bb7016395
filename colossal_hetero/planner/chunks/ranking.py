"""Plans of several schedules in one list, best first, with a reason for each place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..plans.plan import Plan
from ..plans.ranked_plan import RankedPlan, compared, ranking_seconds

__all__ = ["merged_by_time", "ranked_by_time"]


def ranked_by_time(plans: Sequence[Plan], keep: int) -> list[RankedPlan]:
    """The best ``keep`` of these plans, which are in the order of their times, each with a reason."""
    return [
        RankedPlan(plan, _reason(plan, plans[0], f"the shortest simulated iteration of {len(plans)} plans"))
        for plan in plans[:keep]
    ]


def merged_by_time(one: Sequence[RankedPlan], other: Sequence[RankedPlan], keep: int) -> list[RankedPlan]:
    """The best ``keep`` of both lists. Where the best of a list is not the best of all, reasons are made anew."""
    both = sorted(
        [*one, *other], key=lambda each: ranking_seconds(each.plan.iteration_seconds, equal=each.plan.symmetric)
    )[:keep]
    best = both[0]
    kept = one if best in one else other
    return [each if each in kept else replace(each, reason=_reason(each.plan, best.plan, "")) for each in both]


def _reason(plan: Plan, best: Plan, of_best: str) -> str:
    if plan is best:
        return of_best
    slower = compared(plan.iteration_seconds, best.iteration_seconds)
    waits = [share for replica in plan.replicas for share in replica.bubble_shares]
    return f"{slower}: stages wait {100 * sum(waits) / len(waits):.0f} % of the time on average"
