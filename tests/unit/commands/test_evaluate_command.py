"""``colossal-hetero evaluate``: what it prints and writes; wrong inputs of all commands."""

from __future__ import annotations

import sys
from itertools import product
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
    assert "no such file" in failure("evaluate", "plan.json", CLUSTER, PROFILE)
    assert "how large a micro-batch is" in failure("evaluate", "[A100-40 0-23]", CLUSTER, PROFILE)

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
    wrong = "dp 2 x pp [2 x A100-40 0-23], micro-batch 9 x 2"
    assert f"plan 2 ({wrong})" in failure("evaluate", BEST, wrong, *arguments)
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


FILES = (CLUSTER, PROFILE)
LAYOUT = "dp 4 x pp [A100-40 0-23], micro-batch 1 x 32"


def test_layouts() -> None:
    for line, reason in (
        ("", "no such file; a layout on one line names its pipelines in brackets"),
        ("plan.txt", "plan.txt: no such file; a layout on one line names"),
        ("n" * 5000, "no such file"),
        ("dp 4 x pp [999999999 x A100-40 0-999999998], micro-batch 1 x 1", "cannot be divided equally"),
        ("dp 4 x pp [60000 x A100-40 0-59999], micro-batch 1 x 1", "4 pipelines of 60,000 stages are too many"),
        ("dp 70000 x pp [A100-40 0-23], micro-batch 1 x 1", "70,000 pipelines of 1 stage are too many"),
        (f"dp 4 x pp [A100-40 0-{'9' * 5000}]", "column 22: numbers have at most 15 digits"),
        ("dp 4 x pp [A100-40 0-23], micro-batch 1 x 99999999999", "micro_batches is 99999999999: must be at most"),
        ("dp 1 x pp [A100-40 big 0-23], micro-batch 1 x 8", "column 12: the cluster has no A100-40 big"),
        ("dp 1 x pp [A100-40 tp 2 0-23], micro-batch 1 x 8", "column 20: all stages have one degree"),
    ):
        output = run("evaluate", line, CLUSTER, PROFILE).output
        assert reason in output and "pydantic" not in output and "Traceback" not in output


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


def test_numbers_are_finite_and_not_too_large(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(CLUSTER.read_text().replace("devices = [", "dollars_per_hour = 2.5\ndevices = ["))
    rent, plan = ((command, prices, PROFILE, "--global-batch", 32) for command in ("rent", "plan"))
    for arguments, options in (
        (rent, ("--budget", "--deadline", "--time-limit")),
        (plan, ("--time-limit", "--gap", "--memory-reserve")),
    ):
        for option, number in product(options, ("nan", "inf")):
            assert "is not a finite number" in failure(*arguments, option, number), option
    assert "--memory-reserve" in failure("evaluate", LAYOUT, *FILES, "--memory-reserve", "1e300")
    assert "is not in the range 1<=x<=1000000000000000" in failure(*rent, "--samples", "9" * 400)
    assert "1000000001 is above 1,000,000,000" in failure(*rent, "--micro-batch", "1,1000000001")
    line = "dp 4 x pp [A100-40 0-23], micro-batch 1"
    assert "is not in the range 1<=x<=1000000000" in failure("evaluate", line, *FILES, "--global-batch", 10**20)
    # Choices may be written as the help shows them.
    few = ("--schedule", "1F1B", "--top", 1, "--micro-batch", 4)
    assert run("plan", CLUSTER, PROFILE, "--global-batch", 32, *few).exit_code == 0
    # The output is checked before the input is read.
    out = tmp_path / "none" / "plan.json"
    assert "cannot write" in failure("evaluate", LAYOUT, tmp_path / "none", PROFILE, "--out", out)
