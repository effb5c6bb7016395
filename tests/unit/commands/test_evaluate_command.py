"""The command ``colossal-hetero evaluate``, of one plan and of several: what it prints and writes, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cost.evaluate import differences, time_parts
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


def test_a_plan_of_other_machines_gets_other_devices(tmp_path: Path) -> None:
    topology = load_cluster(CLUSTER)
    plan = make_plans(topology, load_profile(PROFILE), global_batch=128, keep=1)[0].plan
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    reversed_file = tmp_path / "cluster.toml"
    first, *nodes = CLUSTER.read_text().split("[[clusters.nodes]]")
    reversed_file.write_text("[[clusters.nodes]]".join([first, *reversed([each.rstrip() + "\n\n" for each in nodes])]))
    result = run("evaluate", path, reversed_file, PROFILE)
    assert result.exit_code == 0, result.output
    assert f"predicted: an iteration of {plan.iteration_seconds:.3f} s" in result.output
    assert "the devices were chosen again" in result.output


def test_prices_and_batches_from_flags(tmp_path: Path) -> None:
    priced = tmp_path / "prices.toml"
    priced.write_text(CLUSTER.read_text().replace("devices = [", "dollars_per_hour = 2.5\ndevices = ["))
    result = run("evaluate", "dp 4 x pp [A100-40 0-23], micro-batch 2", priced, PROFILE, "--global-batch", 64)
    assert result.exit_code == 0, result.output
    assert "as 4 replicas × 8 micro-batches of 2" in result.output and "price: 2.50 $ an hour" in result.output


def test_errors_show_the_line_and_the_place() -> None:
    line = BEST.replace("9-23", "12-23")
    result = run("evaluate", line, CLUSTER, PROFILE)
    assert result.exit_code == 2
    assert result.output.endswith(
        f"Error: column 46: blocks 9 to 11 are in no stage; this one must start at 9\n  {line}\n  {' ' * 45}^\n"
    )
    assert "no such file" in failure("evaluate", "plan.json", CLUSTER, PROFILE)
    assert "how large a micro-batch is" in failure("evaluate", "[A100-40 0-23]", CLUSTER, PROFILE)


def test_without_matplotlib_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'colossal-hetero[plot]'" in failure("evaluate", BEST, CLUSTER, PROFILE, "--plot", "plan.png")


def test_plans_beside_each_other() -> None:
    arguments = (CLUSTER, PROFILE)
    result = run("evaluate", BEST, OTHER, LARGE, *arguments)
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    for part in (
        "4.78",
        "too little",
        "4 × A100-40 + 8 × V100-16",
        "slower than 1",
        "replicas: 4 replicas → 2 replicas",
    ):
        assert part in words, part
    assert max(map(len, result.output.splitlines())) <= 140
    assert "plan 2 (dp 2 x pp [2 x A100-40 0-23], micro-batch 9 x 2)" in failure(
        "evaluate", BEST, "dp 2 x pp [2 x A100-40 0-23], micro-batch 9 x 2", *arguments
    )
    for option, name in (("--out", "p.json"), ("--plot", "p.png")):
        words = failure("evaluate", BEST, OTHER, *arguments, option, name)
        assert f"{option} is for one plan, but 2 were given" in words


def test_differences_name_what_differs(tmp_path: Path) -> None:
    paths = tmp_path / "one.json", tmp_path / "other.json"
    for line, path in zip((BEST, OTHER), paths, strict=True):
        assert run("evaluate", line, CLUSTER, PROFILE, "--out", path).exit_code == 0
    one, other = map(load_plan, paths)
    assert differences(one, one) == []
    assert sum(time_parts(one).values()) == pytest.approx(one.iteration_seconds)
    found = dict(each.split(": ", 1) for each in differences(one, other))
    assert found["devices"] == "4 × A100-40 + 8 × V100-16 → 4 × A100-40"
    assert found["samples of a micro-batch"] == "1 → 2"
    assert found["share of the blocks"] == "62% on A100-40, 38% on V100-16 → 100% on A100-40"
    assert not {"schedule", "ZeRO stage", "tensor-parallel degree"} & found.keys()
