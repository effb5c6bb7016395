"""Lower bounds of many devices: no plan that is found is faster; bounds of few devices are in ``test_all_plans``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from colossal_hetero.planner.cluster.topology import Channel, Device, Node, Topology
from colossal_hetero.planner.cost.runnable import NoPlanError
from colossal_hetero.planner.solver.iteration_bound import IterationBound, pack
from colossal_hetero.planner.solver.pipeline_bounds import RelaxedPool
from tests.support.planning import make_plans
from tests.support.random_clusters import (
    Problem,
    large_problem,
    like_nodes_problem,
)
from tests.support.random_examples import IS_THOROUGH

ROUNDING = 1e-9


def relaxed_pools(problem: Problem, **wishes: Any) -> list[RelaxedPool]:
    wished = problem.to_search(**wishes)
    return [RelaxedPool(wished, pool) for pool in wished.pools]


def bound_of(problem: Problem, below: float, **wishes: Any) -> float:
    return IterationBound(relaxed_pools(problem, **wishes)).seconds(below)


@pytest.mark.parametrize("seed", range(60 if IS_THOROUGH else 4))
@pytest.mark.parametrize("make", [large_problem, like_nodes_problem])
def test_no_plan_that_is_found_is_faster(make: Callable[[int], Problem], seed: int) -> None:
    problem = make(seed)
    try:
        found = make_plans(problem.topology, problem.profile, global_batch=problem.global_batch, keep=20)
    except NoPlanError:
        return
    best = min(each.plan.iteration_seconds for each in found)
    assert bound_of(problem, 3 * best) <= best * (1 + ROUNDING)


def test_a_bound_that_is_asked_for_in_small_steps_is_as_good() -> None:
    """A step that is smaller than the precision once counted as proof that a range cannot be improved."""
    for seed in range(60 if IS_THOROUGH else 6):
        relaxed = relaxed_pools(large_problem(seed))
        at_once = IterationBound(relaxed)
        lowest = at_once.seconds(1e9, enough=0.0)
        below = 1.5 * lowest
        bound = at_once.seconds(below)
        step_by_step = IterationBound(relaxed)
        for share in np.linspace(0.7, 1.0, 200).tolist():
            found = step_by_step.seconds(below, enough=share * below)
        assert found == pytest.approx(bound, rel=5e-3)
        # Ranges that are proved up to the time of the plan are done.
        assert lowest * (1 - ROUNDING) <= IterationBound(relaxed).seconds(lowest * 1.05) <= lowest * 1.05


def test_equal_devices_reach_the_bound() -> None:
    """Four equal devices with fast links: the best plan is found, and proved to be nearly the best."""
    profile = like_nodes_problem(1).profile
    kind = like_nodes_problem(1).topology.devices[0].kind
    nodes = (Node("n", 0, (0, 1, 2, 3), Channel("NVLink", 1e15), ()),)
    topology = Topology(tuple(Device(kind, 0, 0) for _ in range(4)), nodes, ("here",))
    best = make_plans(topology, profile, global_batch=16, tensor_parallel=(1,), micro_batches=(1,), bound_seconds=10)[
        0
    ].plan
    assert best.gap is not None and best.gap < 0.002


@pytest.mark.parametrize("seed", range(2))
def test_a_search_that_ends_early_keeps_its_promise(seed: int) -> None:
    problem = like_nodes_problem(seed)
    options = dict(topology=problem.topology, profile=problem.profile, global_batch=problem.global_batch)
    try:
        best = make_plans(**options)[0].plan  # type: ignore[arg-type]
    except ValueError:
        return
    early = make_plans(**options, gap=0.5, bound_seconds=20)[0].plan  # type: ignore[arg-type]
    assert early.bound_seconds is not None and early.gap is not None
    assert early.bound_seconds <= best.iteration_seconds * (1 + ROUNDING)
    assert early.iteration_seconds <= best.iteration_seconds * (1 + early.gap) * (1 + ROUNDING)


@pytest.mark.parametrize("options", [{"overlap": True}, {"schedules": ("1f1b", "zbv")}])
def test_no_gap_is_proved_for_other_plans(options: dict[str, Any]) -> None:
    topology, profile, global_batch = like_nodes_problem(1)
    with pytest.raises(ValueError, match=r"gap=-1: must be at least 0"):
        make_plans(topology, profile, global_batch=global_batch, gap=-1, bound_seconds=1)
    with pytest.raises(ValueError, match=r"gap=0.03 without time to find a bound; give bound_seconds, such as 5"):
        make_plans(topology, profile, global_batch=global_batch, gap=0.03)
    with pytest.raises(ValueError, match="for the schedule 1f1b without overlap only"):
        make_plans(topology, profile, global_batch=global_batch, gap=0.1, bound_seconds=1, **options)
    plan = make_plans(topology, profile, global_batch=global_batch, bound_seconds=1, **options)[0].plan
    assert plan.bound_seconds is None


# The linear program of slots and pipelines, compared with SciPy's solver


def test_prices_prove_the_largest_sum() -> None:
    """Random programs one after the other, each begun with the basis of the one before."""
    random = np.random.default_rng(0)
    for _ in range(30):
        kinds, columns = int(random.integers(1, 6)), int(random.integers(1, 300))
        counts = random.integers(0, 9, (columns, kinds)).astype(float)
        basis: tuple[int, ...] = ()
        for _ in range(5):
            values = random.integers(0, 40, columns) * (random.random(columns) < 0.8).astype(float)
            limits = np.append(random.integers(1, 100, kinds), random.integers(1, 30)).astype(float)
            solved = linprog(-values, A_ub=np.vstack([counts.T, np.ones(columns)]), b_ub=limits)
            assert solved.status == 0
            most = -solved.fun
            more = pack(counts, values, limits, most * (1 + 1e-7) + 1e-7, basis)
            assert more.is_too_little
            assert (more.prices >= 0).all()
            worth = float((values - counts @ more.prices).max())
            assert more.prices @ limits[:-1] + limits[-1] * max(worth, 0.0) <= most * (1 + 1e-7) + 1e-7
            reached = pack(counts, values, limits, most * (1 - 1e-7), more.basis)
            assert not reached.is_too_little
            basis = reached.basis
