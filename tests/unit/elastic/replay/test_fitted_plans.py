"""Plans for the devices that are there: found once for equal sets, and placed so that the fewest bytes move."""

from __future__ import annotations

import itertools
import random

import pytest

from colossal_hetero.elastic.replay import fitted_plans
from colossal_hetero.elastic.replay.fitted_plans import FittedPlans, slowest_channel, state_bytes_by_block
from colossal_hetero.elastic.state.held_layers import HeldLayers, has_every_layer, missing_bytes
from colossal_hetero.planner.cluster.cluster_file import parse_cluster
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.profile.layer_profile import LayerSizes
from colossal_hetero.planner.search.make_plans import make_plans
from tests.unit.commands.test_plan_command import CLUSTER, LAYERS, profile

BLOCKS = 6


@pytest.fixture
def cluster() -> Topology:
    """Two nodes with two A100, two nodes with two V100."""
    return parse_cluster(CLUSTER.replace("devices =", "count = 2\ndevices ="))


def fitted(cluster: Topology) -> FittedPlans:
    return FittedPlans(cluster, profile(), global_batch=16, link=slowest_channel(cluster))


def test_the_plan_is_that_of_the_planner(cluster: Topology) -> None:
    plan = fitted(cluster)(frozenset(range(8)), {})
    (best,) = make_plans(cluster, profile(), global_batch=16, keep=1)
    assert plan is not None and plan.iteration_seconds == pytest.approx(best.plan.iteration_seconds)
    assert len(plan.holdings) == best.plan.world_size


def test_equal_sets_of_devices_are_planned_for_once(cluster: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        return make_plans(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fitted_plans, "make_plans", counted)
    plans = fitted(cluster)
    # One A100 and both V100 of a node: eight choices, which are one set of kinds and nodes.
    times = set()
    for lone, node in itertools.product(range(4), ((4, 5), (6, 7))):
        plan = plans(frozenset({lone, *node}), {})
        assert plan is not None and plan.holdings.keys() <= {lone, *node}
        times.add(plan.iteration_seconds)
    assert len(calls) == 2 and len(times) == 1 and plans.planned == 2
    # Two V100 of different nodes are another set.
    plans(frozenset({0, 4, 6}), {})
    assert len(calls) == 3
    assert plans(frozenset(), {}) is None


@pytest.mark.parametrize("gigabytes", [2, 4])
def test_no_arrangement_of_like_devices_moves_fewer_bytes(cluster: Topology, gigabytes: int) -> None:
    # A layer has 8 or 16 GB of state, so no device holds all of them, and devices of one kind hold different layers: in
    # the first case those of different nodes, in the second case those of one node too.
    large = LayerSizes(
        parameter_bytes=(gigabytes * 10**9,) * LAYERS,
        activation_bytes=(10**6,) * LAYERS,
        output_bytes=(10**4,) * LAYERS,
    )
    model = profile(sizes=(large,))
    plans = FittedPlans(cluster, model, global_batch=16, link=slowest_channel(cluster))
    sizes, everything, chance = state_bytes_by_block(model), frozenset(range(8)), random.Random(0)
    first = plans(everything, {})
    assert first is not None and len(set(first.holdings.values())) > 2
    for _ in range(30):
        held: dict[int, HeldLayers] = {}
        for device in chance.sample(range(8), 6):
            start = chance.randrange(BLOCKS)
            held[device] = HeldLayers(((start, chance.randint(start + 1, BLOCKS)),))
        costs = {
            (device, rank): missing_bytes(held.get(device), layers, sizes)
            for device in range(8)
            for rank, layers in first.holdings.items()
        }
        best = min(sum(costs[order[rank], rank] for rank in first.holdings) for order in arrangements())
        plan = plans(everything, held)
        assert plan is not None
        found = sum(missing_bytes(held.get(device), layers, sizes) for device, layers in plan.holdings.items())
        assert found == pytest.approx(best)


def arrangements() -> list[tuple[int, ...]]:
    """All orders of the devices in which nodes of one kind, and devices of one node, have changed places."""
    orders = []
    for a, b in itertools.product(((0, 1), (1, 0)), ((2, 3), (3, 2))):
        for insides in itertools.product((0, 1), repeat=4):
            nodes = [*a, *b]
            orders.append(
                tuple(
                    2 * node + (place ^ inside) for node, inside in zip(nodes, insides, strict=True) for place in (0, 1)
                )
            )
    return orders


def test_what_a_device_lacks() -> None:
    sizes = [100.0, 10.0, 1.0]
    half, first, second = HeldLayers(((0, 2),)), HeldLayers(((0, 2),), 0, 2), HeldLayers(((0, 2),), 1, 2)
    assert missing_bytes(None, half, sizes) == 110 and missing_bytes(half, None, sizes) == 0
    assert missing_bytes(half, first, sizes) == 0 and missing_bytes(first, half, sizes) == 55
    assert missing_bytes(first, second, sizes) == 55
    assert missing_bytes(HeldLayers(((1, 3),)), half, sizes) == 100
    assert has_every_layer({0: first, 2: second}, {0: first, 1: first, 2: second})
    assert not has_every_layer({0: first, 1: first}, {0: first, 1: first, 2: second})


def test_moving_takes_as_long_as_the_node_that_gets_most(cluster: Topology) -> None:
    plans = fitted(cluster)
    plan = plans(frozenset(range(8)), {})
    assert plan is not None
    sizes, by_node = state_bytes_by_block(profile()), [0.0] * 4
    for device, layers in plan.holdings.items():
        by_node[device // 2] += missing_bytes(None, layers, sizes)
    assert plan.move_seconds == pytest.approx(max(by_node) / (50e9 / 8))
    again = plans(frozenset(range(8)), plan.holdings)
    assert again is not None and again.move_seconds == 0.0


def test_the_state_is_that_without_gradients() -> None:
    # 8 layers of 10⁶ bytes of parameters; Adam has four times as much with gradients, three times without.
    assert sum(state_bytes_by_block(profile())) == pytest.approx(24e6)
