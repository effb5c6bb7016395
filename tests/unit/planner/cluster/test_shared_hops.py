"""Hops of pipelines that share network cards: against the bytes that a card carries, and by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.placement import NodeLinks
from tests.support.random_examples import examples
from tests.support.shared_hops import hop_channels

INSIDE, FAST, SLOW = Channel("PCIe", 16e9), Channel("InfiniBand", 25e9, 1e-5), Channel("Ethernet", 1e9, 1e-4)


def machines(*nodes: tuple[int, tuple[Channel, ...]], inside_total: float = math.inf) -> Topology:
    """One cluster; each node has this number of devices and these NICs. Transfers inside a node share a bandwidth."""
    devices: list[Device] = []
    made = []
    for number, (count, nics) in enumerate(nodes):
        ranks = tuple(range(len(devices), len(devices) + count))
        made.append(Node(f"n{number}", 0, ranks, INSIDE, nics, inside_total))
        devices += [Device(DeviceKind("gpu", 10**10, 1e12), number, 0)] * count
    return Topology(tuple(devices), tuple(made), ("here",))


def shared_channels(topology: Topology, pipelines: Sequence[Sequence[int]]) -> list[list[Channel]]:
    """Channel of each hop, ``[pipelines][stages − 1]``."""
    links = NodeLinks(topology, 1e6)
    rows = links.hops([[topology.devices[device].node for device in pipeline] for pipeline in pipelines], 1)
    return [[links.channels[number] for number in row] for row in rows]


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_replicas_share_the_card_of_their_node(replicas: int) -> None:
    topology = machines((8, (SLOW,)), (8, (SLOW,)))
    hops = shared_channels(topology, [(device, 8 + device) for device in range(replicas)])
    assert hops == [[Channel("Ethernet", 1e9 / replicas, 1e-4)]] * replicas


def test_a_stage_between_two_others_takes_part_in_one_exchange_at_a_time() -> None:
    topology = machines((1, (SLOW,)), (1, (SLOW,)), (1, (SLOW,)))
    assert shared_channels(topology, [(0, 1, 2)]) == [[SLOW, SLOW]]


def test_hops_inside_a_node_and_over_another_network_share_nothing() -> None:
    topology = machines((4, (FAST, SLOW)), (2, (FAST, SLOW)), (2, (SLOW,)))
    hops = shared_channels(topology, [(0, 1, 4), (2, 6), (3, 7)])
    half = Channel("Ethernet", 0.5e9, 1e-4)
    assert hops == [[INSIDE, FAST], [half], [half]]


def test_hops_inside_a_node_share_its_bus() -> None:
    """Two pipelines inside the node and one that leaves it: four devices send inside at the same time."""
    topology = machines((5, (SLOW,)), (1, (SLOW,)), inside_total=8e9)
    hops = shared_channels(topology, [(0, 1), (2, 3), (4, 5)])
    assert hops == [[Channel("PCIe", 2e9)], [Channel("PCIe", 2e9)], [SLOW]]
    assert shared_channels(machines((2, ()), inside_total=40e9), [(0, 1)]) == [[INSIDE]]


def test_a_card_that_is_faster_than_the_other_end_serves_several() -> None:
    topology = machines((2, (Channel("Ethernet", 5e9),)), (1, (SLOW,)), (1, (SLOW,)))
    assert shared_channels(topology, [(0, 2), (1, 3)]) == [[SLOW], [SLOW]]


def test_bandwidth_that_depends_on_the_size_is_shared_alike() -> None:
    curved = Channel("Ethernet", 4e9, 1e-4, (0.01, 0.1, 1.0))
    topology = machines((2, (curved,)), (2, (curved,)))
    ((hop,), _) = shared_channels(topology, [(0, 2), (1, 3)])
    for size in (1e5, 1e6, 1e7, 1e9):
        assert hop.bandwidth(size) == pytest.approx(curved.bandwidth(size) / 2)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Topology, list[tuple[int, ...]]]:
    nics = st.sampled_from([(SLOW,), (FAST, SLOW), (Channel("Ethernet", 5e9),)])
    nodes = draw(st.lists(st.tuples(st.integers(1, 4), nics), min_size=1, max_size=4))
    topology = machines(*nodes, inside_total=draw(st.sampled_from([math.inf, 40e9, 3e9])))
    order = draw(st.permutations(range(len(topology.devices))))
    cuts = sorted(draw(st.sets(st.integers(1, len(order)), max_size=4)) | {0})
    return topology, [tuple(order[start:stop]) for start, stop in pairwise(cuts)] or [tuple(order)]


@examples(ordinary=100, thorough=2000)
@given(layouts(), st.integers(1, 10))
def test_no_card_carries_more_than_it_can(case: tuple[Topology, list[tuple[int, ...]]], size: int) -> None:
    """In the time of the slowest stage's transfers, every card must be able to carry the messages of all pipelines."""
    topology, pipelines = case
    hops = shared_channels(topology, pipelines)
    sent: Counter[tuple[int, str]] = Counter()
    longest = 0.0
    for pipeline, channels in zip(pipelines, hops, strict=True):
        nodes = [topology.devices[device].node for device in pipeline]
        seconds = [channel.seconds(size * 1e6) for channel in channels]
        longest = max([longest, *(before + behind for before, behind in pairwise([0.0, *seconds, 0.0]))])
        for (a, b), channel in zip(pairwise(nodes), channels, strict=True):
            # Activations leave a, gradients leave b.
            sent[a, channel.kind if a != b else "inside"] += 1
            sent[b, channel.kind if a != b else "inside"] += 1
    for (node, kind), messages in sent.items():
        rate = sum(nic.bytes_per_second for nic in topology.nodes[node].nics if nic.kind == kind)
        if kind == "inside":
            rate = topology.nodes[node].inside_bytes_per_second
        assert messages * size * 1e6 / rate <= longest * (1 + 1e-9)


@examples(ordinary=60, thorough=1000)
@given(layouts(), st.integers(1, 4))
def test_the_search_shares_as_the_prediction_does(case: tuple[Topology, list[tuple[int, ...]]], width: int) -> None:
    topology, pipelines = case
    expected = hop_channels(topology, [pipeline for pipeline in pipelines for _ in range(width)])[::width]
    links = NodeLinks(topology, 1e6)
    nodes = [[topology.devices[device].node for device in pipeline] for pipeline in pipelines]
    load = links.load(nodes, width)
    for row, channels, numbers in zip(nodes, expected, links.hops(nodes, width), strict=True):
        assert numbers == [links.shared(a, b, load, width) for a, b in pairwise(row)]
        for number, channel in zip(numbers, channels, strict=True):
            found = links.channels[number]
            assert (found.kind, found.latency_seconds) == (channel.kind, channel.latency_seconds)
            assert found.bytes_per_second == pytest.approx(channel.bytes_per_second)
