"""Clusters: files that are read and written without loss; channels and networks of groups by hand, and rings."""

import dataclasses
import itertools
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.all_reduce import concurrent_seconds, synchronization_seconds
from colossal_hetero.planner.cluster.cluster_file import load_cluster, parse_cluster, save_cluster, write_cluster
from colossal_hetero.planner.cluster.gpu_catalog import GPUS, INSIDE
from colossal_hetero.planner.cluster.group_networks import Network, group_network
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from tests.support.machines import GIGABIT, Nodes, machines
from tests.support.random_examples import examples

FILE = Path(__file__).with_name("cluster.toml").read_text(encoding="utf-8")


def test_all_fields_are_read() -> None:
    topology = parse_cluster(FILE)
    old = DeviceKind("old", 12_000_000_000, 6.5e12, 1_200_000_000)
    # The usual reserve: 2 GB and 2.5 % of 39.5 GB.
    a100 = DeviceKind("A100-40", 39_500_000_000, 312e12, 2_987_500_000)
    assert topology.clusters == ("east", "west")
    assert [node.name for node in topology.nodes] == ["e-0", "e-1", "west"]
    assert [node.devices for node in topology.nodes] == [(0, 1, 2), (3, 4, 5), (6, 7, 8, 9)]
    assert [device.kind for device in topology.devices] == 2 * [a100, a100, old] + 4 * [GPUS["V100-16"]]
    assert [device.node for device in topology.devices] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert [device.cluster for device in topology.devices] == 6 * [0] + 4 * [1]
    assert [device.speed for device in topology.devices] == 2 * [1.0, 1.0, 0.25] + 4 * [1.0]
    roce = Channel("RoCE", 12.5e9, 3e-6, (-0.5, 2.0, 6.0))
    assert topology.nodes[0].nics == (roce, Channel("Ethernet", 1.25e9))
    assert topology.nodes[0].inside == Channel("PCIe", 16e9, 5e-6)
    assert topology.nodes[2].inside == INSIDE["V100-16"]
    assert topology.channel(0, 3) == roce
    assert topology.channel(2, 9) == Channel("Ethernet", 0.625e9, 0.01)
    assert [node.dollars_per_hour for node in topology.nodes] == [7.5, 7.5, 5.0]  # of two nodes, those of the devices
    assert topology.egress == ((1, 0, 0.08),)
    assert parse_cluster(write_cluster(topology)) == topology
    assert parse_cluster(FILE.replace("dollars_per_hour = 5\n", "")).nodes[2].dollars_per_hour is None


names = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1, max_size=8)
positive = st.floats(1e-6, 1e15) | st.integers(1, 1000).map(lambda n: n * 1e9)
fast_kinds = st.sampled_from(["NVLink", "PCIe", "shared memory"])
curves = st.none() | st.tuples(st.floats(-0.1, 0.1), st.floats(0, 10), st.floats(1, 10))


def channels(kinds: st.SearchStrategy[str]) -> st.SearchStrategy[Channel]:
    return st.builds(Channel, kinds, positive, st.just(0.0) | st.floats(1e-9, 1), curves)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    made = st.integers(1, 10**13).flatmap(
        lambda memory: st.builds(DeviceKind, names, st.just(memory), st.floats(1, 1e20), st.integers(0, memory - 1))
    )
    kinds = draw(st.lists(st.sampled_from(list(GPUS.values())) | made, min_size=1, unique_by=lambda kind: kind.name))
    clusters = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    speeds = st.just(1.0) | st.floats(0.01, 4)
    devices: list[Device] = []
    nodes: list[Node] = []
    trained = draw(st.booleans())
    for number, _ in enumerate(clusters):
        training_speed = draw(st.floats(0.01, 1000)) if trained else None
        for _ in range(draw(st.integers(1, 3))):
            inside = draw(channels(fast_kinds))
            nics = [draw(channels(st.just("Ethernet"))), *draw(st.lists(channels(st.just("RoCE")), max_size=1))]
            nics.sort(key=lambda nic: -nic.bytes_per_second)
            like = draw(st.lists(st.tuples(st.sampled_from(kinds), speeds), min_size=1, max_size=4))
            for _ in range(draw(st.integers(1, 3))):
                ranks = tuple(range(len(devices), len(devices) + len(like)))
                devices += [Device(kind, len(nodes), number, speed, training_speed) for kind, speed in like]
                name = draw(st.sampled_from([f"node-{len(nodes)}", f"{len(nodes)}-0", f"n{len(nodes)}"]))
                nodes.append(Node(name, number, ranks, inside, tuple(nics), draw(st.just(math.inf) | positive)))
    pairs = [(a, b) for a in range(len(clusters)) for b in range(len(clusters)) if a != b]
    between = []
    for a, b in draw(st.lists(st.sampled_from(pairs), max_size=3, unique_by=frozenset)) if pairs else []:
        between.append((a, b, draw(channels(st.sampled_from(["Ethernet", "InfiniBand"])))))
    return Topology(tuple(devices), tuple(nodes), tuple(clusters), tuple(between))


@examples(ordinary=12, thorough=1000)
@given(topologies(), st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=20))
def test_writing_loses_nothing(topology: Topology, comment: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_cluster(topology, Path(folder, "cluster.toml"), comment)
        assert load_cluster(Path(folder, "cluster.toml")) == topology


def test_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE, encoding="utf-8-sig")
    assert load_cluster(path) == parse_cluster(FILE)


def test_a_single_device_of_a_declared_kind_needs_no_inside() -> None:
    text = 'schema = 1\n[kinds.x]\nmemory_gb = 1\ntflops = 1\n[[clusters]]\nname = "a"\n[[clusters.nodes]]\n'
    assert len(parse_cluster(text + 'devices = [{ kind = "x" }]').devices) == 1
    slower = parse_cluster(text + 'devices = [{ kind = "RTX-3090" }, { kind = "T4" }]').nodes[0].inside
    assert slower == INSIDE["T4"]


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
