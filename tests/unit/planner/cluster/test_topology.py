"""Channels and networks of groups by hand; rings and hops step by step, and as in the plugin; presets of GPUs."""

import dataclasses
import itertools
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.all_reduce import concurrent_seconds, synchronization_seconds
from colossal_hetero.planner.cluster.group_networks import Network, group_network
from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.cost.gradient_times import GradientTimes, Summing
from colossal_hetero.planner.cost.placement import NodeLinks
from colossal_hetero.plugin.replicas.replica_gradients import HeldParameter, divide_into_buckets
from tests.support.machines import GIGABIT, Nodes, machines, of_nodes
from tests.support.random_examples import examples
from tests.support.shared_hops import hop_channels


def test_a_curve_is_a_parabola_over_the_logarithm_up_to_the_limit() -> None:
    channel = Channel("NVLink", 100e9, 0, (-0.2, 7.0, 22.0))
    for megabytes in (1, 8, 100):
        x = np.log2(megabytes)
        assert channel.bandwidth(megabytes * 1e6) == pytest.approx((-0.2 * x**2 + 7 * x + 22) * 1e9)
    # The vertex is at x = 17.5; beyond it the bandwidth does not fall.
    assert channel.bandwidth(2**25 * 1e6) == pytest.approx((-0.2 * 17.5**2 + 7 * 17.5 + 22) * 1e9)
    assert Channel("NVLink", 50e9, 0, (-0.2, 7.0, 22.0)).bandwidth(1e9) == 50e9


@given(
    st.tuples(st.floats(-1, 1), st.floats(0, 20), st.floats(0.01, 50)),
    st.floats(1e8, 1e12),
    st.lists(st.floats(1, 1e15), min_size=2, max_size=20).map(sorted),
)
def test_no_message_takes_longer_than_a_larger_one(curve, most, messages):
    channel = Channel("x", most, 1e-6, curve)
    seconds = [channel.seconds(message) for message in messages]
    # The fastest message is searched in steps of 1/16 octave, so a small error remains.
    assert all(a <= b * 1.01 for a, b in itertools.pairwise(seconds))
    assert all(0 < channel.bandwidth(message) <= most * (1 + 1e-9) for message in messages)


HOLMES = machines(Nodes("InfiniBand", [2, 2]), Nodes("RoCE", [2, 2]), Nodes("Ethernet", [2, 2]))


def test_networks_of_gpus() -> None:
    for group, network in (
        ((0,), Network("nccl", "")),
        ((0, 1), Network("nccl", "NVLink")),
        ((0, 2), Network("nccl", "InfiniBand", "IB")),
        ((4, 5, 6, 7), Network("nccl", "RoCE", "IB")),
        ((8, 10), Network("nccl", "Ethernet", "Socket")),
        # InfiniBand and RoCE cannot communicate with each other, although NCCL calls both IB.
        ((0, 4), Network("nccl", "Ethernet", "Socket")),
        ((0, 1, 2, 8), Network("nccl", "Ethernet", "Socket")),
    ):
        assert group_network(HOLMES, group) == network


def test_a_group_with_a_cpu_uses_gloo() -> None:
    devices = list(HOLMES.devices)
    devices[2] = dataclasses.replace(devices[2], kind=DeviceKind("cpu-2", 1 << 30, 1e11))
    topology = dataclasses.replace(HOLMES, devices=tuple(devices))
    assert group_network(topology, (0, 2)) == Network("gloo", "InfiniBand")
    assert group_network(topology, (2, 4)) == Network("gloo", "Ethernet")
    assert group_network(topology, (2, 3)) == Network("gloo", "NVLink")
    assert group_network(topology, (0, 3)).backend == "nccl"


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


def test_a_ring_uses_one_network() -> None:
    """A ring over both clusters uses Ethernet for all hops, also for those inside a cluster."""
    topology = machines(Nodes("InfiniBand", [2, 2]), Nodes("RoCE", [2]), latency_seconds=0.0)
    seconds = concurrent_seconds(topology, [(0, 2, 4), (1, 5)], [3e9, 3e9])
    # Nodes 0 and 2 send and receive both rings, so each ring gets half of the bandwidth there.
    assert seconds[0] == pytest.approx(4 * 1e9 / (25 * GIGABIT) * 2)
    # A ring that stays on InfiniBand shares no NIC with a ring on Ethernet.
    assert concurrent_seconds(topology, [(0, 2), (1, 5)], [1e9, 1e9])[0] == pytest.approx(1e9 / (200 * GIGABIT))


PCIE, FAST, SLOW = Channel("PCIe", 16e9), Channel("InfiniBand", 25e9, 1e-5), Channel("Ethernet", 1e9, 1e-4)


def cluster(*nodes: tuple[int, tuple[Channel, ...]], inside_total: float = math.inf) -> Topology:
    """One cluster; each node has this number of devices and these NICs. Transfers inside a node share a bandwidth."""
    gpu = DeviceKind("gpu", 10**10, 1e12)
    return of_nodes((([gpu] * count, PCIE, nics) for count, nics in nodes), inside_total)


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
    topology = cluster(*((1, (Channel("Ethernet", rate),)) for rate in rates))
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
