"""3D plans: valid, as good as those of an exhaustive search where this is possible, and error messages."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.gradient_times import divide_micro_batches
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.ranked_plan import MIN_GAIN
from colossal_hetero.planner.cost.runnable import why_not_runnable
from colossal_hetero.planner.cost.tp_groups import MAX_COMPOSITIONS, compositions
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search
from tests.support.planning import make_plans
from tests.support.random_examples import IS_THOROUGH
from tests.support.small_problems import cluster, profile


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


@given(
    st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(0, 7),
)
def test_micro_batches_are_divided_optimally(pipelines: list[tuple[float, float, int]], more: int) -> None:
    fill, steps, minimum = zip(*pipelines, strict=True)
    total = sum(minimum) + more

    def last(counts: Sequence[int]) -> float:
        return max(first + (count - 1) * step for first, step, count in zip(fill, steps, counts, strict=True))

    ways = itertools.product(*(range(least, least + more + 1) for least in minimum))
    best = min(last(counts) for counts in ways if sum(counts) == total)
    divided = divide_micro_batches(fill, steps, total, minimum)
    assert sum(divided) == total and last(divided) == pytest.approx(best, rel=1e-9)
    assert all(count >= least for count, least in zip(divided, minimum, strict=True))


@pytest.mark.parametrize(("slow_seconds", "first_is_equal"), [(1.08, True), (3.0, False)])
def test_equal_replicas_come_first_unless_others_are_clearly_faster(slow_seconds: float, first_is_equal: bool) -> None:
    # Each device holds the model. One takes about 1 % longer (layers' times are random), or three times as long.
    topology = cluster({"fast": 1}, {"slow": 1})
    model = profile(2, {"fast": 1.0, "slow": slow_seconds}, degrees=(1,), micro_batches=(1,))
    first, *others = make_plans(topology, model, global_batch=300, stages=[1], keep=4, compare=True)
    assert first.plan.symmetric == first_is_equal
    equal = make_plans(topology, model, global_batch=300, stages=[1], unequal=False)[0].plan
    if first_is_equal:
        assert first.plan.iteration_seconds == pytest.approx(equal.iteration_seconds)
        faster = [each for each in others if not each.plan.symmetric]
        assert all("% faster, but its replicas are not alike, which must gain 1 %" in each.reason for each in faster)
    else:
        ratio = equal.iteration_seconds / first.plan.iteration_seconds
        assert any(f"{ratio:.2f} × as fast as the best plan with equal replicas" in note for note in first.plan.notes)


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


def test_pipelines_have_no_more_stages_than_micro_batches() -> None:
    """With two micro-batches no plan fits."""
    topology = cluster({"fast": 3}, memory={"fast": 30})
    model = profile(6, degrees=(1,), micro_batches=(1,))
    assert len(make_plans(topology, model, global_batch=3)[0].plan.layers_per_stage) == 3


def test_only_the_best_plan_is_compared() -> None:
    topology, model = CLUSTERS[2], profile()
    plain = make_plans(topology, model, global_batch=24, unequal=False)
    wishes: dict[str, Any] = dict(global_batch=24, unequal=False, recompute=False, zero_stages=(0,))
    answer = search(Problem(topology=topology, profile=model, **wishes), compare=True)
    compared = answer.plans
    assert [each.reason for each in plain] == [each.reason for each in compared]
    uniform = make_plans(topology, model, global_batch=24, unequal=False, method="uniform", keep=1)[0].plan
    best = compared[0].plan
    assert best.uniform_seconds is not None
    assert best.iteration_seconds <= best.uniform_seconds <= uniform.iteration_seconds
    assert {each.plan.uniform_seconds for each in (*plain, *compared[1:])} == {None}
    named = answer.of_files(Path("c.toml"), Path("p.json")).plans
    assert {(each.plan.cluster, each.plan.profile) for each in named} == {("c.toml", "p.json")}
    assert best.notes == plain[0].plan.notes


def test_zero_stage_1_alone_is_for_several_replicas() -> None:
    plans = make_plans(cluster({"fast": 2}), profile(), global_batch=8, zero_stages=(1,), keep=3)
    assert {(each.plan.zero_stage, len(each.plan.replicas)) for each in plans} == {(1, 2)}


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
