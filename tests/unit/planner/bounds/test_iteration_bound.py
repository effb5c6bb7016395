"""No plan is faster than the lower bound."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from colossal_hetero.planner.cluster.topology import Channel, Device, Node, Topology
from colossal_hetero.planner.cost.draft import Draft, DraftBuilder
from colossal_hetero.planner.cost.runnable import NoPlanError
from colossal_hetero.planner.solver import iteration_bound as merging
from colossal_hetero.planner.solver.iteration_bound import IterationBound, PipelineTypes, _Pool, pack
from colossal_hetero.planner.solver.pipeline_bounds import BlockLimits, PipelineBounds, RelaxedPool
from colossal_hetero.planner.solver.search import Effort
from tests.support.every_plan import EveryPlan
from tests.support.planning import make_plans
from tests.support.random_clusters import (
    Problem,
    large_problem,
    like_nodes_problem,
    small_problem,
    two_nodes_problem,
    whole_space_problem,
)
from tests.support.random_examples import IS_THOROUGH

pytestmark = pytest.mark.unit

ROUNDING = 1e-9


def relaxed_pools(problem: Problem, **wishes: Any) -> list[RelaxedPool]:
    wished = problem.to_search(**wishes)
    return [RelaxedPool(wished, pool) for pool in wished.pools]


def bound_of(problem: Problem, below: float, **wishes: Any) -> float:
    return IterationBound(relaxed_pools(problem, **wishes)).seconds(below)


@pytest.mark.parametrize("seed", range(300 if IS_THOROUGH else 25))
def test_no_plan_of_all_is_faster(seed: int) -> None:
    problem = small_problem(seed)
    every = EveryPlan(*problem)
    best = min(every.best_seconds(unequal=False), every.best_seconds(unequal=True))
    if best < np.inf:
        assert bound_of(problem, 3 * best) <= best * (1 + ROUNDING)


@pytest.mark.parametrize(
    "wishes",
    [
        {"recompute": True, "zero_stages": (0, 1)},
        {"recompute": True, "zero_stages": (0,)},
        {"recompute": False, "zero_stages": (0, 1)},
        {"recompute": False, "zero_stages": (1,)},
    ],
    ids=["all", "recompute", "zero-0-1", "zero-1"],
)
def test_no_plan_of_all_is_faster_with_recomputation_and_zero(wishes: dict[str, Any]) -> None:
    """Of random problems in which memory is scarce."""
    ratios = []
    for seed in range(300 if IS_THOROUGH else 25):
        problem = whole_space_problem(seed)
        best = EveryPlan(*problem, **wishes).best_seconds(unequal=True)
        if best < np.inf:
            ratios.append(bound_of(problem, 3 * best, **wishes) / best)
            assert ratios[-1] <= 1 + ROUNDING, seed
    assert len(ratios) > 10
    assert np.median(ratios) > 0.8


def test_no_plan_of_all_is_faster_where_pipelines_share_network_cards() -> None:
    """Also where outputs differ between blocks: the bound is that of the smallest ones."""
    ratios = []
    for seed in range(300 if IS_THOROUGH else 25):
        problem = two_nodes_problem(seed)
        best = EveryPlan(*problem).best_seconds(unequal=True)
        if best < np.inf:
            ratios.append(bound_of(problem, best) / best)
            assert ratios[-1] <= 1 + ROUNDING, seed
    assert len(ratios) > 10


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


def test_many_kinds_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MAX_TYPES", 30)
    compared = 0
    for seed in range(100 if IS_THOROUGH else 15):
        problem = small_problem(seed)
        best = EveryPlan(*problem).best_seconds(unequal=True)
        if best < np.inf:
            assert bound_of(problem, 3 * best) <= best * (1 + ROUNDING), seed
            compared += 1
    assert compared


def test_pipelines_take_at_least_one_of_the_options() -> None:
    """Random pipelines of like nodes, by the closed form."""
    compared, ratios = 0, []
    for seed in range(100 if IS_THOROUGH else 20):
        problem = like_nodes_problem(seed).to_search()
        random, builder = np.random.default_rng(seed), DraftBuilder(problem.topology, "exact")
        for pool in problem.pools:
            lower = PipelineBounds.of_pool(pool)
            slots = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
            for _ in range(10):
                length = int(random.integers(1, min(len(slots), lower.blocks) + 1))
                row = [slots[place] for place in random.choice(len(slots), length, replace=False)]
                draft = builder.build_placed(pool, [row])
                if not isinstance(draft, Draft):
                    continue
                counts = np.bincount([kind for kind, _ in row], minlength=len(pool.kinds))[None]
                first, further = lower.options(counts)
                bound = float((first + (pool.total_micro_batches - 1) * further).min())
                assert bound <= draft.seconds * (1 + ROUNDING)
                ratios.append(draft.seconds / bound)
                compared += 1
    assert compared > 100
    assert np.median(ratios) < 1.3


def test_pipelines_some_of_whose_stages_hold_few_blocks() -> None:
    """Random cuts, of which some stages are free."""
    ratios = []
    for seed in range(100 if IS_THOROUGH else 20):
        random = np.random.default_rng(seed)
        for pool in like_nodes_problem(seed).to_search().pools:
            lower, kinds = PipelineBounds.of_pool(pool), len(pool.kinds)
            hop = lower.transfer_seconds + lower.schedule_seconds
            for _ in range(20):
                stages = int(random.integers(2, lower.blocks + 1)) if lower.blocks > 1 else 0
                if not stages:
                    continue
                row = random.integers(0, kinds, stages)
                cut = [0, *sorted(random.choice(np.arange(1, lower.blocks), stages - 1, replace=False)), lower.blocks]
                blocks, free = np.diff(cut), random.random(stages) < 0.6
                if (blocks > lower.blocks_per_stage[row]).any():
                    continue
                limits = BlockLimits(
                    np.bincount(row[free], minlength=kinds),
                    int(blocks[~free].max(initial=0)),
                    np.full(kinds, stages),
                    int(blocks[~free].sum()),
                )
                work = np.array(
                    [pool.kinds[kind].block_seconds[a:b].sum() for kind, a, b in zip(row, cut, cut[1:], strict=False)]
                )
                first, further = lower.options(np.bincount(row, minlength=kinds)[None], limits)
                micro_batches = int(random.integers(1, 20))
                seconds = work.sum() + 2 * (stages - 1) * hop + (micro_batches - 1) * (work + hop).max()
                seconds += min(float(kind.costs.update_seconds.sum()) for kind in pool.kinds) / stages
                bound = float((first + (micro_batches - 1) * further).min())
                assert bound <= seconds * (1 + ROUNDING)
                ratios.append(seconds / bound)
    assert len(ratios) > 100
    assert np.median(ratios) < 1.6


def test_prices_prove_no_more_than_all_combinations_allow() -> None:
    """Few pipelines of random types: by brute force over all combinations of types."""
    random, proved = np.random.default_rng(0), 0
    for _ in range(60):
        types, available, pipelines = int(random.integers(1, 6)), random.integers(1, 5, 2), int(random.integers(1, 4))
        counts = np.maximum(random.integers(0, 3, (types, 2)), [[0, 1]])
        first, further = random.uniform(1, 3, (1, types)), random.uniform(0.2, 1.0, (1, types))
        needed = int(random.integers(2, 12))
        kinds = PipelineTypes(counts, first, further, np.ones(types, dtype=np.int64), needed)
        low, _ = kinds.least_seconds(available, pipelines, 0.0, 50.0, (), 1e-4)
        times = np.linspace(0.5, 30, 400)
        possible = [second for second in times if _runs(kinds, available, pipelines, needed, float(second))]
        if possible:
            proved += 1
            assert low <= possible[0] * (1 + ROUNDING)
    assert proved > 20


def _runs(kinds: PipelineTypes, available: np.ndarray, pipelines: int, needed: int, seconds: float) -> bool:
    worth = kinds.micro_batches(seconds)

    def most(left: np.ndarray, pipelines: int, start: int) -> float:
        found = 0.0
        for number in range(start, len(worth)) if pipelines else ():
            rest = left - kinds.counts[number]
            if (rest >= 0).all():
                found = max(found, worth[number] + most(rest, pipelines - 1, number))
        return found

    return most(available, pipelines, 0) >= needed


def test_a_bound_that_is_asked_for_in_small_steps_is_as_good() -> None:
    """A step that is smaller than the precision once counted as proof that a range cannot be improved."""
    for seed in range(60 if IS_THOROUGH else 12):
        relaxed = relaxed_pools(large_problem(seed))
        at_once = IterationBound(relaxed)
        below = 1.5 * at_once.seconds(1e9, enough=0.0)
        bound = at_once.seconds(below)
        step_by_step = IterationBound(relaxed)
        for share in np.linspace(0.7, 1.0, 200).tolist():
            found = step_by_step.seconds(below, enough=share * below)
        assert found == pytest.approx(bound, rel=5e-3)


def test_a_bound_that_reaches_the_plan_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that are proved up to the time of the plan are done; once they were tried again until the time limit."""
    calls = 0
    improved = _Pool.improved

    def counted(self: _Pool, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        assert calls < 5000, "the same range is tried again and again"
        return improved(self, *arguments)

    monkeypatch.setattr(_Pool, "improved", counted)
    for pool in relaxed_pools(large_problem(0)):
        lowest = IterationBound([pool]).seconds(1e9, enough=0.0)
        for factor in (1.01, 1.05, 1.2):
            bound = IterationBound([pool]).seconds(lowest * factor)
            assert lowest * (1 - ROUNDING) <= bound <= lowest * factor


def test_equal_devices_reach_the_bound() -> None:
    """Four equal devices with fast links: the best plan is found, and proved to be nearly the best."""
    profile = like_nodes_problem(1).profile
    kind = like_nodes_problem(1).topology.devices[0].kind
    nodes = (Node("n", 0, (0, 1, 2, 3), Channel("NVLink", 1e15), ()),)
    topology = Topology(tuple(Device(kind, 0, 0) for _ in range(4)), nodes, ("here",))
    best = make_plans(
        topology, profile, global_batch=16, tensor_parallel=(1,), micro_batches=(1,), effort=Effort(bound_seconds=10)
    )[0].plan
    assert best.gap is not None and best.gap < 0.002


@pytest.mark.parametrize("seed", range(4))
def test_a_search_that_ends_early_keeps_its_promise(seed: int) -> None:
    problem = like_nodes_problem(seed)
    options = dict(topology=problem.topology, profile=problem.profile, global_batch=problem.global_batch)
    try:
        best = make_plans(**options)[0].plan  # type: ignore[arg-type]
    except ValueError:
        return
    early = make_plans(**options, effort=Effort(gap=0.5, bound_seconds=20))[0].plan  # type: ignore[arg-type]
    assert early.bound_seconds is not None and early.gap is not None
    assert early.bound_seconds <= best.iteration_seconds * (1 + ROUNDING)
    assert early.iteration_seconds <= best.iteration_seconds * (1 + early.gap) * (1 + ROUNDING)


def test_efforts_that_are_not_possible() -> None:
    with pytest.raises(ValueError, match=r"gap=-1: must be at least 0"):
        Effort(gap=-1, bound_seconds=1)
    with pytest.raises(ValueError, match=r"gap=0.03 without time to find a bound; give bound_seconds, such as 5"):
        Effort(gap=0.03)


def test_a_search_ends_when_a_plan_is_near_enough() -> None:
    topology, profile, global_batch = like_nodes_problem(1)
    wishes = dict(global_batch=global_batch, recompute=True, zero_stages=(0, 1))
    early = make_plans(topology, profile, effort=Effort(gap=1000.0, bound_seconds=5), **wishes)[0]
    whole = make_plans(topology, profile, **wishes)[0]
    assert early.plan.iteration_seconds >= whole.plan.iteration_seconds
    first, every = (int(re.findall(r"of the (\d+) plan", each.reason)[0]) for each in (early, whole))
    assert first < every


@pytest.mark.parametrize("options", [{"overlap": True}, {"schedules": ("1f1b", "zbv")}])
def test_no_gap_is_proved_for_other_plans(options: dict[str, Any]) -> None:
    topology, profile, global_batch = like_nodes_problem(1)
    with pytest.raises(ValueError, match="for the schedule 1f1b without overlap only"):
        make_plans(topology, profile, global_batch=global_batch, effort=Effort(gap=0.1, bound_seconds=1), **options)
    plan = make_plans(topology, profile, global_batch=global_batch, effort=Effort(bound_seconds=1), **options)[0].plan
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


def test_columns_that_are_alike_and_worth_nothing() -> None:
    counts = np.ones((50, 2))
    alike = pack(counts, np.full(50, 3.0), np.array([4.0, 4.0, 4.0]), 12.001, ())
    assert alike.is_too_little
    assert not pack(counts, np.full(50, 3.0), np.array([4.0, 4.0, 4.0]), 12.0, alike.basis).is_too_little
    assert pack(counts, np.zeros(50), np.array([4.0, 4.0, 4.0]), 1.0, alike.basis).is_too_little
