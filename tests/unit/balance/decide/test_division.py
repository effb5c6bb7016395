"""The fastest division of whole units, when it is changed, and when units are permanently re-sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import BalanceConfig, BalancePlan, Costs, RankTimes, decide
from colossal_hetero.balance.modes import (
    KindProblem,
    LayerKind,
    UnitWork,
    decide_counts,
    iteration_seconds,
    relieved_for,
    relieved_ranks,
    stays_resharded,
    wants_resharding,
)
from colossal_hetero.balance.plan import Counts
from colossal_hetero.balance.ratios import (
    Line,
    UnitKind,
    fastest_counts,
    moved_units,
    slowest_seconds,
)


def lines_of(slopes: list[float], full: int, fixed: float = 0.0, above: float = 1.0) -> list[Line]:
    """A line for each rank that takes ``fixed`` and ``slope`` per unit; units of other ranks take ``above`` as long."""
    return [Line(full, fixed + slope * full, slope, above * slope, full) for slope in slopes]


def divisions(kind: UnitKind, ranks: int) -> list[tuple[int, ...]]:
    """All possible divisions."""
    most = kind.units + kind.max_taken
    steps = [count for count in range(1, most + 1) if (count - kind.units) % kind.grain == 0]
    return [counts for counts in product(steps, repeat=ranks) if sum(counts) == ranks * kind.units]


@st.composite
def problems(draw: st.DrawFn) -> tuple[UnitKind, list[Line], float]:
    ranks = draw(st.integers(2, 4))
    units = draw(st.integers(1, 8 if ranks < 4 else 5))
    grain = draw(st.integers(1, min(3, units)))
    kind = UnitKind(units, grain, draw(st.integers(0, units * (ranks - 1))))
    slopes = [draw(st.floats(0.5, 8.0)) for _ in range(ranks)]
    lines = lines_of(slopes, units, draw(st.floats(0, 3)), draw(st.floats(1.0, 1.5)))
    return kind, lines, draw(st.sampled_from([0.0, 0.05, 0.5, 5.0]))


@given(problems())
def test_no_division_is_faster(problem: tuple[UnitKind, list[Line], float]) -> None:
    kind, lines, per_unit = problem

    def seconds(counts: tuple[int, ...]) -> float:
        return slowest_seconds(lines, counts) + per_unit * moved_units(kind, counts)

    every = divisions(kind, len(lines))
    found = fastest_counts(kind, lines, per_unit)
    assert found in every
    assert seconds(found) == pytest.approx(min(map(seconds, every)))
    # Of equally fast divisions it is one that moves the least.
    equal = [counts for counts in every if seconds(counts) <= seconds(found) * (1 + 1e-12)]
    assert moved_units(kind, found) <= min(moved_units(kind, counts) for counts in equal) + kind.grain * (per_unit > 0)


HEADS = UnitKind(8, 1, 8)
NEURONS = UnitKind(64, 1, 64)
FREE = Costs()


def problem(kind: UnitKind, slowdowns: tuple[float, ...], per_unit: float = 0.0) -> KindProblem:
    """A full share takes 1 s times the rank's slowdown."""
    lines = [
        Line(kind.units, slowdown, slowdown / kind.units, slowdown / kind.units, kind.units) for slowdown in slowdowns
    ]
    return KindProblem(kind, lines, per_unit)


KINDS = [LayerKind(8, 1, 0.25), LayerKind(64, 1, 0.75)]


def decide_units(
    slowdowns: tuple[float, float],
    current: BalancePlan,
    uncertainty: float,
    kinds: Sequence[LayerKind] = KINDS,
    costs: Costs = FREE,
    mode: str = "auto",
    max_received: float = math.inf,
) -> BalancePlan:
    """The plan for two ranks, whose full share of each kind takes 1 s times the rank's slowdown."""
    lines = [problem(UnitKind(kind.units or 0, 1, 64), slowdowns).lines for kind in kinds]
    times = [RankTimes(2 * slowdown, 2 * slowdown) for slowdown in slowdowns]
    config = BalanceConfig(mode=mode)  # type: ignore[arg-type]
    return decide(times, costs, config, current, uncertainty, UnitWork(kinds, lines), max_received)


IDLE = BalancePlan.idle(2)


def test_the_time_is_a_sum_over_blocks_of_the_slowest_rank() -> None:
    problems = [problem(HEADS, (1.0, 2.0)), problem(NEURONS, (3.0, 1.0))]
    assert iteration_seconds(problems, ((8, 8), (64, 64))) == 5.0
    assert iteration_seconds(problems, ((8, 8), (64, 64)), fixed_seconds=1.0) == 5.0
    assert iteration_seconds(problems, ((12, 4), (64, 64)), fixed_seconds=1.0) == 1.5 + 3.0 + 1.0


@pytest.mark.parametrize("slowdown, uncertainty, changes", [(1.3, 0.05, True), (1.3, 0.2, False), (1.05, 0.005, True)])
def test_a_gain_must_exceed_the_uncertainty(slowdown: float, uncertainty: float, changes: bool) -> None:
    problems = [problem(NEURONS, (slowdown, 1.0))]
    counts, note = decide_counts(problems, ((64, 64),), uncertainty)
    assert (counts != ((64, 64),)) == changes
    assert note.startswith("migration pays" if changes else "balancing would gain too little")


def test_sending_that_costs_more_than_it_saves_is_not_done() -> None:
    problems = [problem(NEURONS, (2.0, 1.0), per_unit=0.1)]
    assert decide_counts(problems, ((64, 64),), 0.01)[0] == ((64, 64),)
    assert decide_counts([problem(NEURONS, (2.0, 1.0))], ((64, 64),), 0.01, fixed_seconds=1.0)[0] == ((64, 64),)
    counts, note = decide_counts(problems, ((43, 85),), 0.01)
    assert counts == ((64, 64),) and note.startswith("migration cannot pay")


def test_a_division_stays_while_a_change_would_gain_too_little() -> None:
    problems = [problem(NEURONS, (2.0, 1.0))]
    assert decide_counts(problems, ((45, 83),), 0.05) == (
        ((45, 83),),
        "migration pays: 1.34 s in blocks with, 2 s without",
    )


def test_a_plan_has_whole_units_and_their_shares() -> None:
    plan = decide_units((4.0, 1.0), IDLE, 0.05)
    assert plan.units == ((3, 13), (25, 103))
    share = 0.25 * 5 / 8 + 0.75 * 39 / 64
    assert plan.migrate == pytest.approx((share, 0.0), abs=1e-5) and plan.receive == pytest.approx(
        (0.0, share), abs=1e-5
    )
    assert decide_units((4.1, 1.0), plan, 0.05) == plan
    assert decide_units((1.0, 1.0), plan, 0.05) == IDLE


def test_memory_limits_what_a_rank_takes() -> None:
    plan = decide_units((4.0, 1.0), IDLE, 0.05, max_received=0.25)
    assert plan.units == ((6, 10), (48, 80)) and plan.max_received == 0.25
    assert plan.note.startswith("receivers have memory for no more than 25% of their own work; migration pays")


def test_auto_weighs_what_sending_costs_and_migrate_does_not() -> None:
    costs = Costs(migrate_seconds_per_share=10.0)
    for mode, migrates in (("auto", False), ("migrate", True)):
        plan = decide_units((2.0, 1.0), IDLE, 0.05, costs=costs, mode=mode)
        assert bool(plan.units) == migrates


def test_what_cannot_migrate_stays() -> None:
    kinds = [KINDS[0], replace(KINDS[1], moves=False)]
    plan = decide_units((1.0, 3.0), IDLE, 0.0, kinds)
    assert plan.units[0] != (8, 8) and plan.units[1] == (64, 64), plan


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


EVEN = BalancePlan.idle(4)


def test_a_rank_that_gives_units_of_one_kind_is_relieved_even_if_it_takes_others() -> None:
    assert relieved_ranks(in_units(((3, 5), (9, 7)))) == {0, 1}
    assert relieved_ranks(in_units(((3, 5), (8, 8)))) == {0}
    assert relieved_ranks(relieving(1, 3)) == {1, 3}
    assert relieved_ranks(EVEN) == frozenset()


@pytest.mark.parametrize(
    ("plan", "relieved", "after", "wanted"),
    [
        (relieving(1), (0, 50, 0, 0), 50, True),
        (relieving(1), (0, 49, 0, 0), 50, False),
        (relieving(1, 2), (0, 80, 10, 0), 50, True),
        (relieving(1, 2), (0, 49, 10, 0), 50, False),
        (relieving(1), (0, 10, 80, 0), 50, False),  # rank 2 is not relieved any more
        (relieving(1), (0, 10**6, 0, 0), None, False),
        (EVEN, (0, 80, 0, 0), 50, False),
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
        (relieving(1), EVEN, False),
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


def test_iterations_count_from_the_last_one_without_relief() -> None:
    counts: tuple[int, ...] = (0,) * 4
    for plan in (relieving(1), relieving(1, 2), relieving(2), relieving(1, 2), EVEN, relieving(1)):
        counts = relieved_for(counts, plan)
    assert counts == (0, 1, 0, 0)
    assert relieved_for((0, 3, 2, 0), relieving(1)) == (0, 4, 0, 0)
