"""Given plans and layouts, priced: the planner's own numbers come out again, and errors are in words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from colossal_hetero.common.text import MarkedError
from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.evaluate import evaluate_layout, evaluate_plan, why_other_devices
from colossal_hetero.planner.cost.layout_line import layout_of, read_layout, write_layout
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.layer_profile import ModelProfile, load_profile
from tests.support.paths import REPOSITORY
from tests.support.planning import make_plans
from tests.support.random_clusters import Problem, large_problem, small_problem, whole_space_problem
from tests.support.random_examples import IS_THOROUGH

EXAMPLES = REPOSITORY / "examples/plans"


@pytest.fixture(scope="module")
def cluster() -> Topology:
    return load_cluster(EXAMPLES / "clusters/a100-v100.toml")


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return load_profile(EXAMPLES / "opt-350-a100-v100.json")


def same_times(one: Plan, other: Plan) -> bool:
    def numbers(plan: Plan) -> list[float]:
        stages = [stage for replica in plan.replicas for stage in replica.stages]
        return [plan.iteration_seconds, plan.synchronization_seconds] + [
            value
            for stage in stages
            for value in (stage.forward_seconds, stage.transfer_seconds, stage.memory_bytes, stage.update_seconds)
        ]

    return bool(np.allclose(numbers(one), numbers(other), rtol=1e-9, atol=0))


@pytest.mark.parametrize(
    ("make", "wishes"),
    [
        (small_problem, {"schedules": ("1f1b", "zbv")}),
        (small_problem, {"schedules": ("interleaved",)}),
        (whole_space_problem, {"recompute": True, "zero_stages": (0, 1)}),
        (large_problem, {}),
    ],
)
def test_the_planners_plans_and_their_lines_cost_the_same(
    make: Callable[[int], Problem], wishes: dict[str, Any]
) -> None:
    used = set[str]()
    for seed in range(4, 40 if IS_THOROUGH else 9):
        topology, profile, global_batch = make(seed)
        try:
            plans = make_plans(topology, profile, global_batch=global_batch, keep=3, **wishes)
        except ValueError:
            continue
        for ranked in plans:
            used.add(ranked.plan.schedule)
            evaluated = evaluate_plan(topology, profile, ranked.plan)
            assert same_times(evaluated.plan, ranked.plan)
            assert evaluated.simulated_seconds == simulate_plan(evaluated.plan).seconds
            assert evaluated.fits and evaluated.problem is None
            if make is not large_problem:
                # With few devices, exchanges find slots that are at least as good.
                line = write_layout(layout_of(ranked.plan))
                evaluated = evaluate_layout(topology, profile, read_layout(line))
                assert layout_of(evaluated.plan) == layout_of(ranked.plan)
                assert evaluated.plan.iteration_seconds <= ranked.plan.iteration_seconds * (1 + 1e-8), line
    assert used == set(wishes.get("schedules", ("1f1b",)))


def test_micro_batches_are_divided_for_the_earliest_end(cluster: Topology, profile: ModelProfile) -> None:
    line = "dp 2 = pp [A100-40 0-23] + pp [4 x V100-16 0-23], micro-batch 2"
    free = evaluate_layout(cluster, profile, read_layout(line), global_batch=48).plan
    assert sum(replica.micro_batches for replica in free.replicas) == 24
    others = []
    for first in range(1, 21):
        given = read_layout(f"pp [A100-40 0-23] x {first} + pp [4 x V100-16 0-23] x {24 - first}, micro-batch 2")
        others.append(evaluate_layout(cluster, profile, given).plan.iteration_seconds)
    assert free.iteration_seconds == pytest.approx(min(others), rel=1e-9)
    alike = evaluate_layout(cluster, profile, read_layout("dp 4 x [A100-40 0-23], micro-batch 2"), global_batch=64)
    assert [replica.micro_batches for replica in alike.plan.replicas] == [8] * 4


def test_what_does_not_fit_is_priced_and_named(cluster: Topology, profile: ModelProfile) -> None:
    evaluated = evaluate_layout(cluster, profile, read_layout("dp 2 x pp [V100-16 0-23], micro-batch 4 x 8"))
    assert not evaluated.fits
    assert [(replica, stage) for replica, stage, _ in evaluated.too_large] == [(0, 0), (1, 0)]
    assert evaluated.fullest.memory_bytes > evaluated.fullest.memory_available_bytes
    few = evaluate_layout(cluster, profile, read_layout("dp 1 x pp [4 x V100-16 0-23], micro-batch 1 x 2"))
    assert few.problem is not None and "2 micro-batches for 4 stages" in few.problem


def test_slow_devices_are_left_out(cluster: Topology, profile: ModelProfile) -> None:
    devices = list(cluster.devices)
    for slow in (4, 9):
        devices[slow] = dataclasses.replace(devices[slow], speed=0.5)
    throttled = dataclasses.replace(cluster, devices=tuple(devices))
    line = read_layout("dp 3 x pp [2 x V100-16 0-23], micro-batch 1 x 8")
    used = {
        rank for row in evaluate_layout(throttled, profile, line).plan.rank_order for ranks in row for rank in ranks
    }
    assert used == set(range(4, 12)) - {4, 9}


MANY, WHOLE = "dp 4 x pp [3 x V100-16 0-8 | A100-40 9-23]", "[A100-40 0-23]"


@pytest.mark.parametrize(
    ("line", "global_batch", "at", "words"),
    [
        (f"{MANY}, micro-batch 1 x 8", None, "V100", "needs 12 × V100-16, but the cluster has"),
        ("[V100-15 0-23], micro-batch 1 x 8", None, "V100", "no V100-15; it has A100-40, V100-16; did you"),
        ("tp 8, [V100-16 0-23], micro-batch 1 x 8", None, "V100", "needs 1 group of 8 × V100-16, each inside a node,"),
        ("[A100-40 0-11 | V100-16 12-22], micro-batch 1 x 8", None, "V100", "has 23 blocks, but OPT-350 has 24"),
        (WHOLE, None, None, "does not say how large a micro-batch is"),
        (f"{WHOLE}, micro-batch 2", None, None, "does not say how many micro-batches there are"),
        (f"{WHOLE}, micro-batch 2", 7, None, "a global batch of 7 samples cannot be divided into micro-batches of 2"),
        (f"{WHOLE}, micro-batch 2 x 8", 32, None, "micro-batches of 2, which are 16 samples, not a global batch of 32"),
        (f"{WHOLE} x 2 + {WHOLE}, micro-batch 2", 32, None, "some pipelines of the layout have a number"),
        (f"{WHOLE}, micro-batch 64 x 2", None, None, "micro-batch 64 on A100-40 at tensor_parallel 1 is outside"),
    ],
)
def test_errors_of_layouts(
    cluster: Topology, profile: ModelProfile, line: str, global_batch: int | None, at: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        evaluate_layout(cluster, profile, read_layout(line), global_batch=global_batch)
    assert at is None or (isinstance(caught.value, MarkedError) and caught.value.place == line.index(at))


def test_plans_of_other_machines(cluster: Topology, profile: ModelProfile) -> None:
    plan = evaluate_layout(cluster, profile, read_layout("dp 2 x pp [4 x V100-16 0-23], micro-batch 1 x 8")).plan
    assert why_other_devices(cluster, plan) is None
    smaller = dataclasses.replace(cluster, devices=cluster.devices[:8], nodes=cluster.nodes[:2])
    problem = why_other_devices(smaller, plan)
    assert problem is not None and "the cluster has only ranks 0 to 7" in problem
    with pytest.raises(ValueError, match="the cluster has only ranks 0 to 7"):
        evaluate_plan(smaller, profile, plan)
