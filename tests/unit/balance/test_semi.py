"""SEMI's Eq. 2, Eq. 3 and Algorithm 2; and that exact modes reach the report's bound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import BalanceConfig, BalancePlan, Costs, RankTimes, decide, predicted_seconds
from colossal_hetero.balance.modes import (
    COLUMN_PARTS,
    MIN_GAIN,
    divide_stragglers,
    migrating_stragglers,
    resize_and_migrate,
    semi_plan,
)
from colossal_hetero.balance.report import lossless_seconds

FREE = Costs()
slowdowns = st.one_of(st.just(1.0), st.floats(1, 10), st.floats(10, 2000))


@st.composite
def groups(draw: st.DrawFn, most_ranks: int = 5) -> list[RankTimes]:
    matmul = draw(st.lists(slowdowns, min_size=2, max_size=most_ranks))
    return [RankTimes(seconds + other, seconds) for seconds in matmul for other in [draw(st.floats(0, 0.5))]]


@given(groups(8))
def test_lossless_plans_without_costs_reach_the_reports_bound(times: list[RankTimes]) -> None:
    """Up to one part of the columns, which each rank keeps at least."""
    config, idle = BalanceConfig(mode="migrate", threshold=1e-9), BalancePlan.idle(len(times))
    plan = decide(times, FREE, config, idle)
    found, before = (predicted_seconds(times, FREE, each) for each in (plan, idle))
    other = [time.work_seconds - time.matmul_seconds for time in times]
    bound = lossless_seconds(other, [time.matmul_seconds for time in times])
    best = bound + max(time.matmul_seconds for time in times) / COLUMN_PARTS
    assert bound <= found * (1 + 1e-9)
    assert best > (1 - MIN_GAIN) * before if plan == idle else found <= best * (1 + 1e-9)


def test_only_products_move() -> None:
    """Other work takes 1 s on each rank."""
    plan = decide([RankTimes(5.0, 4.0), RankTimes(2.0, 1.0)], FREE, BalanceConfig(), BalancePlan.idle(2))
    assert plan.migrate[0] == pytest.approx(0.6, abs=1 / COLUMN_PARTS)


def group(*slowdowns: float, other: float = 0.0) -> list[RankTimes]:
    return [RankTimes(other + slowdown, slowdown) for slowdown in slowdowns]


FIG_11 = group(8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
"""The setting of the paper's Fig. 11: half of eight ranks straggle."""

share = st.floats(0, 0.3)


@given(st.floats(1.2, 10), st.integers(2, 8), st.floats(0, 1), st.tuples(*[share] * 4), st.floats(0.7, 1.5))
def test_eq2_balances_both_costs(slowdown: float, ranks: int, other: float, costs: Any, factor: float) -> None:
    fixed, per_share, sending, per_sent = costs
    times = group(slowdown, *(1.0,) * (ranks - 1), other=other)
    model = Costs(*costs, factor, 0.5)
    resized, migrated = resize_and_migrate(times, model, 0, 1.0)
    assert resized + migrated == pytest.approx((slowdown - 1.0) / slowdown)
    # With nothing migrated Φ1 has no fixed part, and with nothing resized Ω none; the equation keeps both.
    resizing = (fixed + per_share * resized) * slowdown
    migrating = 0.5 * (sending + per_sent * migrated) + factor * migrated / (ranks - 1)
    if resized > 1e-12 and migrated > 0:
        assert resizing == pytest.approx(migrating)
    elif migrated == 0:
        assert resizing <= migrating + 1e-12
    else:
        assert resizing >= migrating - 1e-9


def test_one_straggler_by_hand() -> None:
    times = [RankTimes(2.0, 1.0), RankTimes(2.0, 2.0), RankTimes(5.0, 4.0)]
    # γ = 0.75; 0.1·4 = migrated·2/2, as the slower receiver takes 2 s
    assert resize_and_migrate(times, Costs(resize_fixed=0.1), 2, 0.9) == pytest.approx((0.35, 0.4))
    assert resize_and_migrate(times, FREE, 2, 0.5) == (0.5, 0.25)  # resizing is free, but not allowed
    plan = semi_plan(group(1.0, 1.0, 4.0), Costs(resize_fixed=0.1), 0.9)
    assert plan.resize == pytest.approx((0.0, 0.0, 0.0))
    assert plan.migrate == pytest.approx((0.0, 0.0, 0.75)) and plan.receive == pytest.approx((0.375, 0.375, 0.0))
    assert plan.note == "Eq. 2: the straggler migrates 75% of its work and prunes 0%"
    # Work that cannot be moved is allowed for.
    plan = semi_plan(group(4.0, 1.0, 1.0, other=1.0), Costs(resize_fixed=1.0), 0.9)
    assert plan.migrate[0] == pytest.approx(0.75)
    stuck = [RankTimes(4.0, 0.5), RankTimes(1.0, 0.5), RankTimes(1.0, 0.5)]
    assert semi_plan(stuck, Costs(resize_fixed=1.0), 0.0).migrate[0] == pytest.approx(0.999)


@pytest.mark.parametrize("fixed, x", [(0.0, 4), (0.3, 3), (2.0, 3), (2.5, 2), (4.0, 2), (6.0, 1), (8.0, 0)])
def test_eq3_counts_those_for_whom_migration_pays(fixed: float, x: int) -> None:
    """f(x) = 7 − 0.22, 5 − 0.43, 3 − 0.61, 1 − 0.74, each less the communication."""
    assert migrating_stragglers(FIG_11, Costs(migrate_fixed_seconds=fixed), [0, 1, 2, 3]) == x


def test_several_stragglers() -> None:
    plan = divide_stragglers(FIG_11, [0, 1, 2], [0, 1, 2, 3], 0.9)
    assert plan.migrate == pytest.approx((7 / 8, 5 / 6, 3 / 4, 0, 0, 0, 0, 0))
    assert plan.resize == pytest.approx((0, 0, 0, 0.5, 0, 0, 0, 0))
    taken = (7 / 8 + 5 / 6 + 3 / 4) / 4
    assert plan.receive == pytest.approx((0, 0, 0, 0, taken, taken, taken, taken))
    assert plan.note == "Eq. 3: of 4 stragglers 3 migrate and 1 resize"


several = st.lists(st.floats(1.2, 10), min_size=2, max_size=4)


@given(several, st.integers(1, 4), st.tuples(*[share] * 4), st.floats(0, 0.9))
def test_no_number_of_migrating_stragglers_is_faster(
    slowdowns: list[float], healthy: int, costs: Any, cap: float
) -> None:
    times = group(*slowdowns, *(1.0,) * healthy, other=0.2)
    model = Costs(*costs)
    slowest = sorted(range(len(slowdowns)), key=lambda rank: (-slowdowns[rank], rank))
    most = migrating_stragglers(times, model, slowest)
    found = predicted_seconds(times, model, semi_plan(times, model, cap))
    for count in range(most + 1):
        by_hand = divide_stragglers(times, slowest[:count], slowest, cap)
        assert found <= predicted_seconds(times, model, by_hand) * (1 + 1e-9)


@pytest.mark.parametrize("cap, x", [(0.9, 1), (0.5, 3), (0.0, 4)])
def test_the_division_of_fig_11(cap: float, x: int) -> None:
    """Where half may be pruned, three migrate, which the paper found best by hand."""
    model = Costs(0.03, 0.05, 0.02, 0.05, 1.05)
    assert migrating_stragglers(FIG_11, model, [0, 1, 2, 3]) == 4
    assert semi_plan(FIG_11, model, cap).note == f"Eq. 3: of 4 stragglers {x} migrate and {4 - x} resize"


def test_of_equally_fast_divisions_the_one_that_prunes_least() -> None:
    """A rank that can hardly be helped decides how long an iteration takes."""
    times = [RankTimes(8.0, 0.5), *group(2.0, 1.0, 1.0, 1.0)]
    plan = semi_plan(times, FREE, 0.5)
    assert plan.resize == (0.0,) * 5 and plan.migrate[1] == pytest.approx(0.5)


@pytest.mark.parametrize("times", [group(1.0, 1.0), group(1.0, 1.05), [RankTimes(1.0, 0.0), RankTimes(2.0, 0.0)]])
def test_no_rank_is_slow(times: list[RankTimes]) -> None:
    assert semi_plan(times, FREE, 0.9, straggler_margin=0.1) == BalancePlan.idle(2)
