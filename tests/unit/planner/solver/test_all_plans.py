"""Plans and lower bounds beside all plans of a few devices, and known plans of more; valid plans, and choices."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.cost.draft import DraftBuilder
from colossal_hetero.planner.cost.placed_pipelines import PlacedPipelines
from colossal_hetero.planner.cost.placement import NodeLinks, SlotPool
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.ranked_plan import MIN_GAIN
from colossal_hetero.planner.cost.runnable import NoPlanError, why_not_runnable
from colossal_hetero.planner.cost.tp_groups import MAX_COMPOSITIONS, compositions, slot_kinds
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver import iteration_bound
from colossal_hetero.planner.solver.iteration_bound import IterationBound, pack
from colossal_hetero.planner.solver.neighbors import Neighborhood
from colossal_hetero.planner.solver.pipeline_bounds import PipelineBounds, RelaxedPool
from colossal_hetero.planner.solver.search import search
from tests.support.every_plan import EveryPlan, wishes_to_prove
from tests.support.machines import of_nodes
from tests.support.planning import make_plans, predict_plan
from tests.support.random_clusters import (
    Problem,
    large_problem,
    like_nodes_problem,
    random_cluster,
    random_model,
    small_problem,
    two_nodes_problem,
    whole_space_problem,
)
from tests.support.random_examples import IS_THOROUGH
from tests.support.small_problems import cluster, profile

ROUNDING = 1e-9


def relaxed_pools(problem: Problem, **wishes: Any) -> list[RelaxedPool]:
    wished = problem.to_search(**wishes)
    return [RelaxedPool(wished, pool) for pool in wished.pools]


def bound_of(problem: Problem, below: float, **wishes: Any) -> float:
    return IterationBound(relaxed_pools(problem, **wishes)).seconds(below)


def found_and_bound(problem: Problem, best: dict[bool, float], **wishes: Any) -> list[Plan]:
    """What a search finds with equal replicas only, or with all, is what trying all plans finds, and no lower bound is
    above it. Empty if no plan fits."""
    found = []
    for unequal, seconds in best.items():
        wished = problem.to_search(**wishes, unequal=unequal)
        if seconds == np.inf:
            with pytest.raises(ValueError, match=r"memory|hold"):
                search(wished, keep=1)
            continue
        found.append(search(wished, keep=1).best)
        assert found[-1].iteration_seconds == pytest.approx(seconds, rel=ROUNDING)
        assert why_not_runnable(found[-1]) is None
    if found:
        assert bound_of(problem, 3 * min(best.values()), **wishes) <= min(best.values()) * (1 + ROUNDING)
    return found


PROBLEMS = 500 if IS_THOROUGH else 20
FIRST = 300
"""With the first problems, also the ordinary tests have plans that are easily missed (305, 309)."""


def test_no_plan_of_few_devices_is_better_and_no_bound_is_above(monkeypatch: pytest.MonkeyPatch) -> None:
    impossible = differ = 0
    for seed in range(FIRST, FIRST + PROBLEMS):
        problem = small_problem(seed)
        every = EveryPlan(*problem)
        best = {unequal: every.best_seconds(unequal=unequal) for unequal in (False, True)}
        found = found_and_bound(problem, best)
        impossible += not found
        differ += any(not plan.symmetric for plan in found)
        if found:
            with monkeypatch.context() as patch:
                patch.setattr(iteration_bound, "MAX_TYPES", 30)  # many kinds are merged
                assert bound_of(problem, 3 * min(best.values())) <= min(best.values()) * (1 + ROUNDING), seed
    assert impossible < PROBLEMS / 5
    assert differ > PROBLEMS / 10


FORMS = 300 if IS_THOROUGH else 25


def test_no_plan_is_better_with_recomputation_and_zero_and_no_bound_is_above() -> None:
    """Of problems in which memory is scarce."""
    ratios, used = [], Counter[str]()
    for seed in range(FORMS):
        problem, wishes = whole_space_problem(seed), wishes_to_prove(seed)
        unequal = seed % 4 > 0
        best = EveryPlan(*problem, **wishes).best_seconds(unequal=unequal)
        for plan in found_and_bound(problem, {unequal: best}, **wishes):
            if unequal:
                ratios.append(bound_of(problem, 3 * best, **wishes) / best)
            stages = [stage for replica in plan.replicas for stage in replica.stages]
            for stage in stages:
                assert stage.memory_bytes <= stage.memory_available_bytes * (1 + ROUNDING)
                assert wishes["recompute"] or not stage.recompute
            assert plan.zero_stage in wishes["zero_stages"]
            used += Counter(recompute=sum(stage.recompute for stage in stages), zero=plan.zero_stage)
    assert len(ratios) > FORMS / 3 and np.median(ratios) > 0.8
    assert min(used["recompute"], used["zero"]) > 0, used


def test_no_bound_is_above_where_pipelines_share_network_cards() -> None:
    """Also where outputs differ between blocks: the bound is that of the smallest ones."""
    compared = 0
    for seed in range(300 if IS_THOROUGH else 25):
        problem = two_nodes_problem(seed)
        best = EveryPlan(*problem).best_seconds(unequal=True)
        if best < np.inf:
            compared += 1
            assert bound_of(problem, best) <= best * (1 + ROUNDING), seed
    assert compared > 10


def nodes(sizes: Sequence[int], kinds: Sequence[str], bandwidths: Sequence[float]) -> Topology:
    """Nodes with this number and kind of devices, and this bandwidth in bytes per second of their network cards."""
    return of_nodes(
        ([DeviceKind(kind, 100, 1e12)] * size, Channel("NVLink", 3e11, 1e-5), (Channel("Ethernet", bandwidth, 1e-4),))
        for size, kind, bandwidth in zip(sizes, kinds, bandwidths, strict=True)
    )


def best(
    topology: Topology, model: ModelProfile, global_batch: int, *, method: str = "exact", unequal: bool = False
) -> Plan:
    return make_plans(topology, model, global_batch=global_batch, method=method, unequal=unequal, keep=1)[0].plan


@pytest.mark.parametrize("seed", range(60 if IS_THOROUGH else 4))
def test_no_slower_than_the_old_plan_if_a_device_became_slow(seed: int) -> None:
    model = random_model(np.random.default_rng(seed), max_blocks=12)
    before = nodes((4,), "A", (1e9,)) if seed % 2 else nodes((2, 4, 2), "AAB", (1e9, 1e9, 1e9))
    old = best(before, model, 24)
    devices = list(before.devices)
    devices[1] = dataclasses.replace(devices[1], speed=0.8)
    now = dataclasses.replace(before, devices=tuple(devices))
    bounds = [0, *(stage.blocks[1] for stage in old.replicas[0].stages)]
    kept = predict_plan(now, model, old.rank_order, micro_batch=old.micro_batch, global_batch=24, bounds=bounds)
    assert best(now, model, 24).iteration_seconds <= kept.iteration_seconds * (1 + 1e-9)


DEVICES = 6


def pool_of(seed: int) -> tuple[Topology, SlotPool]:
    random = np.random.default_rng(seed)
    model = random_model(random)
    topology = random_cluster(random, DEVICES)
    kinds = slot_kinds(topology, model, 1, 1)
    return topology, SlotPool(1, 1, tuple(kinds), 12, NodeLinks(topology, float(kinds[0].costs.output_bytes.max())))


@pytest.mark.parametrize(("pipelines", "stages"), [(2, 3), (3, 2), (1, 4)])
def test_nearly_the_best_of_all_arrangements_is_found(pipelines: int, stages: int) -> None:
    factors = []
    for seed in range(12):
        topology, pool = pool_of(seed)
        if stages > len(pool.kinds[0].costs.forward_seconds):
            continue
        builder = DraftBuilder(topology, "exact")
        placed, bounds = PlacedPipelines(builder, pool), PipelineBounds(pool)
        neighborhood = Neighborhood(placed, bounds, None, all_slots=False, others={}.__getitem__)
        slots = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
        best = np.inf
        for chosen in itertools.permutations(slots, pipelines * stages):
            rows = tuple(chosen[first * stages : (first + 1) * stages] for first in range(pipelines))
            if list(rows) == sorted(rows):  # each set of pipelines once
                draft = placed.best(rows, best)
                best = draft.seconds if draft is not None else best
        starts = neighborhood.starts(pipelines, stages)
        if best == np.inf or not starts:
            assert best == np.inf or len(slots) < DEVICES
            continue
        found = [neighborhood.improved(start, 400, equal=True).seconds for start in starts]
        assert all(after <= start.seconds for after, start in zip(found, starts, strict=True))
        factors.append(min(found) / best)
    assert len(factors) >= 4
    assert max(factors) < 1.05
    assert np.mean([factor < 1 + 1e-9 for factor in factors]) >= 0.8


# Bounds of many devices ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("options", [{"overlap": True}, {"schedules": ("1f1b", "zbv")}])
def test_no_gap_is_proved_for_other_plans(options: dict[str, Any]) -> None:
    topology, profile, global_batch = like_nodes_problem(1)
    plans = make_plans(topology, profile, global_batch=global_batch, bound_seconds=1, **options)
    assert plans[0].plan.bound_seconds is None


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


def check(plan: Plan, topology: Topology, global_batch: int) -> None:
    """Beyond what :class:`.Plan` checks: groups of one kind in a node, memory counted by hand, and the time."""
    assert sum(replica.micro_batches for replica in plan.replicas) * plan.micro_batch == global_batch
    for replica in plan.replicas:
        for number, stage in enumerate(replica.stages):
            assert len(stage.ranks) == plan.tensor_parallel
            assert {topology.devices[rank].kind.name for rank in stage.ranks} == {stage.device}
            assert {topology.nodes[topology.devices[rank].node].name for rank in stage.ranks} == {stage.node}
            # A block has 6 bytes of state and keeps 4 bytes per sample of each micro-batch in flight; see profile().
            # Without a pipeline, buckets hold a further copy of the gradients of its 2 bytes of parameters.
            count = stage.blocks[1] - stage.blocks[0]
            flight = min(replica.micro_batches, len(replica.stages) - number)
            buckets = 2 if len(replica.stages) == 1 else 0
            held = count * (6 + buckets + 4 * plan.micro_batch * flight) / plan.tensor_parallel
            assert stage.memory_bytes == pytest.approx(held)
            assert held <= topology.devices[stage.ranks[0]].kind.memory_bytes
    slowest = max(replica.pipeline_seconds for replica in plan.replicas)
    assert plan.iteration_seconds == pytest.approx(slowest + plan.synchronization_seconds)


CLUSTERS = [
    cluster({"fast": 4}),
    cluster({"fast": 2, "slow": 3}),
    cluster({"fast": 4}, {"slow": 4}),
    cluster({"fast": 1}, {"slow": 8}, {"fast": 5}),
    cluster({"fast": 2}, {"slow": 4}, memory={"fast": 16, "slow": 40}),
    cluster({"slow": 6}, {"fast": 2}, memory={"fast": 60, "slow": 12}),
]


@pytest.mark.parametrize("number", range(len(CLUSTERS)))
def test_plans_are_valid(number: int) -> None:
    topology, model = CLUSTERS[number], profile()
    methods = ("exact", "uniform", "autohet")
    for method, unequal in itertools.product(methods if IS_THOROUGH else [methods[number % 3]], (True, False)):
        found = make_plans(topology, model, global_batch=24, method=method, unequal=unequal, keep=8)
        assert 1 <= len(found) <= 8
        plans = [candidate.plan for candidate in found]
        times = [plan.iteration_seconds * (1 if plan.symmetric else MIN_GAIN) for plan in plans]
        assert times == sorted(times)
        for candidate in found:
            check(candidate.plan, topology, 24)
            assert why_not_runnable(candidate.plan) is None
            assert unequal or candidate.plan.symmetric
            assert candidate.reason
    if number < 2:
        assert found == make_plans(topology, model, global_batch=24, method=method, unequal=unequal, keep=8)


@pytest.mark.parametrize("unequal", [True, False])
def test_plans_of_all_devices_and_of_given_numbers_of_stages(unequal: bool) -> None:
    # The best plan leaves out the slow device, but a run on all ranks needs a plan that uses it.
    topology = cluster({"fast": 3, "slow": 1})
    model = profile(seconds={"fast": 1.0, "slow": 30.0}, degrees=(1,))
    found = make_plans(topology, model, global_batch=24, unequal=unequal, keep=6)
    assert found[0].plan.world_size == 3
    fastest = next(candidate.plan for candidate in found if candidate.plan.world_size == 4)
    (only,) = make_plans(topology, model, global_batch=24, unequal=unequal, all_devices=True, keep=1)
    assert only.plan.world_size == 4
    assert only.plan.iteration_seconds <= fastest.iteration_seconds
    some = make_plans(CLUSTERS[2], profile(), global_batch=24, stages=[2, 3], unequal=unequal, keep=20)
    assert {len(replica.stages) for each in some for replica in each.plan.replicas} <= {2, 3}


@pytest.mark.parametrize(("kinds", "each", "stages"), [(3, 2, 4), (18, 1, 18), (25, 1, 24), (60, 3, 96), (4, 500, 96)])
def test_for_many_speeds_a_bounded_number_is_listed(kinds: int, each: int, stages: int) -> None:
    available = [each] * kinds
    rows = compositions(np.geomspace(4.0, 1.0, kinds).tolist(), available, stages)
    assert 0 < len(rows) <= MAX_COMPOSITIONS
    assert len({row.tobytes() for row in np.ascontiguousarray(rows)}) == len(rows)
    assert (rows <= available).all() and (rows >= 0).all()
    if len(rows) < 100:
        assert len(rows) == sum(1 <= sum(row) <= stages for row in itertools.product(range(each + 1), repeat=kinds))
    sums = rows.sum(axis=1)
    assert sums.min() == 1 and sums.max() == min(stages, each * kinds)
