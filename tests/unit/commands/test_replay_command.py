"""The command ``colossal-hetero replay``: what it prints, which files it writes, and its error messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from colossal_hetero.planner.profile.layer_profile import LayerSizes, save_model_profile
from tests.support.command_line import failure, run
from tests.unit.commands.test_plan_command import CLUSTER, LAYERS, profile

TRACE = "seconds,gpus\n0,4\n60,3\n120,1\n180,4\n400,4\n"


@pytest.fixture
def arguments(tmp_path: Path) -> list[object]:
    """A call with a trace, a cluster of two A100 and two V100, and a profile."""
    trace, cluster, layers = tmp_path / "trace.csv", tmp_path / "cluster.toml", tmp_path / "profile.json"
    trace.write_text(TRACE)
    cluster.write_text(CLUSTER)
    save_model_profile(profile(), layers)
    return ["replay", trace, "--cluster", cluster, "--profile", layers, "--global-batch", 16]


def test_table_file_and_picture(arguments: list[object], tmp_path: Path) -> None:
    out, picture = tmp_path / "replay.json", tmp_path / "replay.png"
    result = run(*arguments, "--out", out, "--plot", picture, "--seed", 3)
    assert result.exit_code == 0, result.output
    for words in ("this package", "restart from a folder", "waiting for 4 devices", "repeated", "of ideal"):
        assert words in result.output
    assert max(map(len, result.output.splitlines())) <= 140
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(out.read_text())
    assert content["schema"] == 1 and content["seconds"] == 400 and content["seed"] == 3
    elastic, restart, _ = content["ways"]
    assert f"goodput of this package / restart from a folder: {elastic['samples'] / restart['samples']:.2f}" in (
        result.output
    )
    assert elastic["samples"] == 16 * elastic["iterations"] and f"{elastic['samples']:,}" in result.output
    assert elastic["share_of_ideal"] <= 1 and elastic["spans"][-1]["stop"] == 400
    assert [len(each["devices"]) for each in content["availability"]] == [4, 3, 1, 4]


def test_options_change_what_they_say(arguments: list[object], tmp_path: Path) -> None:
    def ways(*options: object) -> list[dict[str, float]]:
        out = tmp_path / "replay.json"
        assert run(*arguments, "--out", out, *options).exit_code == 0
        return list(json.loads(out.read_text())["ways"])

    elastic, restart, waiting = ways()
    assert ways("--imports", 0)[1]["recovering_seconds"] < restart["recovering_seconds"]
    assert ways("--dead-wait", 10)[0]["recovering_seconds"] == pytest.approx(elastic["recovering_seconds"] + 16)
    assert ways("--save-every", 1)[1]["repeated_iterations"] < restart["repeated_iterations"]
    assert ways("--folder-bandwidth", 0.001)[1]["recovering_seconds"] > restart["recovering_seconds"] + 20
    assert ways("--bandwidth", 0.001)[0]["recovering_seconds"] > elastic["recovering_seconds"] + 5
    assert ways("--wait-for", 1)[2]["waiting_seconds"] == 0 < waiting["waiting_seconds"]


def test_a_model_that_needs_several_devices_waits(arguments: list[object], tmp_path: Path) -> None:
    # 8 layers of 4 × 0.8 GB of state: 25.6 GB, which no V100 with 16 GB holds alone.
    sizes = LayerSizes(
        parameter_bytes=(8 * 10**8,) * LAYERS, activation_bytes=(10**6,) * LAYERS, output_bytes=(10**4,) * LAYERS
    )
    save_model_profile(profile(sizes=(sizes,)), str(arguments[5]))
    Path(str(arguments[1])).write_text("seconds,gpus,devices\n0,3,new old/0\n100,1,old/0\n200,3,new old/0\n400,0,\n")
    out = tmp_path / "replay.json"
    assert run(*arguments, "--out", out).exit_code == 0
    elastic, restart, waiting = json.loads(out.read_text())["ways"]
    assert elastic["waiting_seconds"] == 138 and restart["waiting_seconds"] == waiting["waiting_seconds"] == 100


def test_torch_is_not_imported(arguments: list[object]) -> None:
    code = (
        "import sys\n"
        "from colossal_hetero.cli import main\n"
        f"main({[str(each) for each in arguments]!r}, standalone_mode=False)\n"
        "print([name for name in ('torch', 'colossalai', 'matplotlib') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--save-every", 0], "0 is not in the range x>=1"),
        (["--folder-bandwidth", 0], "0.0 is not in the range x>0"),
        (["--imports", "nan"], "nan is not a finite number"),
        (["--wait-for", 5], "--wait-for 5: the cluster has 4 devices"),
        (["--global-batch", 7, "--micro-batch", 2], "global_batch=7 is not divisible by micro_batch=2"),
        (["--plot", "replay.doc"], "end the name in .png, .pdf, .svg"),
        (["--out", "/nowhere/at/all.json"], "all.json: there is no folder /nowhere/at"),
    ],
)
def test_wrong_options_are_reported_in_one_line(arguments: list[object], options: list[object], words: str) -> None:
    assert words in failure(*arguments, *options)


def test_wrong_files_are_reported_in_one_line(arguments: list[object], tmp_path: Path) -> None:
    trace = Path(str(arguments[1]))
    trace.write_text(TRACE.replace("60,3", "60,5"))
    assert "line 3 of the trace has 5 gpus, but the cluster has 4 devices" in failure(*arguments)
    trace.write_text(TRACE.replace("60,3", "60,three"))
    assert "trace.csv, line 3: gpus is 'three': must be a whole number" in failure(*arguments)
    trace.unlink()
    assert "no such file" in failure(*arguments)
