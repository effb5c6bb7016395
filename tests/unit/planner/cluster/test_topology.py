"""Channels of nodes and the networks of groups: by hand, and as measured; the presets of GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.cluster_file import parse_cluster
from colossal_hetero.planner.cluster.gpu_catalog import GPUS, INSIDE
from colossal_hetero.planner.cluster.group_networks import Adapter, Network, group_network, process_environment
from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from tests.support.machines import Nodes, machines

HYBRID = """
schema = 1
[[clusters]]
name = "a"
[[clusters.nodes]]
name = "fast"
count = 2
devices = [{ kind = "A100-80", count = 4 }]
nics = [{ kind = "InfiniBand", gigabits_per_second = 200 }, { kind = "Ethernet", gigabits_per_second = 25 }]
[[clusters.nodes]]
name = "slower"
devices = [{ kind = "T4", count = 4 }]
nics = [{ kind = "InfiniBand", gigabits_per_second = 100 }, { kind = "Ethernet", gigabits_per_second = 40 }]
[[clusters.nodes]]
name = "plain"
devices = [{ kind = "T4", count = 1 }]
nics = [{ kind = "Ethernet", gigabits_per_second = 10 }]
[[clusters]]
name = "b"
[[clusters.nodes]]
name = "b"
count = 2
devices = [{ kind = "V100-16", count = 2 }]
nics = [{ kind = "InfiniBand", gigabits_per_second = 200 }, { kind = "Ethernet", gigabits_per_second = 25 }]
[[clusters]]
name = "c"
[[clusters.nodes]]
name = "c"
devices = [{ kind = "V100-16", count = 2 }]
[[links]]
clusters = ["c", "a"]
kind = "Ethernet"
gigabits_per_second = 1
latency_microseconds = 100
[[links]]
clusters = ["b", "c"]
kind = "Ethernet"
gigabits_per_second = 2
"""


@pytest.fixture(scope="module")
def hybrid() -> Topology:
    return parse_cluster(HYBRID)


def test_the_time_of_a_message_is_latency_plus_bytes_over_bandwidth() -> None:
    channel = Channel("Ethernet", 2e9, 1e-4)
    assert channel.seconds(4e9) == pytest.approx(2.0001)
    assert channel.seconds(1) == pytest.approx(1e-4, rel=1e-3) and channel.seconds(0) == 0
    for arguments in (("x", 0.0), ("x", -1.0), ("x", float("nan"))):
        with pytest.raises(ValueError, match="it must be"):
            Channel(*arguments)
    with pytest.raises(ValueError, match="no bandwidth"):
        Channel("x", 1e9, 0.0, (0.0, 0.0, -1.0))


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
def test_no_message_takes_longer_than_a_larger_one(
    curve: tuple[float, float, float], most: float, messages: list[float]
) -> None:
    channel = Channel("x", most, 1e-6, curve)
    seconds = [channel.seconds(message) for message in messages]
    # The fastest message is searched in steps of 1/16 octave, so a small error remains.
    assert all(a <= b * 1.01 for a, b in itertools.pairwise(seconds))
    assert all(0 < channel.bandwidth(message) <= most * (1 + 1e-9) for message in messages)


def way(topology: Topology, a: str, b: str) -> tuple[str, float]:
    numbers = {node.name: number for number, node in enumerate(topology.nodes)}
    channel = topology.node_channel(numbers[a], numbers[b])
    assert channel == topology.node_channel(numbers[b], numbers[a])
    return channel.kind, channel.bytes_per_second * 8 / 1e9


def test_the_channel_between_nodes(hybrid: Topology) -> None:
    assert way(hybrid, "fast-0", "fast-0") == ("NVLink", 2400)
    assert way(hybrid, "fast-0", "fast-1") == ("InfiniBand", 200)
    assert way(hybrid, "fast-0", "slower") == ("InfiniBand", 100)
    assert way(hybrid, "slower", "plain") == ("Ethernet", 10)
    # InfiniBand does not reach another cluster.
    assert way(hybrid, "fast-0", "b-0") == ("Ethernet", 25)
    assert way(hybrid, "fast-0", "c") == ("Ethernet", 1)
    assert way(hybrid, "b-1", "c") == ("Ethernet", 2)
    without = Topology(hybrid.devices, hybrid.nodes, hybrid.clusters, hybrid.between[:1])
    with pytest.raises(ValueError, match=r"node b-1 of cluster b .* and node c of cluster c \(no NIC\)"):
        without.channel(15, 17)


def test_equal_topologies_have_equal_hashes_and_can_be_pickled(hybrid: Topology) -> None:
    other = parse_cluster(HYBRID)
    hybrid.channel(0, 18)
    assert other == hybrid and hash(other) == hash(hybrid)
    assert pickle.loads(pickle.dumps(hybrid)) == hybrid


HOLMES = machines(Nodes("InfiniBand", [2, 2]), Nodes("RoCE", [2, 2]), Nodes("Ethernet", [2, 2]))


@pytest.mark.parametrize(
    ("group", "network"),
    [
        ((0,), Network("nccl", "")),
        ((0, 1), Network("nccl", "NVLink")),
        ((0, 2), Network("nccl", "InfiniBand", "IB")),
        ((4, 5, 6, 7), Network("nccl", "RoCE", "IB")),
        ((8, 10), Network("nccl", "Ethernet", "Socket")),
        # InfiniBand and RoCE cannot communicate with each other, although NCCL calls both IB.
        ((0, 4), Network("nccl", "Ethernet", "Socket")),
        ((0, 1, 2, 8), Network("nccl", "Ethernet", "Socket")),
    ],
)
def test_networks_of_gpus(group: tuple[int, ...], network: Network) -> None:
    assert group_network(HOLMES, group) == network


def test_a_group_with_a_cpu_uses_gloo() -> None:
    devices = list(HOLMES.devices)
    devices[2] = dataclasses.replace(devices[2], kind=DeviceKind("cpu-2", 1 << 30, 1e11))
    topology = dataclasses.replace(HOLMES, devices=tuple(devices))
    assert group_network(topology, (0, 2)) == Network("gloo", "InfiniBand")
    assert group_network(topology, (2, 4)) == Network("gloo", "Ethernet")
    assert group_network(topology, (2, 3)) == Network("gloo", "NVLink")
    assert group_network(topology, (0, 3)).backend == "nccl"
    with pytest.raises(ValueError, match="needs a device"):
        group_network(HOLMES, ())
    with pytest.raises(ValueError, match="device 12"):
        group_network(HOLMES, (0, 12))


def test_environment_of_a_group_and_of_a_process() -> None:
    adapters = {"Ethernet": Adapter(interface="eth0"), "InfiniBand": Adapter(hca="=mlx5_0:1", interface="ib0")}
    assert Network("nccl", "InfiniBand", "IB").environment(adapters) == {"NCCL_NET": "IB"}
    assert Network("nccl", "Ethernet", "Socket").environment() == {"NCCL_NET": "Socket"}
    assert Network("nccl", "NVLink").environment(adapters) == {}
    assert Network("gloo", "InfiniBand").environment(adapters) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert Network("gloo", "Ethernet").environment(adapters) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert Network("gloo", "RoCE").environment(adapters) == Network("gloo", "Ethernet").environment() == {}
    assert process_environment(adapters) == {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_SOCKET_IFNAME": "=eth0"}
    roce = {"RoCE": Adapter(hca="mlx5_2", gid_index=3)}
    assert process_environment(roce) == {"NCCL_IB_HCA": "mlx5_2", "NCCL_IB_GID_INDEX": "3"}
    assert process_environment({"Ethernet": Adapter()}) == {}


SPEEDS = {
    # FLOP per clock and core, CUDA cores, boost clock in GHz: 2 FLOP, and what tensor cores multiply them by.
    **{"V100-16": (16, 5120, 1.53), "GTX-1080": (2, 2560, 1.733), "A100-40": (32, 6912, 1.41), "T4": (16, 2560, 1.59)},
    **{"RTX-2080": (8, 4352, 1.635), "RTX-3090": (4, 10496, 1.695), "A40": (8, 10752, 1.74), "L4": (8, 7424, 2.04)},
    # By compute unit: an MI300X has 304.
    **{"MI300X": (2048, 304, 2.1)},
}


def test_speeds_follow_from_cores_and_clocks() -> None:
    flops = {name: kind.flops for name, kind in GPUS.items()}
    computed = {name: each * cores * gigahertz * 1e9 for name, (each, cores, gigahertz) in SPEEDS.items()}
    assert {name: flops[name] for name in SPEEDS} == pytest.approx(computed, rel=0.01)
    assert flops["H800"] == flops["H100"] == flops["H200"] == pytest.approx(flops["GH-96"], rel=0.01)
    assert set(GPUS) == set(INSIDE) > set(SPEEDS)
    for name in ("A100-40", "A100-80", "V100-16", "V100-32", "GH-96"):
        assert GPUS[name].memory_bytes == int(name.rpartition("-")[2]) * 10**9
