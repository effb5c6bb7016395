"""Ranks' speeds over time: what is noticed and when, and that plans settle, recover and are not shaken by flicker."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import BalanceConfig, BalancePlan
from colossal_hetero.balance.group_speed import GroupSpeed, KindWork
from colossal_hetero.balance.plan import RankTimes
from colossal_hetero.balance.ratios import KindProblem, Line, fastest_counts
from tests.support.random_examples import IS_THOROUGH, examples
from tests.support.simulated_group import OTHER, UNITS, SimulatedGroup

RESIZE = BalanceConfig(mode="resize")
MIGRATE = BalanceConfig(mode="migrate")


SIMULATED = examples(ordinary=15, thorough=150)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_makes_no_stragglers_beside_a_real_one(noise: float) -> None:
    """As with eight ranks on two cores: the least of eight noisy times is far below the others."""
    for seed in range(20):
        plans = SimulatedGroup(8, RESIZE, seed, noise=noise).run([4.0] * 40, 3)
        pruned = [{rank for rank, ratio in enumerate(plan.resize) if ratio > 0} for plan in plans]
        assert all(ranks <= {3} for ranks in pruned) and pruned[-1] == {3}, f"seed {seed}: {pruned}"


@SIMULATED
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(0, 7), st.floats(1.5, 8), st.floats(0, 0.1))
def test_the_plan_for_a_straggler_lands_on_eq1_in_few_changes_and_ends_with_it(seed, ranks, slow, slowdown, overhead):
    slow %= ranks
    group = SimulatedGroup(ranks, RESIZE, seed, noise=0.05, overhead=overhead)
    plans = group.run([1.0] * 10 + [slowdown] * 300, slow)[10:]
    # A ratio is corrected whenever it is known better, mostly two to four times.
    changes = sum(before != after for before, after in pairwise(plans))
    assert changes <= 12, f"{changes} changes of the plan"
    assert sum(other > 0 for other in group.plan.resize) == 1
    # Pruned to the time of the fastest rank, if the limit of the ratio allows it.
    ratio = group.plan.resize[slow]
    works = OTHER + 0.7 * slowdown * (1.0 - ratio + overhead)
    assert works == pytest.approx(OTHER + 0.7, rel=0.05) or ratio == RESIZE.largest_resize
    later = group.run([1.0] * 40, slow)
    # A rank that computed only a tenth of its work is not known exactly.
    assert all(plan.resize[slow] < 0.75 * ratio for plan in later[4:]), later[4]
    assert group.plan == BalancePlan.idle(ranks)


@pytest.mark.parametrize("slowdown", [1.1, 1.3, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_constant_straggler_ends_within_two_percent_of_the_best_division(ranks: int, slowdown: float) -> None:
    received = 1.5 if ranks in (3, 4) else 1.0
    for slow in range(ranks) if IS_THOROUGH else (0, ranks - 1):
        group = SimulatedGroup(ranks, MIGRATE, seed=slow, noise=0.03, received=received)
        group.run([slowdown] * 150, slow)
        slopes = [0.7 * (slowdown if rank == slow else 1.0) / UNITS for rank in range(ranks)]
        lines = [Line(UNITS, OTHER + UNITS * slope, slope, received * slope, UNITS) for slope in slopes]
        problem = KindProblem(UNITS, 1, UNITS * (ranks - 1), lines)
        best = fastest_counts(problem)
        counts = [round(group.load(rank) * UNITS) for rank in range(ranks)]
        assert problem.seconds(counts) <= 1.02 * problem.seconds(best), f"{counts}, not {best}"


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("lengths", ["lognormal", "uniform", "two lengths", "growing"])
def test_batches_of_different_lengths_are_no_stragglers(ranks: int, lengths: str) -> None:
    random = np.random.default_rng(ranks)
    draw = {
        "lognormal": lambda iteration: float(random.lognormal(0.0, 0.5)),
        "uniform": lambda iteration: float(random.uniform(0.2, 1.8)),
        "two lengths": lambda iteration: (0.3, 1.0)[iteration % 7 > 3],
        "growing": lambda iteration: 0.2 + iteration / 400,
    }[lengths]
    group = SimulatedGroup(ranks, MIGRATE, seed=ranks, noise=0.05)
    for iteration in range(400):
        group.iterate([1.0] * ranks, draw(iteration))
        assert group.plan == BalancePlan.idle(ranks), f"{iteration}: {group.plan}"


def test_a_slow_drift_is_noticed() -> None:
    group = SimulatedGroup(2, MIGRATE, noise=0.02)
    group.run([1.0 + max(0.0, iteration - 50) / 350 for iteration in range(400)])
    works = [OTHER + 0.7 * slowdown * group.load(rank) for rank, slowdown in enumerate((2.0, 1.0))]
    assert max(works) < 1.08 * min(works), works


def test_times_at_another_load_are_scaled_to_the_full_share() -> None:
    """Products of a quarter, with 0.2 s of overhead, and of one and a half, among kinds of 100 and 50 units."""
    speed = GroupSpeed([100.0, 50.0], 2, BalanceConfig(mode="auto", warmup_iterations=0, patience=1))
    assert speed.at_full_share(0, 5.0, 4.0, [100.0, 50.0]) == RankTimes(5.0, 4.0)
    assert speed.at_full_share(0, 3.0, 2.0, [50.0, 25.0]) == RankTimes(5.0, 4.0)
    for loads, movable in (([100.0, 50.0], [3.0, 1.0]), ([25.0, 12.5], [0.9, 0.3]), ([150.0, 75.0], [4.5, 1.5])):
        for _ in range(12):
            speed.observe([[KindWork(load, each, 0.5) for load, each in zip(loads, movable, strict=True)]] * 2)
        found = speed.at_full_share(0, 1.0 + sum(movable), sum(movable), loads)
        assert found.matmul_seconds == pytest.approx(4.0, rel=0.05)
        assert found.work_seconds == pytest.approx(1.0 + found.matmul_seconds)


@pytest.mark.parametrize("on, off", [(3, 3), (2, 2), (4, 4), (5, 3), (3, 9), (5, 5), (7, 3), (2, 7), (10, 10), (3, 60)])
def test_flicker_costs_at_most_two_percent(on: int, off: int) -> None:
    for ranks, slowdown in product((2, 4), (2.0, 4.0, 8.0)):
        if IS_THOROUGH or (ranks == 4) == (slowdown == 4.0):
            group = SimulatedGroup(ranks, MIGRATE)
            pattern = ([1.0] * 10 + ([slowdown] * on + [1.0] * off) * 200)[:310]
            group.run(pattern)
            unbalanced = sum(OTHER + 0.7 * each for each in pattern)
            assert group.seconds <= 1.02 * unbalanced, f"{ranks} ranks, {slowdown} times as slow"


@pytest.mark.parametrize("slowdown", [1.5, 4.0, 8.0])
def test_a_straggler_that_stays_is_answered_within_five_iterations(slowdown: float) -> None:
    plans = SimulatedGroup(2, MIGRATE).run([1.0] * 10 + [slowdown] * 5)
    assert plans[9] == BalancePlan.idle(2) != plans[-1]


def test_flicker_of_one_rank_does_not_delay_the_answer_to_another() -> None:
    group = SimulatedGroup(4, MIGRATE)
    for iteration in range(204):
        group.iterate([1.0, 4.0 if iteration % 6 < 3 else 1.0, 1.0, 1.0 if iteration < 198 else 3.0])
    assert group.plan.migrate[3] > 0 and group.plan.migrate[1] == 0
