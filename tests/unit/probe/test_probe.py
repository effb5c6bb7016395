"""The cluster that a probe makes from measurements. The tests derive the measurements from a known cluster."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from colossal_hetero.cli.rank_facts import Nic, RankFacts, make_topology, pairs_to_measure
from colossal_hetero.planner.cluster.cluster_file import load_cluster, save_cluster
from colossal_hetero.planner.cluster.gpu_catalog import GPUS, kind_name
from colossal_hetero.planner.cluster.topology import Channel, MeasuredLink, Topology
from tests.support.command_line import failure
from tests.support.paths import CLUSTERS

GPU_NAMES = {"A100-40": "NVIDIA A100-SXM4-40GB", "A100-80": "NVIDIA A100-SXM4-80GB", "V100-16": "Tesla V100-SXM2-16GB"}


def test_gpu_kinds_by_device_names() -> None:
    for device, gibibytes, name in (
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100-80"),
        ("NVIDIA A800-SXM4-80GB", 79.3, "A800"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16"),
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX-3090"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.8, "RTX-2080"),
        ("NVIDIA TITAN RTX", 23.6, "Titan-RTX"),
        ("NVIDIA GH200 480GB", 94.5, "GH-96"),
        # Similar names of other GPUs.
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, "RTX-3090-Ti"),
        ("NVIDIA RTX 5000 Ada Generation", 31.5, "RTX-5000-Ada-Generation"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.5, "A100-SXM4-40GB-MIG-3g.20gb"),
        ("cpu", 64, "cpu"),
    ):
        assert kind_name(device, int(gibibytes * 2**30)) == name


def probed(topology: Topology, flops: float = 1e12) -> tuple[list[RankFacts], list[MeasuredLink]]:
    """What a probe would measure on these machines."""
    facts = []
    for device in topology.devices:
        node = topology.nodes[device.node]
        facts.append(
            RankFacts(
                host=node.name,
                machine="",
                device=GPU_NAMES.get(device.kind.name, device.kind.name),
                memory_bytes=int(device.kind.memory_bytes * 1.06),
                flops=flops * device.speed,
                nics=tuple(Nic(nic.kind, nic.bytes_per_second) for nic in node.nics),
            )
        )
    return facts, measured(topology, facts)


def measured(topology: Topology, facts: Sequence[RankFacts]) -> list[MeasuredLink]:
    """NCCL has the bandwidth of the fastest channel. Gloo has that of Ethernet between machines, and a tenth of NCCL's
    inside a machine."""
    links = []
    for a, b in itertools.chain.from_iterable(pairs_to_measure(facts)):
        fast = topology.channel(a, b)
        nodes = [topology.nodes[topology.devices[rank].node] for rank in (a, b)]
        plain = [nic for node in nodes for nic in node.nics if nic.kind == "Ethernet"]
        rate = fast.bytes_per_second / 10
        if nodes[0] is not nodes[1]:
            rate = min((nic.bytes_per_second for nic in plain), default=rate)
        for protocol, bytes_per_second in (("nccl", fast.bytes_per_second), ("gloo", rate)):
            fields = dict(protocol=protocol, latency_seconds=1e-5, bytes_per_second=bytes_per_second)
            links.append(MeasuredLink(ranks=(a, b), **fields))
    return links


def assert_same_channels(found: Topology, topology: Topology) -> None:
    assert [node.devices for node in found.nodes] == [node.devices for node in topology.nodes]
    assert [device.cluster for device in found.devices] == [device.cluster for device in topology.devices]
    for a, b in itertools.combinations(range(len(topology.devices)), 2):
        one, other = found.channel(a, b), topology.channel(a, b)
        assert (one.kind, one.bytes_per_second) == (other.kind, pytest.approx(other.bytes_per_second, rel=0.01))


def test_nodes_of_one_network_are_one_cluster() -> None:
    topology = load_cluster(CLUSTERS / "two-kinds.toml")
    found, order = make_topology(*probed(topology))
    assert order == tuple(range(32))
    assert found.clusters == ("infiniband", "roce")
    assert {device.kind for device in found.devices} == {GPUS["A100-80"]}
    assert_same_channels(found, topology)
    assert [(one, other) for one, other, _ in found.between] == [(0, 1)]
    topology = load_cluster(CLUSTERS / "a100-v100.toml")
    found, _ = make_topology(*probed(topology))
    assert found.clusters == ("ethernet",)
    assert [device.kind for device in found.devices] == 4 * [GPUS["A100-40"]] + 8 * [GPUS["V100-16"]]
    assert_same_channels(found, topology)


def test_clusters_by_name_whose_ranks_are_numbered_one_after_the_other() -> None:
    topology = load_cluster(CLUSTERS / "a100-v100.toml")
    facts, links = probed(topology)
    found, _ = make_topology(facts, links, [("v100*", "old"), ("*", "new")])
    assert found.clusters == ("new", "old")
    reached = topology.channel(0, 4).bytes_per_second
    assert found.channel(0, 4).bytes_per_second == pytest.approx(reached, rel=0.01)
    found, order = make_topology(facts, links, [("v100-0", "two"), ("*", "one")])
    assert order == (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7)
    assert [node.name for node in found.nodes] == ["a100", "v100-1", "v100-0"]


def test_slow_devices_and_little_memory(tmp_path: Path) -> None:
    speeds, gigabytes = [1.0, 0.97, 0.25, 0.5], [8, 7.9, 8, 4]
    facts = [
        RankFacts("here", "", "cpu", int(memory * 1e9), speed * 2e11, used_bytes=int((1 + speed) * 1e8) + 1)
        for speed, memory in zip(speeds, gigabytes, strict=True)
    ]
    links = [
        MeasuredLink(ranks=(a, b), protocol="gloo", latency_seconds=1e-5 * (a + b), bytes_per_second=1e9 * (a + b))
        for a, b in itertools.combinations(range(4), 2)
    ]
    found, _ = make_topology(facts, links)
    assert [device.speed for device in found.devices] == [1, 1, 0.25, 1]  # the last device is the only one of its kind
    assert [device.kind.name for device in found.devices] == ["cpu", "cpu", "cpu", "cpu-2"]
    assert [device.kind.memory_bytes for device in found.devices] == 3 * [7_900_000_000] + [4_000_000_000]
    assert [device.kind.flops for device in found.devices] == 3 * [2e11] + [1e11]
    # What the processes of a kind use at most, rounded up to 10 MB.
    assert [device.kind.memory_reserve_bytes for device in found.devices] == 3 * [210_000_000] + [160_000_000]
    assert found.nodes[0].inside == Channel("local", 3e9, 3e-5)
    save_cluster(found, tmp_path / "cluster.toml")
    assert load_cluster(tmp_path / "cluster.toml") == found


def test_network_cards_are_read_from_sysfs(tmp_path: Path) -> None:
    from colossal_hetero.cli.probe_ranks import find_nics

    cards = {
        "infiniband/mlx5_0/ports/1": dict(link_layer="InfiniBand", rate="200 Gb/sec (4X HDR)", state="4: ACTIVE"),
        "infiniband/mlx5_1/ports/1": dict(link_layer="Ethernet", rate="100 Gb/sec (4X EDR)", state="4: ACTIVE"),
        "infiniband/mlx5_2/ports/1": dict(link_layer="InfiniBand", rate="10 Gb/sec (4X SDR)", state="1: DOWN"),
        "net/eth0": {"type": "1", "operstate": "up", "speed": "25000", "device/vendor": "0x15b3"},
        "net/eth1": {"type": "1", "operstate": "up", "speed": "-1", "device/vendor": "0x1af4"},
        "net/eth2": {"type": "1", "operstate": "down", "device/vendor": "0x1af4"},
        "net/ib0": {"type": "32", "operstate": "up", "device/vendor": "0x15b3"},
        "net/docker0": {"type": "1", "operstate": "up"},
        "net/lo": {"type": "772"},
    }
    for path, text in ((tmp_path / card / name, text) for card, files in cards.items() for name, text in files.items()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert find_nics(tmp_path) == (
        Nic("InfiniBand", 25e9),
        Nic("RoCE", 12.5e9),
        Nic("Ethernet", 3.125e9),
        Nic("Ethernet", None),
    )
    assert find_nics(tmp_path / "nowhere") == ()


def test_wrong_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "a launcher has already started the ranks" in failure("probe", "--nproc", "2")
