"""When units are given away for good, and when they are taken back."""

from __future__ import annotations

import pytest

from colossal_hetero.balance.decide.plan import BalancePlan, Counts
from colossal_hetero.balance.decide.resharding import (
    relieved_for,
    relieved_ranks,
    stays_resharded,
    wants_resharding,
)


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
        (relieving(1, 2), (0, 80, 10, 0), 50, False),  # rank 2 has become slow only lately
        (relieving(1, 2), (0, 80, 50, 0), 50, True),
        (relieving(1), (0, 10**6, 0, 0), None, False),
        (IDLE, (0, 80, 0, 0), 50, False),
    ],
)
def test_units_are_given_away_when_each_relieved_rank_was_slow_for_long(
    plan: BalancePlan, relieved: tuple[int, ...], after: int | None, wanted: bool
) -> None:
    assert wants_resharding(plan, relieved, after) is wanted


@pytest.mark.parametrize(
    ("current", "wanted", "stays"),
    [
        (relieving(1), relieving(1), True),
        (relieving(1, 2), relieving(2), True),
        (relieving(1), relieving(1, 2), False),
        (relieving(1), relieving(3), False),
        (relieving(1), IDLE, False),
    ],
)
def test_units_are_taken_back_when_other_ranks_are_slow(current: BalancePlan, wanted: BalancePlan, stays: bool) -> None:
    assert stays_resharded(current, wanted) is stays
