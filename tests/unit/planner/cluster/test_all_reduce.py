"""The times of rings, compared with a computation step by step, and rings that share NICs."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.all_reduce import concurrent_seconds, ring_hops, synchronization_seconds
from colossal_hetero.planner.cluster.topology import Channel, Topology
from tests.support.machines import GIGABIT, NVLINK, Nodes, machines
from tests.support.random_examples import examples

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


def test_the_formula() -> None:
    topology = machines(Nodes("InfiniBand", [1, 1, 1]), Nodes("RoCE", [1]))
    inside = synchronization_seconds(topology, [0, 1, 2], 3e9)
    assert inside == pytest.approx(2 * 2 / 3 * 3e9 / (200 * GIGABIT) + 4 * LATENCY)
    across = synchronization_seconds(topology, [0, 1, 2, 3], 3e9)
    assert across == pytest.approx(2 * 3 / 4 * 3e9 / (25 * GIGABIT) + 6 * LATENCY)
    assert synchronization_seconds(topology, [2], 1e9) == synchronization_seconds(topology, [0, 3], 0) == 0.0


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


def test_the_bandwidth_depends_on_the_message_size() -> None:
    """Each step sends one part of the gradients: 1 GB, if four devices have 4 GB."""
    topology = machines(Nodes("InfiniBand", [1] * 4))
    curved = Channel("InfiniBand", 25e9, 0.0, (0.0, 1.0, 2.0))
    nodes = tuple(type(n)(n.name, n.cluster, n.devices, n.inside, (curved,)) for n in topology.nodes)
    topology = Topology(topology.devices, nodes, topology.clusters)
    assert synchronization_seconds(topology, range(4), 4e9) == pytest.approx(6 * curved.seconds(1e9))


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


def test_a_ring_leaves_each_node_once() -> None:
    """A ring over eight devices of each of two nodes has fourteen hops on NVLink and two over the NIC."""
    topology = machines(Nodes("InfiniBand", [8, 8]), latency_seconds=0.0)
    assert ring_hops(topology, range(16)) == ((0, 1), (1, 0))
    chunk = 16e9 / 16
    assert synchronization_seconds(topology, range(16), 16e9) == pytest.approx(30 * chunk / (200 * GIGABIT))
    assert synchronization_seconds(topology, range(8), 8e9) == pytest.approx(14 * 1e9 / NVLINK.bytes_per_second)


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
    [
        ((0, 9), 1.0, "device 9"),
        ((0, 0), 1.0, "names a device twice"),
        ((0, 1), -1.0, "gradient_bytes=-1"),
    ],
)
def test_impossible_groups(group: tuple[int, ...], size: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        synchronization_seconds(machines(Nodes("RoCE", [2, 2])), group, size)
