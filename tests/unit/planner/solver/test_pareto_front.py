"""Prices counted by hand; the front is that of all choices of nodes, whose lower bounds hold."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.evaluate import plan_cost
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.planner.solver.pareto_front import choices, node_types, pareto_front, taken, time_bounds, within
from tests.support.layer_profiles import layer_times
from tests.support.planning import make_plans, predict_plan
from tests.support.random_clusters import Problem, small_problem
from tests.support.random_examples import IS_THOROUGH

ROUNDING = 1e-9


def priced(problem: Problem, seed: int) -> Problem:
    """The problem with a random price of each kind of device."""
    prices = dict(zip("ABC", np.random.default_rng([2, seed]).uniform(0.5, 4.0, 3), strict=True))
    topology = problem.topology
    nodes = [
        dataclasses.replace(
            node, dollars_per_hour=sum(prices[topology.devices[rank].kind.name] for rank in node.devices)
        )
        for node in topology.nodes
    ]
    return problem._replace(topology=dataclasses.replace(topology, nodes=tuple(nodes)))


def all_plans(problem: Problem) -> dict[tuple[int, ...], list[Plan]]:
    """The plans of each choice of nodes, with ranks numbered as in the choice; without those that do not fit."""
    types = node_types(problem.topology)
    found: dict[tuple[int, ...], list[Plan]] = {}
    for row in choices(types).tolist():
        part, _ = taken(problem.topology, types, row)
        try:
            plans = make_plans(part, problem.profile, global_batch=problem.global_batch, keep=3)
        except ValueError:
            continue
        found[tuple(row)] = [each.plan for each in plans]
    return found


@pytest.mark.parametrize("seed", range(20) if IS_THOROUGH else [0, 1, 3, 4, 5, 8])
def test_the_front_is_that_of_all_choices(seed: int) -> None:
    problem = priced(small_problem(seed), seed)
    every = all_plans(problem)
    if not every:
        with pytest.raises(ValueError, match=r"hold|fit|memory"):
            pareto_front(problem.to_search())
        return
    front = pareto_front(problem.to_search(), time_limit_seconds=60, tolerance=0.0)
    seconds = [point.plan.iteration_seconds for point in front]
    dollars = [point.cost.dollars_per_iteration for point in front]
    assert seconds == sorted(seconds) and dollars == sorted(dollars, reverse=True)
    types = node_types(problem.topology)
    bounds = time_bounds(problem.topology, problem.to_search().pools, types, np.array(list(every)))
    for (row, plans), bound in zip(every.items(), bounds, strict=True):
        part, _ = taken(problem.topology, types, row)
        for plan in plans:
            assert bound <= plan.iteration_seconds * (1 + ROUNDING), row
            cost = plan_cost(part, problem.profile, plan).dollars_per_iteration
            assert any(
                second <= plan.iteration_seconds * (1 + 1e-6) and dollar <= cost * (1 + 1e-6)
                for second, dollar in zip(seconds, dollars, strict=True)
            ), (row, plan.iteration_seconds, cost)
    for point in front:
        assert point.cost == plan_cost(problem.topology, problem.profile, point.plan)


def test_quotas_are_kept() -> None:
    problem = priced(small_problem(23), 23)
    topology = problem.topology
    types = node_types(topology)
    rows = choices(types)
    kinds = Counter(device.kind.name for device in topology.devices)
    kind, number = kinds.most_common()[-1]
    quotas = {kind: number - 1, types[-1].name: len(types[-1].nodes) - 1}
    kept = within(topology, types, rows, quotas)
    for row, is_kept in zip(rows.tolist(), kept, strict=True):
        part, _ = taken(topology, types, row)
        devices = sum(device.kind.name == kind for device in part.devices)
        assert is_kept == (devices <= quotas[kind] and row[-1] <= quotas[types[-1].name])
    assert 0 < kept.sum() < len(kept)
    front = pareto_front(problem.to_search(), at_most=quotas)
    for point in front:
        used = [rank for replica in point.plan.rank_order for stage in replica for rank in stage]
        assert sum(topology.devices[rank].kind.name == kind for rank in used) <= quotas[kind]
        assert point.nodes[-1] <= quotas[types[-1].name]


INSIDE, NETWORK = Channel("NVLink", 1e12), Channel("Ethernet", 1e9)
PRICES = (4.0, 4.0, 1.5, 1.5)


def zones() -> Topology:
    """Two zones with two nodes of two devices each; a gigabyte between zones costs half a dollar."""
    kind = DeviceKind("gpu", 10**12, 1e12)
    devices = tuple(Device(kind, number // 2, number // 4) for number in range(8))
    nodes = tuple(
        Node(f"{'east' if number < 2 else 'west'}-{number % 2}", number // 2, (2 * number, 2 * number + 1), INSIDE,
             (NETWORK,), dollars_per_hour=PRICES[number])
        for number in range(4)
    )  # fmt: skip
    return Topology(devices, nodes, ("east", "west"), egress=((0, 1, 0.5),))


def model(degrees: tuple[int, ...] = (1, 2)) -> ModelProfile:
    """Four blocks of a second per micro-batch, with gradients of 2 GB and outputs of 3 GB per sample."""
    times = tuple(
        layer_times("gpu", (0.0, 1.0, 1.0, 1.0, 1.0, 0.0), tensor_parallel=degree, micro_batch=size)
        for degree in degrees
        for size in (1, 2)
    )
    sizes = tuple(
        LayerSizes(
            tensor_parallel=degree,
            parameter_bytes=(0, *(2 * 10**9,) * 4, 0),
            activation_bytes=(1,) * 6,
            output_bytes=(3 * 10**9,) * 5 + (0,),
        )
        for degree in degrees
    )
    return ModelProfile(name="model", times=times, sizes=sizes)


def test_nodes_are_paid_for_as_a_whole() -> None:
    plan = predict_plan(zones(), model(), [[[0], [2]]], micro_batch=1, global_batch=3)
    cost = plan_cost(zones(), model(), plan)
    assert cost.dollars_per_hour == 8.0 and cost.egress_dollars == 0.0
    assert cost.dollars_per_iteration == pytest.approx(8.0 * plan.iteration_seconds / 3600)


@pytest.mark.parametrize("places", [1, 2])
def test_a_pipeline_sends_activations_and_their_gradients(places: int) -> None:
    ranks = [[list(range(places)), list(range(4, 4 + places))]]
    plan = predict_plan(zones(), model(), ranks, micro_batch=1, global_batch=3)
    # Three micro-batches of 3 GB each way, from every member of a tensor-parallel group.
    assert plan_cost(zones(), model(), plan).egress_dollars == pytest.approx(places * 3 * 2 * 3 * 0.5)


def test_replicas_send_their_gradients_around_a_ring() -> None:
    plan = predict_plan(zones(), model(), [[[0]], [[1]], [[4]]], micro_batch=1, global_batch=3)
    gradients = float(model().costs("gpu", 1, 1).gradient_bytes.sum()) / 1e9
    # The ring of three crosses the zones twice, with 2 · (3 − 1) / 3 of all gradients each time.
    assert plan_cost(zones(), model(), plan).egress_dollars == pytest.approx(2 * 4 / 3 * gradients * 0.5)
