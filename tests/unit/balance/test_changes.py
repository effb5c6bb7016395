"""Sentences about changes of the plan: one for each, with the measured times before and after."""

from __future__ import annotations

from colossal_hetero.balance.latest import SETTLED_AFTER, ChangeTeller, plan_in_words
from colossal_hetero.balance.plan import BalancePlan, RankTimes

SLOW = (RankTimes(1.0, 1.0), RankTimes(6.1, 6.1), RankTimes(1.2, 1.2))
RANKS = (4, 5, 6)


def migrating(share: float) -> BalancePlan:
    return BalancePlan((0.0,) * 3, (0.0, share, 0.0), (share / 2, 0.0, share / 2))


def tell(*changes: tuple[int, BalancePlan], iterations: int = 40) -> list[str]:
    """What is said in iterations of 2 s without a plan, and of 1 s with one."""
    said: list[str] = []
    teller, plans, moved = ChangeTeller(RANKS, said.append), dict(changes), False
    for iteration in range(iterations):
        teller.took(iteration, 1.0 if moved else 2.0)
        if iteration in plans:
            teller.changed(iteration, plans[iteration], SLOW)
            moved = sum(plans[iteration].migrate) > 0
    return said


def test_a_change_is_told_when_its_effect_is_known() -> None:
    words = "rank 5 takes 6.1 times as long as the fastest for the same layers: 68% of its work now runs on ranks 4, 6"
    assert tell((10, migrating(0.68)), iterations=10 + 2 + SETTLED_AFTER) == [f"{words}; iteration 2.000 s → 1.000 s"]
    assert tell((10, migrating(0.68)), iterations=10 + 1 + SETTLED_AFTER) == []


def test_the_end_of_a_plan_is_told() -> None:
    told = tell((10, migrating(0.68)), (20, BalancePlan.idle(3)))
    assert told[1:] == ["ranks 4-6: each does its own work again; iteration 1.000 s → 2.000 s"]


def test_small_changes_and_changes_that_do_not_last_are_not_told() -> None:
    assert len(tell((10, migrating(0.68)), (20, migrating(0.65)), (30, migrating(0.7)))) == 1
    (told,) = tell((10, migrating(0.4)), (12, migrating(0.68)))
    assert "68%" in told and told.endswith("iteration 2.000 s → 1.000 s")


def test_pruning_says_what_it_costs() -> None:
    (told,) = tell((10, BalancePlan.resizing((0.0, 0.5, 0.0))))
    assert "50% of its work is skipped, which costs accuracy" in told


def test_a_given_plan_is_told_without_times_if_none_are_known() -> None:
    words = plan_in_words(migrating(0.5), None, RANKS)
    assert words == "rank 5: 50% of its work now runs on ranks 4, 6"
