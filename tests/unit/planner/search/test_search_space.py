"""Plans in wider search spaces: none of all plans of a few devices is better, and the default space is not wider."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from colossal_hetero.planner.search.settings import formations, mixtures, wider_pools

from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.runnable import why_not_runnable
from colossal_hetero.planner.cost.tp_groups import DEFAULT, SIMPLE, WHOLE, SearchSpace
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile, load_model_profile
from colossal_hetero.planner.report.plan_table import layout
from tests.support.every_form import EveryForm, spaces_to_prove
from tests.support.layer_profiles import layer_times
from tests.support.paths import REPOSITORY
from tests.support.planning import make_plans
from tests.support.random_clusters import large_problem, whole_space_problem
from tests.support.random_examples import IS_THOROUGH

pytestmark = pytest.mark.unit

EXAMPLES = REPOSITORY / "examples/plans"

PROBLEMS = 210 if IS_THOROUGH else 35


def best(problem: tuple[Topology, ModelProfile, int], space: SearchSpace = SIMPLE, unequal: bool = True) -> Plan:
    topology, profile, global_batch = problem
    return make_plans(topology, profile, global_batch=global_batch, keep=1, space=space, unequal=unequal)[0].plan


def forms_of(plan: Plan) -> Counter[str]:
    """How many stages use what only wider spaces have."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    return Counter(
        degree=len({plan.degree(stage) for stage in stages}) - 1,
        recompute=sum(stage.recompute for stage in stages),
        zero=plan.zero_stage,
    )


def test_no_plan_of_few_devices_is_better_in_any_space() -> None:
    impossible, used = 0, Counter[str]()
    for seed in range(PROBLEMS):
        problem, space = whole_space_problem(seed), spaces_to_prove(seed)
        unequal = seed % 4 > 0
        shortest = EveryForm(*problem, space).best_seconds(unequal=unequal)
        if shortest == np.inf:
            impossible += 1
            with pytest.raises(ValueError, match=r"memory|hold"):
                best(problem, space, unequal)
            continue
        found = best(problem, space, unequal)
        assert found.iteration_seconds == pytest.approx(shortest, rel=1e-9), f"problem {seed}"
        for stage in (stage for replica in found.replicas for stage in replica.stages):
            assert stage.memory_bytes <= stage.memory_available_bytes * (1 + 1e-9)
            assert space.recompute or not stage.recompute
        used += forms_of(found)
    assert impossible < PROBLEMS / 3
    assert min(used[name] for name in ("degree", "recompute", "zero")) > 0, used


@pytest.mark.parametrize("seed", [12, 2] if IS_THOROUGH else [12])
def test_a_wider_space_is_never_slower_and_the_default_is_the_runnable_one(seed: int) -> None:
    problem = large_problem(seed)
    runnable = best(problem)
    assert why_not_runnable(runnable) is None and not +forms_of(runnable)
    whole = best(problem, WHOLE)
    assert whole.iteration_seconds <= runnable.iteration_seconds * (1 + 1e-9)


def test_no_plan_is_listed_twice() -> None:
    """Several parts of a wider search find plans that differ only by which devices of a kind they use."""
    topology = load_cluster(EXAMPLES / "clusters/a100-v100.toml")
    profile = load_model_profile(EXAMPLES / "opt-350-a100-v100.json")
    ranked = make_plans(topology, profile, global_batch=128, space=DEFAULT, keep=6)
    layouts = [layout(each.plan) for each in ranked]
    assert len(layouts) == 6 and len(set(layouts)) == 6


def two_kinds() -> tuple[Topology, ModelProfile, int]:
    """A node of 8 devices with little memory, on which a layer fits only if 4 of them share it, and 2 lone devices with
    much memory, which are slower with tensor parallelism."""
    small, large = DeviceKind("small", 4 * 10**9, 1e12), DeviceKind("large", 100 * 10**9, 1e12)
    inside, network = Channel("NVLink", 3e11, 1e-6), Channel("InfiniBand", 2.5e10, 1e-5)
    devices = tuple(Device(small, 0, 0) for _ in range(8)) + tuple(Device(large, 1, 0) for _ in range(2))
    nodes = (Node("small", 0, tuple(range(8)), inside, (network,)), Node("large", 0, (8, 9), inside, (network,)))
    times = tuple(
        layer_times(name, (0.0, *(size / degree**0.9,) * 6, 0.0), tensor_parallel=degree, micro_batch=size)
        for name in ("small", "large")
        for degree in (1, 4)
        for size in (1, 2)
        if (name, degree) != ("large", 4)
    )
    sizes = tuple(
        LayerSizes(
            tensor_parallel=degree,
            parameter_bytes=(0, *(10**9 // degree,) * 6, 0),
            activation_bytes=(0, *(10**9 // degree,) * 6, 0),
            output_bytes=(10**6,) * 8,
            temporary_bytes=(0,) * 8,
        )
        for degree in (1, 4)
    )
    return Topology(devices, nodes, ("here",)), ModelProfile(name="m", times=times, sizes=sizes), 8


def test_kinds_of_devices_have_degrees_of_their_own() -> None:
    problem = two_kinds()
    runnable = best(problem)
    mixed = best(problem, SearchSpace(mixed_degrees=True))
    degrees = {stage.device: mixed.degree(stage) for replica in mixed.replicas for stage in replica.stages}
    assert degrees == {"small": 4, "large": 1}
    assert mixed.iteration_seconds < 0.9 * runnable.iteration_seconds
    assert "tensor parallelism" in (why_not_runnable(mixed) or "")


def test_formations_are_all_ways_to_divide_devices() -> None:
    whole, _, _ = two_kinds()
    devices = tuple(Device(device.kind, number // 2, 0) for number, device in enumerate(whole.devices[6:]))
    nodes = tuple(replace(node, devices=ranks) for node, ranks in zip(whole.nodes, [(0, 1), (2, 3)], strict=True))
    part = Topology(devices, nodes, ("here",))
    one = formations(part, (1, 2), SearchSpace())
    assert len(one) == 2  # four slots of one device, or two of two
    # Each pair is two slots, or one tensor-parallel group.
    mixed = formations(part, (1, 2), SearchSpace(mixed_degrees=True))
    assert len(mixed) == 4


def test_mixtures_use_every_device_that_they_can() -> None:
    topology, profile, _ = two_kinds()
    (formation,) = mixtures(topology, profile, 2, (1, 4), 99)  # large devices were measured with degree 1 only
    ranks = [rank for _, slots in formation for slot in slots for rank in slot]
    assert sorted(ranks) == list(range(10))
    assert {(name, degree) for (name, _, degree), _ in formation} == {("small", 4), ("large", 1)}
    for (_, _, degree), slots in formation:
        assert all(len(slot) == degree for slot in slots)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"zero_stages": (2,)}, "zero_stage=2 cannot be planned"),
        ({"zero_stages": ()}, "there is no ZeRO stage to try"),
    ],
)
def test_spaces_that_are_not_possible(space: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchSpace(**space)


def test_a_wider_space_is_for_1f1b() -> None:
    topology, profile, global_batch = two_kinds()
    with pytest.raises(ValueError, match="a wider search space is for the schedule 1f1b only"):
        make_plans(topology, profile, global_batch=global_batch, schedules=("1f1b", "zbv"), space=WHOLE)


def test_every_number_of_pipelines_is_looked_at_in_zero() -> None:
    """Many pipelines are expected to be faster than few, also if they do not fit into memory."""
    topology, profile, global_batch = two_kinds()
    parts = wider_pools(topology, profile, global_batch, [1, 2], [1, 4], WHOLE, np.inf)
    numbers = [[{pool.pipelines for pool in pools} for pools in part] for part in parts]
    in_zero = [{1}, {2}, {3}, {4}, {6}, {8}]
    assert numbers == [[{None}], [{None}], in_zero, in_zero]
