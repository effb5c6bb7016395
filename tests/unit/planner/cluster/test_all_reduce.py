"""Rings and hops: against a computation step by step, the bytes that a card carries, and the buckets of the plugin."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.all_reduce import (
    concurrent_seconds,
    synchronization_seconds,
)
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.gradient_times import GradientTimes, Summing
from colossal_hetero.planner.cost.placement import NodeLinks
from colossal_hetero.plugin.replicas.replica_gradients import HeldParameter, divide_into_buckets
from tests.support.machines import GIGABIT, Nodes, machines
from tests.support.random_examples import examples
from tests.support.shared_hops import hop_channels

LATENCY = 5e-6


def walked(topology: Topology, group: list[int], gradient_bytes: float) -> float:
    """The time of a ring in which a device begins a step only after it has received the previous message."""
    count = len(group)
    ready = [0.0] * count
    for _ in range(2 * (count - 1)):
        arrives = [
            ready[i] + topology.channel(group[i], group[(i + 1) % count]).seconds(gradient_bytes / count)
            for i in range(count)
        ]
        ready = [max(arrives[i - 1], arrives[i]) for i in range(count)]
    return max(ready)


@examples(ordinary=70, thorough=200)
@given(
    st.lists(
        st.builds(Nodes, st.sampled_from(["InfiniBand", "RoCE"]), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    st.data(),
)
def test_a_ring_takes_as_long_as_its_steps(clusters: list[Nodes], data: st.DataObject) -> None:
    topology = machines(*clusters)
    numbers = range(len(topology.devices))
    group = sorted(data.draw(st.sets(st.sampled_from(numbers), min_size=1)))
    size = data.draw(st.floats(1, 1e10))
    assume(len(group) > 1)
    assert synchronization_seconds(topology, group, size) == pytest.approx(walked(topology, group, size))


def test_rings_share_the_bus_of_a_node() -> None:
    """A ring of four inside a node has four messages at once; one that leaves the node has three inside."""
    whole = machines(Nodes("InfiniBand", [4, 4]))
    nodes = tuple(dataclasses.replace(node, inside_bytes_per_second=8e9) for node in whole.nodes)
    topology = dataclasses.replace(whole, nodes=nodes)
    latency = whole.nodes[0].inside.latency_seconds
    inside = 6 * (1e9 / (8e9 / 4) + latency)
    assert synchronization_seconds(topology, [0, 1, 2, 3], 4e9) == pytest.approx(inside)
    assert concurrent_seconds(topology, [[0, 1], [2, 3]], [2e9, 2e9]) == pytest.approx((inside / 3,) * 2)
    assert synchronization_seconds(topology, [0, 1], 2e9, sharing=2) == pytest.approx(inside / 3)
    both = concurrent_seconds(topology, [range(8)], [8e9])
    assert both == pytest.approx((14 * (1e9 / (8e9 / 3) + latency),))
    assert synchronization_seconds(topology, [0, 4], 2e9) == synchronization_seconds(whole, [0, 4], 2e9)


def test_rings_share_a_nic() -> None:
    """Eight rings between two nodes of eight devices. If each node has one NIC, they take eight times as long as one
    ring; with eight NICs each ring uses a separate NIC; with two NICs four rings share one."""
    for nics, factor in ((1, 8), (8, 1), (2, 4)):
        topology = machines(Nodes("InfiniBand", [8, 8], nics), latency_seconds=0.0)
        groups = [(device, device + 8) for device in range(8)]
        alone = synchronization_seconds(topology, groups[0], 1e9)
        assert alone == pytest.approx(1e9 / (200 * GIGABIT))
        assert concurrent_seconds(topology, groups, [1e9] * 8) == pytest.approx([factor * alone] * 8)
        assert synchronization_seconds(topology, groups[0], 1e9, sharing=8) == pytest.approx(factor * alone)


def test_rings_on_different_networks_do_not_slow_each_other() -> None:
    """One ring stays in its cluster on InfiniBand; the other one leaves the same node over Ethernet."""
    topology = machines(Nodes("InfiniBand", [2, 2]), Nodes("RoCE", [2, 2]))
    groups = [(0, 2), (1, 4)]
    assert concurrent_seconds(topology, groups, [1e9, 1e9]) == pytest.approx(
        [synchronization_seconds(topology, group, 1e9) for group in groups]
    )
    # Two rings on Ethernet slow each other where they share a NIC: node 0 sends both.
    both = concurrent_seconds(topology, [(0, 4), (1, 6)], [1e9, 1e9])
    assert both == pytest.approx([synchronization_seconds(topology, (0, 4), 1e9, sharing=2)] * 2)
    # A ring without gradients takes no bandwidth.
    assert concurrent_seconds(topology, [(0, 4), (1, 6)], [1e9, 0])[0] < both[0]


def test_a_ring_uses_one_network() -> None:
    """A ring over both clusters uses Ethernet for all hops, also for those inside a cluster."""
    topology = machines(Nodes("InfiniBand", [2, 2]), Nodes("RoCE", [2]), latency_seconds=0.0)
    seconds = concurrent_seconds(topology, [(0, 2, 4), (1, 5)], [3e9, 3e9])
    # Nodes 0 and 2 send and receive both rings, so each ring gets half of the bandwidth there.
    assert seconds[0] == pytest.approx(4 * 1e9 / (25 * GIGABIT) * 2)
    # A ring that stays on InfiniBand shares no NIC with a ring on Ethernet.
    assert concurrent_seconds(topology, [(0, 2), (1, 5)], [1e9, 1e9])[0] == pytest.approx(1e9 / (200 * GIGABIT))


@pytest.mark.parametrize(
    ("group", "size", "words"),
    [((0, 9), 1.0, "device 9"), ((0, 0), 1.0, "names a device twice"), ((0, 1), -1.0, "gradient_bytes=-1")],
)
def test_impossible_groups(group: tuple[int, ...], size: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        synchronization_seconds(machines(Nodes("RoCE", [2, 2])), group, size)


# Hops ----------------------------------------------------------------------------------------------------------------

INSIDE, FAST, SLOW = Channel("PCIe", 16e9), Channel("InfiniBand", 25e9, 1e-5), Channel("Ethernet", 1e9, 1e-4)


def cluster(*nodes: tuple[int, tuple[Channel, ...]], inside_total: float = math.inf) -> Topology:
    """One cluster; each node has this number of devices and these NICs. Transfers inside a node share a bandwidth."""
    devices: list[Device] = []
    made = []
    for number, (count, nics) in enumerate(nodes):
        ranks = tuple(range(len(devices), len(devices) + count))
        made.append(Node(f"n{number}", 0, ranks, INSIDE, nics, inside_total))
        devices += [Device(DeviceKind("gpu", 10**10, 1e12), number, 0)] * count
    return Topology(tuple(devices), tuple(made), ("here",))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Topology, list[tuple[int, ...]]]:
    nics = st.sampled_from([(SLOW,), (FAST, SLOW), (Channel("Ethernet", 5e9),)])
    nodes = draw(st.lists(st.tuples(st.integers(1, 4), nics), min_size=1, max_size=4))
    topology = cluster(*nodes, inside_total=draw(st.sampled_from([math.inf, 40e9, 3e9])))
    order = draw(st.permutations(range(len(topology.devices))))
    cuts = sorted(draw(st.sets(st.integers(1, len(order)), max_size=4)) | {0})
    return topology, [tuple(order[start:stop]) for start, stop in pairwise(cuts)] or [tuple(order)]


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


def test_each_layer_is_summed_by_the_ranks_that_hold_it() -> None:
    """Replicas of 1, 2 and 3 stages on six nodes: the same groups, bytes and networks as the plugin's buckets have."""
    blocks, elements = 6, 10**8
    rates = [1e9, 4e9, 2e9, 8e9, 1e9, 4e9]
    kind = DeviceKind("gpu", 10**10, 1e12)
    inside = Channel("PCIe", 16e9)
    nodes = [Node(f"n{at}", 0, (at,), inside, (Channel("Ethernet", rate),)) for at, rate in enumerate(rates)]
    topology = Topology(tuple(Device(kind, at, 0) for at in range(6)), tuple(nodes), ("here",))
    cuts = [((0,), (0, 6)), ((1, 2), (0, 4, 6)), ((3, 4, 5), (0, 1, 3, 6))]
    held = {
        rank: [HeldParameter(f"block {block}", elements, "fp32") for block in range(start, stop)]
        for ranks, cut in cuts
        for rank, start, stop in zip(ranks, cut[:-1], cut[1:], strict=True)
    }
    buckets = divide_into_buckets([f"block {block}" for block in range(blocks)], held, 2 * elements)
    # A ring of three sends 4/3 of the bytes from each rank, all at the pace of the slowest card. A rank sums its
    # buckets one after the other.
    spent = dict.fromkeys(range(6), 0.0)
    for bucket in buckets:
        size = 4 * elements * len(bucket.names)
        for rank in bucket.ranks:
            spent[rank] += 2 * 2 / 3 * size / min(rates[each] for each in bucket.ranks)
    groups = [[(rank,) for rank in ranks] for ranks, _ in cuts]
    summing = Summing(GradientTimes(topology), np.arange(6), groups, np.full(blocks, 4.0 * elements))
    found = summing.seconds([cut for _, cut in cuts])
    assert {bucket.ranks for bucket in buckets} == {(0, 1, 3), (0, 1, 4), (0, 1, 5), (0, 2, 5)}
    assert found == pytest.approx(max(spent.values()))
