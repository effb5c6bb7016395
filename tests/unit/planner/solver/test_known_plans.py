"""Plans that are known are not missed: for part of the cluster, at the speed before, and with equal stages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.ranked_plan import MIN_GAIN
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from tests.support.planning import make_plans, predict_plan
from tests.support.random_clusters import large_problem, random_model
from tests.support.random_examples import IS_THOROUGH


def nodes(sizes: Sequence[int], kinds: Sequence[str], bandwidths: Sequence[float]) -> Topology:
    """Nodes with this number and kind of devices, and this bandwidth in bytes per second of their network cards."""
    devices: list[Device] = []
    made = []
    for number, (size, kind, bandwidth) in enumerate(zip(sizes, kinds, bandwidths, strict=True)):
        first = len(devices)
        devices += [Device(DeviceKind(kind, 100, 1e12), number, 0)] * size
        network = Channel("Ethernet", bandwidth, 1e-4)
        inside = Channel("NVLink", 3e11, 1e-5)
        made.append(Node(f"n{number}", 0, tuple(range(first, len(devices))), inside, (network,)))
    return Topology(tuple(devices), tuple(made), ("here",))


def without(topology: Topology, node: int) -> Topology:
    kept = [number for number in range(len(topology.nodes)) if number != node]
    devices: list[Device] = []
    made = []
    for new, number in enumerate(kept):
        old = topology.nodes[number]
        first = len(devices)
        devices += [dataclasses.replace(topology.devices[rank], node=new) for rank in old.devices]
        made.append(dataclasses.replace(old, devices=tuple(range(first, len(devices)))))
    return Topology(tuple(devices), tuple(made), topology.clusters)


def best(
    topology: Topology, model: ModelProfile, global_batch: int, *, method: str = "exact", unequal: bool = False
) -> Plan:
    return make_plans(topology, model, global_batch=global_batch, method=method, unequal=unequal, keep=1)[0].plan


def check_without_each_node(topology: Topology, model: ModelProfile, global_batch: int) -> None:
    # Replicas that are alike come first even if others are faster by less than MIN_GAIN.
    for unequal, tolerance in ((False, 1 + 1e-9), (True, MIN_GAIN)):
        seconds = best(topology, model, global_batch, unequal=unequal).iteration_seconds
        for node in range(len(topology.nodes)):
            if len(topology.nodes) == 1:
                continue
            try:
                part = best(without(topology, node), model, global_batch, unequal=unequal)
            except ValueError:
                continue  # the others cannot hold the model
            assert seconds <= part.iteration_seconds * tolerance, f"faster without node {node}"


@pytest.mark.parametrize("seed", range(60) if IS_THOROUGH else (10,))
def test_no_slower_than_a_search_for_equal_replicas_only(seed: int) -> None:
    topology, model, global_batch = large_problem(seed)
    equal, free = (best(topology, model, global_batch, unequal=unequal) for unequal in (False, True))
    if free.symmetric:
        assert free.iteration_seconds == equal.iteration_seconds
    else:
        assert free.iteration_seconds * MIN_GAIN < equal.iteration_seconds


def test_six_replicas_that_do_not_divide_the_batch() -> None:
    """Found by moving slots between pipelines only: 6 or 5 micro-batches for each."""
    random = np.random.default_rng([7, 57])
    model = random_model(random, max_blocks=8)
    topology = nodes((4, 1, 2, 2), "AAAA", random.choice([1e8, 1e9, 1e10], 4))
    plan = best(topology, model, 32, unequal=True)
    assert sorted(replica.micro_batches for replica in plan.replicas) == [5, 5, 5, 5, 6, 6]
    assert plan.iteration_seconds < 0.9 * best(topology, model, 32).iteration_seconds


def test_nine_devices_in_nodes_of_4_1_2_and_2() -> None:
    random = np.random.default_rng([7, 57])
    model = random_model(random, max_blocks=8)
    check_without_each_node(nodes((4, 1, 2, 2), "AAAA", random.choice([1e8, 1e9, 1e10], 4)), model, 32)


def test_four_workstations_of_which_one_is_slow() -> None:
    # In a pipeline the slow one makes each of the others wait for it; as one of four replicas it would be the last.
    for seed, bandwidth in itertools.product(range(5 if IS_THOROUGH else 2), (1e8, 1e9)):
        model = random_model(np.random.default_rng(seed))
        slow = nodes((1, 1, 1, 1), "ABBA", (bandwidth, bandwidth, 4 * bandwidth, bandwidth))
        devices = (*slow.devices[:3], dataclasses.replace(slow.devices[3], speed=0.25))
        check_without_each_node(dataclasses.replace(slow, devices=devices), model, 12)


@pytest.mark.parametrize("seed", range(60 if IS_THOROUGH else 8))
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


@pytest.mark.parametrize("seed", range(60 if IS_THOROUGH else 4))
def test_exact_is_no_slower_than_equal_stages(seed: int) -> None:
    topology, model, global_batch = large_problem(seed)
    try:
        uniform = best(topology, model, global_batch, method="uniform")
    except ValueError:
        return  # equal stages do not fit in memory
    plan = make_plans(topology, model, global_batch=global_batch, unequal=False, compare=True, keep=1)[0].plan
    assert plan.uniform_seconds is not None
    assert plan.iteration_seconds <= plan.uniform_seconds * (1 + 1e-12)
    assert plan.iteration_seconds <= uniform.iteration_seconds * (1 + 1e-12)
