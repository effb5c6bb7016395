"""The cluster file: reading, writing without loss, and error messages."""

import math
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.cluster_file import load_cluster, parse_cluster, save_cluster, write_cluster
from colossal_hetero.planner.cluster.gpu_catalog import GPUS, INSIDE
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from tests.support.random_examples import examples

FILE = """
schema = 1

[kinds.old]
memory_gb = 12
memory_reserve_gb = 1.2
tflops = 6.5
dollars_per_hour = 0.5

[kinds.A100-40]
memory_gb = 39.5
dollars_per_hour = 3.5

[[clusters]]
name = "east"

[[clusters.nodes]]
name = "e"
count = 2
devices = [{ kind = "A100-40", count = 2 }, { kind = "old", speed = 0.25 }]
inside = { kind = "PCIe", gigabytes_per_second = 16, latency_microseconds = 5 }
nics = [
    { kind = "Ethernet", gigabits_per_second = 10 },
    { kind = "RoCE", gigabits_per_second = 100, latency_microseconds = 3, curve = [-0.5, 2.0, 6.0] },
]

[[clusters]]
name = "west"

[[clusters.nodes]]
devices = [{ kind = "V100-16", count = 4 }]
dollars_per_hour = 5

[[links]]
clusters = ["west", "east"]
kind = "Ethernet"
gigabits_per_second = 5
latency_seconds = 0.01
dollars_per_gigabyte = 0.08
"""


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
