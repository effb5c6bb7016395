"""The presets of GPUs: all GPUs that the papers and the measurements name, with their memory, speeds and links."""

from __future__ import annotations

import csv

import pytest

from colossal_hetero.planner.cluster.gpu_catalog import GPUS, INSIDE
from tests.support.paths import REPOSITORY

MEASURED = REPOSITORY.parent / "shared" / "data" / "gpu-profiles" / "bandwidth.csv"

NAMED = {
    *("A100-40", "A100-80", "A800", "H800", "H20", "V100-16", "V100-32", "T4", "RTX-3090", "GTX-1080", "A6000"),
    *("RTX-5000", "GH-96", "RTX-2080", "Titan-RTX"),
    # What people have besides.
    *("H100", "H100-PCIe", "H200", "B200", "A10", "A30", "A40", "L4", "L40S", "RTX-3080", "RTX-4080", "RTX-4090"),
    *("RTX-5090", "MI250X-die", "MI300X"),
}


def test_all_named_gpus_have_presets() -> None:
    assert set(GPUS) == set(INSIDE) == NAMED
    assert all(name == kind.name for name, kind in GPUS.items())


@pytest.mark.parametrize("name", ["A100-40", "A100-80", "V100-16", "V100-32", "GH-96"])
def test_memory_is_what_the_name_says(name: str) -> None:
    assert GPUS[name].memory_bytes == int(name.rpartition("-")[2]) * 10**9


def test_speeds_follow_from_cores_and_clocks() -> None:
    flops = {name: kind.flops for name, kind in GPUS.items()}
    # 2 FLOP × CUDA cores × boost clock; tensor cores multiply this, on Volta by 8.
    assert flops["V100-16"] == pytest.approx(8 * 2 * 5120 * 1.53e9, rel=0.01)
    assert flops["GTX-1080"] == pytest.approx(2 * 2560 * 1.733e9, rel=0.01)
    assert flops["A100-40"] == pytest.approx(16 * 2 * 6912 * 1.41e9, rel=0.01)
    assert flops["T4"] == pytest.approx(8 * 2 * 2560 * 1.59e9, rel=0.01)
    assert flops["RTX-5000"] == pytest.approx(8 * 2 * 3072 * 1.815e9, rel=0.01)
    assert flops["Titan-RTX"] == pytest.approx(8 * 2 * 4608 * 1.77e9, rel=0.01)
    assert flops["RTX-2080"] == pytest.approx(4 * 2 * 4352 * 1.635e9, rel=0.01)
    assert flops["RTX-3090"] == pytest.approx(2 * 2 * 10496 * 1.695e9, rel=0.01)
    assert flops["A6000"] == pytest.approx(4 * 2 * 10752 * 1.8e9, rel=0.01)
    assert flops["H800"] == pytest.approx(flops["GH-96"], rel=0.01)
    assert flops["H800"] == flops["H100"] == flops["H200"]
    assert flops["A10"] == pytest.approx(4 * 2 * 9216 * 1.695e9, rel=0.01)
    assert flops["A30"] == pytest.approx(16 * 2 * 3584 * 1.44e9, rel=0.01)
    assert flops["A40"] == pytest.approx(4 * 2 * 10752 * 1.74e9, rel=0.01)
    assert flops["L4"] == pytest.approx(4 * 2 * 7424 * 2.04e9, rel=0.01)
    assert flops["L40S"] == pytest.approx(4 * 2 * 18176 * 2.52e9, rel=0.01)
    assert flops["RTX-3080"] == pytest.approx(2 * 2 * 8704 * 1.71e9, rel=0.01)
    assert flops["RTX-4080"] == pytest.approx(2 * 2 * 9728 * 2.505e9, rel=0.01)
    assert flops["RTX-4090"] == pytest.approx(2 * 2 * 16384 * 2.52e9, rel=0.01)
    assert flops["RTX-5090"] == pytest.approx(2 * 2 * 21760 * 2.407e9, rel=0.01)
    # A die of an MI250X has 110 compute units, an MI300X 304, with 1,024 and 2,048 operations per clock.
    assert flops["MI250X-die"] == pytest.approx(1024 * 110 * 1.7e9, rel=0.01)
    assert flops["MI300X"] == pytest.approx(2048 * 304 * 2.1e9, rel=0.01)


@pytest.mark.skipif(not MEASURED.exists(), reason="needs the measured bandwidths beside the repository")
def test_no_measured_bandwidth_inside_a_node_is_above_the_preset() -> None:
    for row in csv.DictReader(MEASURED.open()):
        if row["where"] == "inside a node" and row["gpus"] == "2" and row["gpu"] != "RTX-3090":
            measured, nominal = float(row["max_bytes_per_second"]), INSIDE[row["gpu"]].bytes_per_second
            assert 0.3 * nominal < measured <= nominal
