"""When units are given away for good, and when they are taken back."""

from __future__ import annotations

import pytest

from colossal_hetero.balance import BalanceConfig, Costs, RankTimes
from colossal_hetero.balance.modes import (
    LayerKind,
    UnitWork,
    decide,
    relieved_for,
    relieved_ranks,
    stays_resharded,
    wants_resharding,
)
from colossal_hetero.balance.plan import BalancePlan, Counts
from colossal_hetero.balance.ratios import Line


def relieving(*ranks: int, size: int = 4) -> BalancePlan:
    share = 0.3 * len(ranks) / (size - len(ranks))
    return BalancePlan(
        resize=(0.0,) * size,
        migrate=tuple(0.3 if rank in ranks else 0.0 for rank in range(size)),
        receive=tuple(0.0 if rank in ranks else share for rank in range(size)),
    )


def in_units(counts: Counts) -> BalancePlan:
    """A plan whose shares are balanced over the kinds."""
    return BalancePlan(resize=(0.0,) * 2, migrate=(0.0,) * 2, receive=(0.0,) * 2, units=counts)


IDLE = BalancePlan.idle(4)


def test_a_rank_that_gives_units_of_one_kind_is_relieved_even_if_it_takes_others() -> None:
    assert relieved_ranks(in_units(((3, 5), (9, 7)))) == {0, 1}
    assert relieved_ranks(in_units(((3, 5), (8, 8)))) == {0}
    assert relieved_ranks(relieving(1, 3)) == {1, 3}
    assert relieved_ranks(IDLE) == frozenset()


def test_iterations_count_from_the_last_one_without_relief() -> None:
    counts: tuple[int, ...] = (0,) * 4
    for plan in (relieving(1), relieving(1, 2), relieving(2), relieving(1, 2), IDLE, relieving(1)):
        counts = relieved_for(counts, plan)
    assert counts == (0, 1, 0, 0)
    assert relieved_for((0, 3, 2, 0), relieving(1)) == (0, 4, 0, 0)


@pytest.mark.parametrize(
    ("plan", "relieved", "after", "wanted"),
    [
        (relieving(1), (0, 50, 0, 0), 50, True),
        (relieving(1), (0, 49, 0, 0), 50, False),
        (relieving(1, 2), (0, 80, 10, 0), 50, True),
        (relieving(1, 2), (0, 49, 10, 0), 50, False),
        (relieving(1), (0, 10, 80, 0), 50, False),  # rank 2 is not relieved any more
        (relieving(1), (0, 10**6, 0, 0), None, False),
        (IDLE, (0, 80, 0, 0), 50, False),
    ],
)
def test_units_are_given_away_when_a_relieved_rank_was_slow_for_long(
    plan: BalancePlan, relieved: tuple[int, ...], after: int | None, wanted: bool
) -> None:
    assert wants_resharding(plan, relieved, after) is wanted


@pytest.mark.parametrize(
    ("current", "wanted", "stays"),
    [
        (relieving(1), relieving(1), True),
        (relieving(1, 2), relieving(2), True),
        (relieving(1), relieving(1, 2), True),
        (relieving(1), relieving(3), False),
        (relieving(1), IDLE, False),
    ],
)
def test_units_are_taken_back_when_only_other_ranks_are_slow(
    current: BalancePlan, wanted: BalancePlan, stays: bool
) -> None:
    assert stays_resharded(current, wanted) is stays


# What units cost that are moved once ----------------------------------------------------------------------------------


def units_of_rank_1(seconds_per_share: float, fixed: float, *sends: bool) -> list[int]:
    """How many of its 64 units of each kind rank 1 keeps; ``sends``: whether each kind is sent in every iteration."""
    kinds = [LayerKind(64, 1, 1.0 / len(sends), sends=each) for each in sends]
    costs = Costs(migrate_seconds_per_share=seconds_per_share, migrate_fixed_seconds=fixed)
    # Rank 1 takes four times as long for a unit.
    lines = [Line(64.0, 64.0, 1.0, 1.0, 64.0), Line(64.0, 256.0, 4.0, 4.0, 64.0)]
    work = UnitWork(kinds, [lines] * len(kinds))
    times = [RankTimes(1.0, 1.0), RankTimes(4.0, 4.0)]
    plan = decide(times, costs, BalanceConfig(mode="auto"), BalancePlan.idle(2), 0.0, work)
    return [counts[1] for counts in plan.units] if plan.units else [64] * len(kinds)


def test_units_that_are_moved_once_are_sent_at_no_cost() -> None:
    # Each share that is sent costs more than it saves; and so does sending anything.
    assert units_of_rank_1(10**4, 0.0, True) == [64]
    assert units_of_rank_1(0.0, 10**4, True) == [64]
    # With 25 units it takes 100 s, and the other rank with 103 units 103 s.
    assert units_of_rank_1(10**4, 10**4, False) == units_of_rank_1(0.0, 0.0, True) == [25]
    # Kinds that are sent in every iteration still cost what they do.
    assert units_of_rank_1(10**4, 0.0, False, True) == [25, 64]
