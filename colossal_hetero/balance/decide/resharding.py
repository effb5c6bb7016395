"""When units are given away for good, and when they are taken back. Pure.

Migrating sends the weights of units in each iteration, and their gradients back. If a rank stays slow, it is cheaper to
move the units once, with what the optimizer keeps of them. All ranks decide alike, from the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from .plan import BalancePlan

__all__ = ["relieved_for", "relieved_ranks", "stays_resharded", "wants_resharding"]


def relieved_ranks(plan: BalancePlan) -> frozenset[int]:
    """The ranks that give units of some kind of blocks away."""
    ranks = range(len(plan.migrate))
    return frozenset(
        rank
        for rank in ranks
        if plan.migrate[rank] > 0 or any(counts[rank] * len(counts) < sum(counts) for counts in plan.units)
    )


def relieved_for(before: Sequence[int], plan: BalancePlan) -> tuple[int, ...]:
    """For how many successive iterations each rank has been relieved, including one with ``plan``.

    Args:
        before: the same without this iteration.
        plan: what applied in the iteration.
    """
    relieved = relieved_ranks(plan)
    return tuple(count + 1 if rank in relieved else 0 for rank, count in enumerate(before))


def wants_resharding(plan: BalancePlan, relieved: Sequence[int], after: int | None) -> bool:
    """Whether the units that ``plan`` migrates are to be given away for good.

    They are once one of the ranks that it relieves has been relieved for ``after`` iterations, also by earlier plans.
    Units of other ranks move with them: if those recover soon, taking them back takes as long as few iterations in
    which they migrate.
    """
    return after is not None and any(relieved[rank] >= after for rank in relieved_ranks(plan))


def stays_resharded(current: BalancePlan, wanted: BalancePlan) -> bool:
    """Whether units stay given away for good when ``wanted`` replaces ``current``, which was carried out in this way.

    They do if the new plan relieves some of the same ranks; then only the difference moves. Otherwise all units are
    taken back, and what the new plan moves migrates in each iteration at first.
    """
    return bool(relieved_ranks(wanted) & relieved_ranks(current))
