"""Links between ranks, taken from a cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from colossal_hetero.planner.batches.batch_profile import load_profile, save_profile
from colossal_hetero.planner.batches.comparison import compare
from colossal_hetero.planner.batches.ring_order import with_cluster_links
from colossal_hetero.planner.cluster.cluster_file import parse_cluster
from tests.support.command_line import failure, run
from tests.unit.planner.batches.test_batch_profile import device, profile

GPU, CPU = ("nccl", "gloo"), ("gloo",)

CLUSTER = """
schema = 1

[kinds.host]
memory_gb = 100
tflops = 1

[[clusters]]
name = "here"

[[clusters.nodes]]
name = "new"
devices = [{ kind = "A100-40", count = 2 }]
inside = { kind = "NVLink", gigabytes_per_second = 300, latency_microseconds = 5 }
nics = [
    { kind = "InfiniBand", gigabytes_per_second = 20, latency_microseconds = 2 },
    { kind = "Ethernet", gigabytes_per_second = 3, latency_microseconds = 30 },
]

[[clusters.nodes]]
name = "old"
devices = [{ kind = "V100-16", count = 1 }]
nics = [
    { kind = "InfiniBand", gigabytes_per_second = 10, latency_microseconds = 2 },
    { kind = "Ethernet", gigabytes_per_second = 1, latency_microseconds = 30 },
]

[[clusters.nodes]]
name = "cpu"
devices = [{ kind = "host", count = 1 }]
inside = { kind = "local", gigabytes_per_second = 9 }
nics = [{ kind = "Ethernet", gigabytes_per_second = 2, latency_microseconds = 30 }]
"""


def four_devices(**changes: object):
    kinds = [device("A100", protocols=GPU), device("V100", protocols=GPU), device("cpu", protocols=CPU)]
    return profile(**{"kinds": kinds, "ranks": [0, 0, 1, 2], "links": (), **changes})


def test_each_pair_has_a_link_in_each_common_protocol() -> None:
    links = with_cluster_links(four_devices(), parse_cluster(CLUSTER)).links
    found = {(*link.ranks, link.protocol): (link.bytes_per_second, link.latency_seconds) for link in links}
    ethernet = pytest.approx(30e-6)
    assert found == {
        (0, 1, "nccl"): (3e11, pytest.approx(5e-6)),
        (0, 1, "gloo"): (3e11, pytest.approx(5e-6)),
        (0, 2, "nccl"): (1e10, pytest.approx(2e-6)),
        (1, 2, "nccl"): (1e10, pytest.approx(2e-6)),
        (0, 2, "gloo"): (1e9, ethernet),
        (1, 2, "gloo"): (1e9, ethernet),
        (0, 3, "gloo"): (2e9, ethernet),
        (1, 3, "gloo"): (2e9, ethernet),
        (2, 3, "gloo"): (1e9, ethernet),
    }


def test_a_bandwidth_that_depends_on_the_message_is_that_of_the_gradients() -> None:
    text = CLUSTER.replace("gigabytes_per_second = 10,", "gigabytes_per_second = 10, curve = [0.0, 0.5, 1.0],")
    topology = parse_cluster(text)
    found = with_cluster_links(four_devices(), topology)
    message = found.model.gradient_bytes / 4
    (link,) = (each for each in found.links if each.ranks == (0, 2) and each.protocol == "nccl")
    assert link.bytes_per_second == topology.channel(0, 2).bandwidth(message) != 1e10


def test_other_devices_than_those_of_the_profile_are_refused() -> None:
    topology = parse_cluster(CLUSTER)
    with pytest.raises(ValueError, match="the cluster has 4 devices, the profile 2 ranks"):
        with_cluster_links(four_devices(ranks=[0, 1]), topology)
    with pytest.raises(
        ValueError, match=r"ranks 0 and 1 are of the same kind in the cluster \(A100-40\), but A100 and"
    ):
        with_cluster_links(four_devices(ranks=[0, 1, 0, 2]), topology)
    with pytest.raises(ValueError, match="has measured links already"):
        with_cluster_links(profile(), topology)


def test_the_command_drops_devices_by_the_links_of_a_cluster_file(tmp_path: Path) -> None:
    """A CPU that makes all use slow Ethernet is dropped; the same profile with these links gives the same."""
    batches, cluster, out = tmp_path / "profile.json", tmp_path / "cluster.toml", tmp_path / "out.json"
    fast = [{"batch": 1, "seconds": 10.0}, {"batch": 4, "seconds": 25.0}]
    slow = [{"batch": 1, "seconds": 900.0}, {"batch": 4, "seconds": 3600.0}]
    kinds = [
        *(device(name, protocols=GPU, points=fast) for name in ("A100", "V100")),
        device("cpu", protocols=CPU, points=slow),
    ]
    save_profile(four_devices(kinds=kinds, communication_seconds=0.0), batches)
    cluster.write_text(CLUSTER)
    result = run("batches", batches, "--global-batch", 16, "--method", "adapt", "--cluster", cluster, "--out", out)
    assert result.exit_code == 0, result.output
    expected = compare(with_cluster_links(load_profile(batches), parse_cluster(CLUSTER)), 16, method="adapt").adapt
    assert expected is not None and expected.dropped == (3,) and expected.protocol == "nccl"
    assert "dropped" in result.output and '"dropped": [3]' in out.read_text()
    assert "no such file" in failure("batches", batches, "--global-batch", 16, "--cluster", tmp_path / "none.toml")
