"""``colossal-hetero evaluate`` and ``estimate``: what they print and write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cost.plan import load_plan, save_plan
from colossal_hetero.planner.profile.layer_profile import load_profile
from tests.support.command_line import failure, run
from tests.support.paths import REPOSITORY
from tests.support.planning import make_plans

CLUSTER = REPOSITORY / "examples/plans/clusters/a100-v100.toml"
PROFILE = REPOSITORY / "examples/plans/opt-350-a100-v100.json"
BEST = "tp 1, dp 4 x pp [V100-16 0-4 | V100-16 5-8 | A100-40 9-23], micro-batch 1 x 32"
OTHER = "dp 2 x pp [2 x A100-40 0-23], micro-batch 2 x 32"
LARGE = "dp 4 x pp [V100-16 0-23], micro-batch 4 x 8"


def test_a_layout_is_priced_as_the_plan(tmp_path: Path) -> None:
    plan = make_plans(load_cluster(CLUSTER), load_profile(PROFILE), global_batch=128, keep=1)[0].plan
    out, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    result = run("evaluate", BEST, CLUSTER, PROFILE, "--out", out, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert f"predicted: an iteration of {plan.iteration_seconds:.3f} s" in result.output
    assert "by event simulation: 4.784 s; the prediction above is +0.0% of it" in result.output
    assert "memory: every stage fits; the fullest, on V100-16, needs 10.6 of 14.9 GiB (71%)" in result.output
    assert "price: unknown" in result.output and picture.stat().st_size > 1000
    written = load_plan(out)
    assert (written.cluster, written.profile, written.method) == (CLUSTER.name, PROFILE.name, "given")
    assert written.iteration_seconds == pytest.approx(plan.iteration_seconds, rel=1e-9)
    again = run("evaluate", out, CLUSTER, PROFILE)
    assert again.output == result.output


def test_a_plan_of_other_machines_gets_other_devices_and_batches_from_flags(tmp_path: Path) -> None:
    plan = make_plans(load_cluster(CLUSTER), load_profile(PROFILE), global_batch=128, keep=1)[0].plan
    path, changed = tmp_path / "plan.json", tmp_path / "cluster.toml"
    save_plan(plan, path)
    first, *nodes = CLUSTER.read_text().split("[[clusters.nodes]]")
    changed.write_text("[[clusters.nodes]]".join([first, *reversed([each.rstrip() + "\n\n" for each in nodes])]))
    result = run("evaluate", path, changed, PROFILE)
    assert result.exit_code == 0, result.output
    assert f"predicted: an iteration of {plan.iteration_seconds:.3f} s" in result.output
    assert "the devices were chosen again" in result.output
    changed.write_text(CLUSTER.read_text().replace("devices = [", "dollars_per_hour = 2.5\ndevices = ["))
    result = run("evaluate", "dp 4 x pp [A100-40 0-23], micro-batch 2", changed, PROFILE, "--global-batch", 64)
    assert result.exit_code == 0, result.output
    assert "as 4 replicas × 8 micro-batches of 2" in result.output and "price: 2.50 $ an hour" in result.output


def test_errors_show_the_line_and_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    line = BEST.replace("9-23", "12-23")
    result = run("evaluate", line, CLUSTER, PROFILE)
    assert result.exit_code == 2
    assert result.output.endswith(
        f"Error: column 46: blocks 9 to 11 are in no stage; this one must start at 9\n  {line}\n  {' ' * 45}^\n"
    )

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'colossal-hetero[plot]'" in failure("evaluate", BEST, CLUSTER, PROFILE, "--plot", "plan.png")


def test_plans_beside_each_other() -> None:
    arguments = (CLUSTER, PROFILE)
    result = run("evaluate", BEST, OTHER, LARGE, *arguments)
    assert result.exit_code == 0, result.output
    words, both = " ".join(result.output.split()), "4 × A100-40 + 8 × V100-16"
    for part in ("4.78", "too little", both, "slower than 1", "replicas: 4 replicas → 2 replicas"):
        assert part in words, part
    assert max(map(len, result.output.splitlines())) <= 140


FILES = (CLUSTER, PROFILE)
LAYOUT = "dp 4 x pp [A100-40 0-23], micro-batch 1 x 32"


def test_files_with_odd_names(tmp_path: Path) -> None:
    """With brackets, or two of the same name."""
    path = tmp_path / "run[1].json"
    assert run("evaluate", LAYOUT, *FILES, "--out", path).exit_code == 0
    assert run("evaluate", path, *FILES).exit_code == 0
    paths = [tmp_path / name / "plan.json" for name in ("a", "b")]
    for path, batches in zip(paths, (32, 16), strict=True):
        path.parent.mkdir()
        assert run("evaluate", LAYOUT.replace("32", str(batches)), *FILES, "--out", path).exit_code == 0
    other = paths[0].rename(tmp_path / "other.json")
    assert "other: 99.4 % slower than plan" in run("evaluate", other, paths[1], *FILES).output
    other.rename(paths[0])
    assert "1: 99.4 % slower than 2" in run("evaluate", *paths, *FILES).output
    output = run("evaluate", LAYOUT, LAYOUT, *FILES).output
    assert "2: as fast as 1\n  the same layout on other devices, or the same plan" in output


# Estimates ----------------------------------------------------------------------------------------------------

GPT = ["--layers", "4", "--hidden", "64", "--heads", "4", "--vocabulary", "100", "--sequence", "32"]


def test_an_estimate_is_written_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "estimate.json"
    arguments = [*GPT, "--device", "A100-40", "--device", "T4", "--tp", "1,2", "--micro-batch", "2,8"]
    result = run("estimate", *arguments, "--out", out)
    assert result.exit_code == 0, result.output
    written = load_profile(out)
    assert written.devices == ("A100-40", "T4") and written.blocks == 4
    assert written.tensor_parallel_degrees("T4") == (1, 2) and written.micro_batches("T4", 2) == (2, 8)
    table = result.output
    assert table.count(" A100-40 ") == 4 and table.count(" T4 ") == 4
    assert f"{out}: layers of gpt-4x64, estimated from FLOP at 0.4" in table.replace("\n", "")


def test_an_estimate_of_any_device(tmp_path: Path) -> None:
    """Devices with their own speed, those of a cluster file, and a share of the speed for each kind."""
    out, cluster = tmp_path / "estimate.json", tmp_path / "cluster.toml"
    devices = ["--device", "W7900=122,48", "--device", "odd=61", "--device", "RTX-4090"]
    result = run("estimate", *GPT, *devices, "--efficiency", "odd=0.8", "--out", out)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "[kinds.W7900] memory_gb = 48, tflops = 122" in shown and "[kinds.odd] memory_gb = …, tflops = 61" in shown
    assert "0.4 (W7900), 0.8 (odd), 0.4 (RTX-4090) of nominal" in shown
    written = load_profile(out)
    known, odd = (written.costs(name, 1, 1).forward_seconds for name in ("W7900", "odd"))
    assert odd == pytest.approx(known)  # half as fast, and twice the share
    cluster.write_text(
        'schema = 1\n[kinds.mine]\nmemory_gb = 24\ntflops = 122\n[[clusters]]\nname = "x"\n[[clusters.nodes]]\n'
        'name = "pc"\ndevices = [{ kind = "mine", count = 2 }, { kind = "H100", count = 1 }]\n'
        'inside = { kind = "PCIe", gigabytes_per_second = 12 }\n'
    )
    result = run("estimate", *GPT, "--cluster", cluster, "--efficiency", "0.4", "--out", out)
    assert result.exit_code == 0, result.output
    written = load_profile(out)
    assert set(written.devices) == {"mine", "H100"}
    assert written.costs("mine", 1, 1).forward_seconds == pytest.approx(known)
