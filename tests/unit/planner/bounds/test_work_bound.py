"""No plan of any schedule is faster than its work over the speed of all devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.planner.search.gap_goal import Effort, WorkBound
from colossal_hetero.planner.search.problem import Problem
from tests.support.every_form import EveryForm, wishes_to_prove
from tests.support.layer_profiles import layer_times
from tests.support.planning import make_plans
from tests.support.random_clusters import like_nodes_problem, whole_space_problem
from tests.support.random_examples import IS_THOROUGH

pytestmark = pytest.mark.unit

PROBLEMS = 100 if IS_THOROUGH else 20
ROUNDING = 1e-9


def cluster(*devices: tuple[str, float]) -> Topology:
    """One node with devices of these kinds and speeds."""
    made = tuple(Device(DeviceKind(kind, 10**12, 1e12), 0, 0, speed) for kind, speed in devices)
    channel = Channel("NVLink", 1e12)
    return Topology(made, (Node("n", 0, tuple(range(len(made))), channel, (channel,)),), ("here",))


def model(seconds: dict[tuple[str, int, int], tuple[float, ...]]) -> ModelProfile:
    """Blocks that take so many seconds forward, and as many backward, by kind, degree and micro-batch."""
    blocks = len(next(iter(seconds.values())))
    times = tuple(
        layer_times(kind, (0.0, *each, 0.0), tensor_parallel=degree, micro_batch=size)
        for (kind, degree, size), each in seconds.items()
    )
    sizes = tuple(
        LayerSizes(
            tensor_parallel=degree,
            parameter_bytes=(0, *(1,) * blocks, 0),
            activation_bytes=(0, *(1,) * blocks, 0),
            output_bytes=(1,) * (blocks + 2),
            temporary_bytes=(0,) * (blocks + 2),
        )
        for degree in sorted({degree for _, degree, _ in seconds})
    )
    return ModelProfile(name="m", times=times, sizes=sizes)


def bound(topology: Topology, profile: ModelProfile, degrees: tuple[int, ...] = (1,), samples: int = 8) -> float:
    problem = Problem(topology=topology, profile=profile, global_batch=samples, tensor_parallel=degrees)
    return WorkBound(problem).seconds(1e9)


def seconds_per_pass(profile: ModelProfile) -> float:
    """Of the first block of the first entry, forward and backward."""
    return profile.times[0].forward_seconds[1] + profile.times[0].backward_seconds[1]


def test_it_is_the_time_of_devices_that_are_always_busy() -> None:
    profile = model({("a", 1, 1): (1.0, 1.0)})
    whole = 2 * seconds_per_pass(profile) * 8
    assert bound(cluster(("a", 1.0)), profile) == pytest.approx(whole)
    assert bound(cluster(("a", 1.0), ("a", 0.5)), profile) == pytest.approx(whole / 1.5)


def test_each_kind_runs_what_it_is_best_at() -> None:
    """One kind is fast in the first block, and the other in the second."""
    profile = model({("a", 1, 1): (1.0, 3.0), ("b", 1, 1): (3.0, 1.0)})
    assert bound(cluster(("a", 1.0), ("b", 1.0)), profile) == pytest.approx(seconds_per_pass(profile) * 8)


def test_the_best_degree_and_micro_batch_count() -> None:
    profile = model({("a", 1, 1): (1.0,), ("a", 1, 4): (2.0,), ("a", 2, 4): (0.8,)})
    pair = cluster(("a", 1.0), ("a", 1.0))
    once = seconds_per_pass(profile)
    assert bound(pair, profile) == pytest.approx(once * 8 * (2.0 / 4) / 2)
    assert bound(pair, profile, (1, 2)) == pytest.approx(once * 8 * (2 * 0.8 / 4) / 2)


def test_no_plan_of_few_devices_is_faster() -> None:
    near = 0.0
    for seed in range(PROBLEMS):
        problem = whole_space_problem(seed)
        shortest = EveryForm(*problem, **wishes_to_prove(seed)).best_seconds(unequal=True)
        found = WorkBound(problem.to_search(**wishes_to_prove(seed))).seconds(1e9)
        assert 0 < found <= shortest
        if np.isfinite(shortest):
            near = max(near, found / shortest)
    assert near > 0.7  # not far below in every problem


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True, "zero_stages": (0, 1)},
        {"overlap": True},
        {"schedules": ("interleaved",)},
        {"schedules": ("zbv",)},
        {"schedules": ("1f1b", "interleaved", "zbv")},
        {"method": "simulated"},
    ],
)
def test_every_answer_carries_a_bound(options: dict[str, Any]) -> None:
    compared = 0
    for topology, profile, global_batch in (like_nodes_problem(1), *map(whole_space_problem, range(6))):
        try:
            ranked = make_plans(
                topology, profile, global_batch=global_batch, keep=8, effort=Effort(bound_seconds=0.3), **options
            )
        except ValueError:
            continue
        for each in ranked:
            compared += 1
            assert each.plan.bound_seconds is not None and each.plan.gap is not None
            assert 0 < each.plan.bound_seconds <= each.plan.iteration_seconds * (1 + ROUNDING)
    assert compared > 3


def test_a_search_ends_when_a_plan_is_near_enough() -> None:
    topology, profile, global_batch = like_nodes_problem(1)
    wishes = dict(global_batch=global_batch, recompute=True, zero_stages=(0, 1))
    early = make_plans(topology, profile, effort=Effort(gap=1000.0, bound_seconds=5), **wishes)[0]
    whole = make_plans(topology, profile, **wishes)[0]
    assert early.plan.iteration_seconds >= whole.plan.iteration_seconds
    assert int(early.reason.split(" plans")[0].split()[-1]) < int(whole.reason.split(" plans")[0].split()[-1])
