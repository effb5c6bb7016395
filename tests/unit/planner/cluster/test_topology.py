"""Channels: the time of a message, and the channel between two devices."""

from __future__ import annotations

import csv
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.cluster_file import parse_cluster
from colossal_hetero.planner.cluster.topology import Channel, Topology
from tests.support.paths import REPOSITORY

MEASURED = REPOSITORY.parent / "shared" / "data" / "gpu-profiles" / "bandwidth.csv"

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


@pytest.mark.skipif(not MEASURED.exists(), reason="needs the measured bandwidths beside the repository")
def test_curves_are_kept_in_the_measured_range() -> None:
    for row in csv.DictReader(MEASURED.open()):
        a, b, c = (float(row[name]) for name in "abc")
        channel = Channel("x", float(row["max_bytes_per_second"]), 0.0, (a, b, c))
        for x in (0, 2, 4, 6):
            fitted = min((a * x * x + b * x + c) * 1e9, channel.bytes_per_second)
            assert channel.bandwidth(2.0**x * 1e6) == pytest.approx(fitted, rel=0.06)


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


def test_no_channel(hybrid: Topology) -> None:
    without = Topology(hybrid.devices, hybrid.nodes, hybrid.clusters, hybrid.between[:1])
    assert without.channel(0, 15) == hybrid.channel(0, 15)
    with pytest.raises(ValueError, match=r"node b-1 of cluster b .* and node c of cluster c \(no NIC\)"):
        without.channel(15, 17)


def test_equal_topologies_have_equal_hashes_and_can_be_pickled(hybrid: Topology) -> None:
    other = parse_cluster(HYBRID)
    hybrid.channel(0, 18)
    assert other == hybrid and hash(other) == hash(hybrid)
    assert pickle.loads(pickle.dumps(hybrid)) == hybrid


def test_channels_are_found_once_per_pair_of_classes() -> None:
    text = HYBRID.replace("count = 2\ndevices", "count = 256\ndevices")
    topology = parse_cluster(text)
    assert len(topology.devices) > 1000
    for a, b in itertools.combinations(range(len(topology.nodes)), 2):
        topology.node_channel(a, b)
    assert len(topology._channels) <= 25  # five classes of nodes
