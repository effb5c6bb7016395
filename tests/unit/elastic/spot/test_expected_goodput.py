"""The expected goodput is that of simulated jobs on random traces, and exact where it can be computed by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from colossal_hetero.elastic.replay.assumptions import Assumptions
from colossal_hetero.elastic.replay.elastic_job import simulate_elastic_job
from colossal_hetero.elastic.replay.fitted_plans import FitPlan, FittedPlan
from colossal_hetero.elastic.spot.expected_goodput import expected_goodput
from colossal_hetero.elastic.spot.node_states import likely_states, ready_share, there_share
from colossal_hetero.elastic.state.held_layers import HeldLayers, Holdings
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, SpotTerms, Topology
from colossal_hetero.planner.prices.node_choice import node_types
from tests.support.spot_traces import random_trace

pytestmark = pytest.mark.unit

BLOCKS = 4


def topology_of(spot: int, fixed: int, terms: SpotTerms) -> Topology:
    """Nodes of two devices."""
    kind, inside, nic = DeviceKind("A", 16 * 10**9, 1e12), Channel("PCIe", 1e10), Channel("Ethernet", 1e9)
    nodes, devices = list[Node](), list[Device]()
    for number in range(spot + fixed):
        is_spot = number < spot
        ranks = (2 * number, 2 * number + 1)
        devices += [Device(kind, number, 0) for _ in ranks]
        nodes.append(
            Node(
                f"{'s' if is_spot else 'f'}-{number}",
                0,
                ranks,
                inside,
                (nic,),
                dollars_per_hour=1.0 if is_spot else 3.0,
                spot=terms if is_spot else None,
            )
        )
    return Topology(tuple(devices), tuple(nodes), ("here",))


def plans(blocks_per_device: int, *, most: int = 64) -> FitPlan:
    """Plans of as many equal pipelines as there are devices for; a micro-batch takes 4 s, and 16 are an iteration."""

    def fit(devices: frozenset[int], held: Holdings) -> FittedPlan | None:
        stages = BLOCKS // blocks_per_device
        pipelines = min(len(devices) // stages, most)
        if pipelines < 1:
            return None
        ranges = [(start, start + blocks_per_device) for start in range(0, BLOCKS, blocks_per_device)]
        used = sorted(devices)[: pipelines * stages]
        holdings = {device: HeldLayers((each,)) for device, each in zip(used, ranges * pipelines, strict=True)}
        moves = sum(held.get(device) != layers for device, layers in holdings.items()) if held else 0
        return FittedPlan(4.0 * math.ceil(16 / pipelines), holdings, 0.25 * moves)

    return fit


def simulated(topology: Topology, fit: FitPlan, assumptions: Assumptions, traces: int, hours: float) -> float:
    """Iterations per second over random traces."""
    everything = range(len(topology.nodes))
    done = 0
    for seed in range(traces):
        trace = random_trace(topology, everything, 3600 * hours, seed)
        done += simulate_elastic_job(trace, 3600 * hours, fit, assumptions).iterations
    return done / (traces * hours * 3600)


@pytest.mark.parametrize("blocks_per_device", [4, 2, 1])
@pytest.mark.parametrize(
    ("spot", "fixed", "terms"),
    [
        (4, 0, SpotTerms(0.2, 10)),
        (3, 2, SpotTerms(1.0, 30)),
        (6, 0, SpotTerms(4.0, 2)),
        (5, 1, SpotTerms(0.5, 120)),
    ],
)
def test_simulated_traces_have_the_expected_goodput(
    spot: int, fixed: int, terms: SpotTerms, blocks_per_device: int
) -> None:
    topology, fit = topology_of(spot, fixed, terms), plans(blocks_per_device)
    assumptions = Assumptions(load_seconds=20.0, save_seconds=10.0, save_every=20)
    types = node_types(topology)
    expected = expected_goodput(topology, types, [len(each.nodes) for each in types], fit, assumptions)
    measured = simulated(topology, fit, assumptions, traces=60, hours=24.0)
    assert expected.covered > 0.99
    assert expected.iterations_per_second == pytest.approx(measured, rel=0.05)


def test_nodes_that_stay_lose_nothing() -> None:
    topology = topology_of(0, 3, SpotTerms(1.0, 1.0))
    types = node_types(topology)
    expected = expected_goodput(topology, types, [3], plans(2), Assumptions())
    assert expected.iteration_seconds == 4.0 * math.ceil(16 / 3)
    assert (expected.lost_share, expected.dollars_per_hour, expected.covered) == (0.0, 9.0, 1.0)


@pytest.mark.parametrize("save_seconds", [0.0, 600.0])
def test_a_single_node_by_hand(save_seconds: float) -> None:
    topology = topology_of(1, 0, SpotTerms(1.0, 60.0))
    assumptions = Assumptions(process_seconds=0, import_seconds=0, save_seconds=save_seconds)
    expected = expected_goodput(topology, node_types(topology), [1], plans(2), assumptions)
    # It trains half of the time. Each hour of training ends with a loss, after which it goes back to a checkpoint; on
    # return it joins.
    assert expected.dollars_per_hour == pytest.approx(0.5)
    speed, flow = 1 / 64, 0.5 / 3600
    pause = 3600 * (1 - math.exp(-assumptions.join_seconds / 3600))
    interval = flow * 50 / (0.5 * speed)
    done = 0.5 * speed - flow * (0.5 + pause * speed)
    # The node must stay while a checkpoint is written.
    kept = interval / (math.exp(interval) - 1) * math.exp(-save_seconds / 3600)
    assert expected.iterations_per_second == pytest.approx(done * kept)


def test_a_node_that_is_taken_away_each_second_reaches_no_checkpoint() -> None:
    topology, assumptions = topology_of(1, 0, SpotTerms(3600.0, 1.0)), Assumptions(process_seconds=0, import_seconds=0)
    expected = expected_goodput(topology, node_types(topology), [1], plans(2), assumptions)
    assert expected.iterations_per_second == 0 and expected.iteration_seconds == math.inf


def test_checkpoints_that_take_long_to_write() -> None:
    """Two nodes that hold a half each, and are rarely there together: all time is lost in which they are not."""
    topology, fit = topology_of(2, 0, SpotTerms(1.0, 60.0)), plans(1)
    assumptions = Assumptions(process_seconds=0, import_seconds=0, save_seconds=600.0, save_every=10)
    expected = expected_goodput(topology, node_types(topology), [2], fit, assumptions)
    measured = simulated(topology, fit, assumptions, traces=40, hours=200.0)
    assert expected.iterations_per_second == pytest.approx(measured, rel=0.08)  # interrupted pauses are neglected


def test_a_node_without_devices_in_use_costs_nothing_when_it_is_lost() -> None:
    topology = topology_of(3, 0, SpotTerms(1.0, 10.0))
    types, assumptions = node_types(topology), Assumptions()
    all_are_used = expected_goodput(topology, types, [3], plans(4), assumptions)
    one_is_spare = expected_goodput(topology, types, [3], plans(4, most=4), assumptions)
    # In the same time, the second one makes fewer iterations, so each pause costs it fewer of them, too.
    assert 0 < one_is_spare.lost_share < all_are_used.lost_share


def test_the_likeliest_states_come_first_and_are_all() -> None:
    counts, shares = [3, 2, 1], [0.9, 0.4, 1.0]
    states = likely_states(counts, shares, 2.0, 1000)
    assert {state.counts for state in states if state.probability > 0} == set(
        itertools.product(range(4), range(3), [1])
    )
    probabilities = [state.probability for state in states]
    assert probabilities == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1.0)
    some = likely_states(counts, shares, 0.5, 1000)
    assert some == states[: len(some)]
    assert sum(each.probability for each in some) >= 0.5 > sum(each.probability for each in some[:-1])


def test_shares_of_a_random_trace() -> None:
    terms = SpotTerms(2.0, 12.0)
    topology, hours = topology_of(8, 0, terms), 500.0
    trace = random_trace(topology, range(8), 3600 * hours, 1)
    ends = [each.seconds for each in trace[1:]] + [3600 * hours]
    there = sum(len(each.devices) * (end - each.seconds) for each, end in zip(trace, ends, strict=True))
    assert there / (16 * 3600 * hours) == pytest.approx(there_share(terms), rel=0.02)
    assert ready_share(terms, 60.0) == pytest.approx(there_share(terms) * np.exp(-1 / 30))
