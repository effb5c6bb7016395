"""The presets of GPUs: all GPUs that the papers and the measurements name, with their memory, speeds and links."""

from __future__ import annotations

import csv

import pytest

from colossal_hetero.planner.cluster.gpu_catalog import GPUS, INSIDE
from tests.support.paths import REPOSITORY

MEASURED = REPOSITORY.parent / "shared" / "data" / "gpu-profiles" / "bandwidth.csv"

SPEEDS = {
    # FLOP per clock and core, CUDA cores, boost clock in GHz: 2 FLOP, and what tensor cores multiply them by.
    **{"V100-16": (16, 5120, 1.53), "GTX-1080": (2, 2560, 1.733), "A100-40": (32, 6912, 1.41), "T4": (16, 2560, 1.59)},
    **{"RTX-5000": (16, 3072, 1.815), "Titan-RTX": (16, 4608, 1.77), "RTX-2080": (8, 4352, 1.635)},
    **{"RTX-3090": (4, 10496, 1.695), "A6000": (8, 10752, 1.8), "A10": (8, 9216, 1.695), "A30": (32, 3584, 1.44)},
    **{"A40": (8, 10752, 1.74), "L4": (8, 7424, 2.04), "L40S": (8, 18176, 2.52), "RTX-3080": (4, 8704, 1.71)},
    **{"RTX-4080": (4, 9728, 2.505), "RTX-4090": (4, 16384, 2.52), "RTX-5090": (4, 21760, 2.407)},
    # By compute unit: a die of an MI250X has 110, an MI300X 304.
    **{"MI250X-die": (1024, 110, 1.7), "MI300X": (2048, 304, 2.1)},
}


def test_speeds_follow_from_cores_and_clocks() -> None:
    flops = {name: kind.flops for name, kind in GPUS.items()}
    computed = {name: each * cores * gigahertz * 1e9 for name, (each, cores, gigahertz) in SPEEDS.items()}
    assert {name: flops[name] for name in SPEEDS} == pytest.approx(computed, rel=0.01)
    assert flops["H800"] == flops["H100"] == flops["H200"] == pytest.approx(flops["GH-96"], rel=0.01)
    others = {"H800", "H100", "H100-PCIe", "H200", "H20", "B200", "GH-96", "A800", "A100-80", "V100-32"}
    assert set(GPUS) == set(INSIDE) == others | set(SPEEDS)
    for name in ("A100-40", "A100-80", "V100-16", "V100-32", "GH-96"):
        assert GPUS[name].memory_bytes == int(name.rpartition("-")[2]) * 10**9


@pytest.mark.skipif(not MEASURED.exists(), reason="needs the measured bandwidths beside the repository")
def test_no_measured_bandwidth_inside_a_node_is_above_the_preset() -> None:
    for row in csv.DictReader(MEASURED.open()):
        if row["where"] == "inside a node" and row["gpus"] == "2" and row["gpu"] != "RTX-3090":
            measured, nominal = float(row["max_bytes_per_second"]), INSIDE[row["gpu"]].bytes_per_second
            assert 0.3 * nominal < measured <= nominal
