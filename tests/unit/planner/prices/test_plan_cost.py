"""What a plan costs, counted by hand."""

from __future__ import annotations

import dataclasses

import pytest

from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.evaluate import check_prices, plan_cost
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.planner.solver.pareto_front import choices, node_types, taken
from tests.support.layer_profiles import layer_times
from tests.support.planning import predict_plan

pytestmark = pytest.mark.unit

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


def test_a_part_of_the_nodes_is_taken() -> None:
    types = node_types(zones())
    assert [(each.name, each.nodes, each.dollars_per_hour) for each in types] == [
        ("east", (0, 1), 4.0),
        ("west", (2, 3), 1.5),
    ]
    assert len(choices(types)) == 8
    part, numbers = taken(zones(), types, (1, 2))
    assert [node.name for node in part.nodes] == ["east-0", "west-0", "west-1"]
    assert numbers == (0, 1, 4, 5, 6, 7)
    assert [device.node for device in part.devices] == [0, 0, 1, 1, 2, 2]
    assert [node.devices for node in part.nodes] == [(0, 1), (2, 3), (4, 5)]


def test_nodes_without_a_price_are_named() -> None:
    nodes = zones().nodes
    topology = dataclasses.replace(zones(), nodes=(*nodes[:3], dataclasses.replace(nodes[3], dollars_per_hour=None)))
    with pytest.raises(ValueError, match="the price of west-1 is not known"):
        check_prices(topology)
