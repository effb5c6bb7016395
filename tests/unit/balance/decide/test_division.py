"""When a division of units is changed, and what is said about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from colossal_hetero.balance import BalanceConfig, BalancePlan, Costs, RankTimes, decide
from colossal_hetero.balance.modes import KindProblem, LayerKind, UnitWork, decide_counts, iteration_seconds
from colossal_hetero.balance.ratios import Line, UnitKind

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


def test_each_kind_is_divided_by_its_own_times() -> None:
    problems = [problem(HEADS, (1.0, 2.0)), problem(NEURONS, (3.0, 1.0))]
    counts, note = decide_counts(problems, ((8, 8), (64, 64)), uncertainty=0.05)
    assert counts == ((11, 5), (32, 96))
    assert note == "migration pays: 2.88 s in blocks with, 5 s without"


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


@pytest.mark.parametrize("heads, is_lost", [(2, True), (64, False)])
def test_the_note_says_which_blocks_cannot_be_divided_evenly(heads: int, is_lost: bool) -> None:
    """Of two heads, a rank that is five times slower should keep two thirds of one."""
    kinds = [LayerKind(heads, 1, 0.5), LayerKind(64, 1, 0.5)]
    plan = decide_units((1.0, 5.0), IDLE, 0.0, kinds)
    assert ("blocks with 2 units per rank" in plan.note) == is_lost, plan.note


def test_what_cannot_migrate_stays() -> None:
    kinds = [KINDS[0], replace(KINDS[1], moves=False)]
    plan = decide_units((1.0, 3.0), IDLE, 0.0, kinds)
    assert plan.units[0] != (8, 8) and plan.units[1] == (64, 64), plan
