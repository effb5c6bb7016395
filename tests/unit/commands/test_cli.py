"""The command `colossal-hetero batches`: what it prints and writes, and its errors; and what all commands import."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result

from colossal_hetero.cli.main import batches
from colossal_hetero.cli.plan import plan
from colossal_hetero.planner.batches.allocation import ACCUMULATIONS, METHODS
from colossal_hetero.planner.batches.batch_profile import save_profile
from colossal_hetero.planner.stages.split_methods import METHODS as SPLIT_METHODS
from tests.support import command_line
from tests.support.batch_profiles import device, profile
from tests.support.layer_checkpoints import save_steps
from tests.support.paths import REPOSITORY

EXAMPLE = REPOSITORY / "examples/zero/profiles/a100-80-a100-40.json"
CLUSTER = REPOSITORY / "examples/plans/clusters/a100-v100.toml"
LAYERS = REPOSITORY / "examples/plans/opt-350-a100-v100.json"
FULL_LINKS = [
    {"ranks": (a, b), "protocol": "gloo", "latency_seconds": 1e-4, "bytes_per_second": 1e9}
    for a in range(4)
    for b in range(a)
]


def run(*arguments: object) -> Result:
    return command_line.run("batches", *arguments)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    save_profile(profile(links=[]), path)
    return path


def failure(*arguments: object) -> str:
    return command_line.failure("batches", *arguments)


def test_the_table_shows_the_share_of_each_device_and_the_other_methods() -> None:
    result = run(EXAMPLE, "--global-batch", 1024)
    assert result.exit_code == 0, result.output
    for words in ("0-3", "A100-SXM4-80GB", "busy", "[s]", "[GiB]", "/80.0", "/40.0", "uniform"):
        assert words in result.output
    rows = [line.split()[0] for line in result.output.splitlines() if line.strip()]
    assert [name for name in rows if name in METHODS] == ["exact", "exact", "uniform", "flops", "poplar"]
    assert max(map(len, result.output.splitlines())) <= 140


def test_json_holds_every_rank_and_the_comparison(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "batches.json"
    assert run(path, "--global-batch", 37, "--stage", 1, "--accumulation", "per_rank", "--out", out).exit_code == 0
    content = json.loads(out.read_text())
    assert content["schema"] == 1 and content["measured_stage"] == 0
    assert content["allocation"]["stage"] == 1 and content["allocation"]["accumulation"] == "per_rank"
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1, 2, 3]
    assert sum(rank["samples"] for rank in content["ranks"]) == 37
    for rank in content["ranks"]:
        assert sum(size * count for size, count in rank["runs"]) == rank["samples"]
        total = rank["busy_seconds"] + rank["idle_seconds"] + content["allocation"]["communication_seconds"]
        assert total == pytest.approx(content["allocation"]["wall_seconds"])
    best, *others = (line["wall_seconds"] for line in content["comparison"] if line["accumulation"] == "per_rank")
    assert all(best <= other for other in others)
    assert sorted(tmp_path.iterdir()) == [out, path]


def test_every_method_at_every_stage(path: Path) -> None:
    for stage, method in itertools.product(range(4), METHODS):
        form = "per_rank" if method == "poplar" and stage < 2 else "shared"
        result = run(path, "--global-batch", 3, "--stage", stage, "--method", method, "--accumulation", form)
        assert result.exit_code == 0, result.output
        assert f"stage {stage}" in result.output and f"method {method}" in result.output


def test_without_flops_the_flops_method_is_not_available(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile(kinds=[device(), device("slow", flops=None)], links=[]), path)
    result = run(path, "--global-batch", 8)
    assert result.exit_code == 0
    assert "needs the FLOP/s of every device; the profile has none for slow" in " ".join(result.output.split())
    assert "none for slow" in failure(path, "--global-batch", 8, "--method", "flops")


def test_dropped_ranks_are_listed_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    snail = device("snail", points=[{"batch": 1, "seconds": 50.0}, {"batch": 2, "seconds": 100.0}])
    ranks = [0, 0, 0, 1]
    save_profile(profile(kinds=[device(), snail], ranks=ranks, links=FULL_LINKS, communication_seconds=0.01), path)
    out = tmp_path / "batches.json"
    result = run(path, "--global-batch", 8, "--method", "adapt", "--out", out)
    assert result.exit_code == 0, result.output
    for words in ("dropped", "slowest", "ring over gloo: 0 → ", "without rank 3, gloo"):
        assert words in result.output, result.output
    content = json.loads(out.read_text())
    assert content["adapt"]["dropped"] == [3] and content["ranks"][3]["runs"] == []
    assert "without rank 3" in run(path, "--global-batch", 8).output  # among the compared methods


def test_only_adapt_drops_a_device_without_enough_memory(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    tiny = device("tiny", memory_bytes=2**30, max_batch=0, points=[])
    save_profile(profile(kinds=[device(), tiny], ranks=[0, 0, 0, 1], links=FULL_LINKS), path)
    assert "rank 3 (tiny) cannot hold one sample at stage 0" in failure(path, "--global-batch", 8)
    result = run(path, "--global-batch", 8, "--method", "adapt")
    assert result.exit_code == 0 and "cannot hold one sample" in result.output, result.output


def test_missing_links_are_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile(links=FULL_LINKS[:-1]), path)
    assert "no gloo link between ranks 2 and 3" in failure(path, "--global-batch", 8, "--method", "adapt")
    result = run(path, "--global-batch", 8)
    assert result.exit_code == 0 and "no gloo link" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--global-batch", 0], "0 is not in the range x>=1"),
        (["--global-batch", -3], "-3 is not in the range"),
        (["--global-batch", "many"], "'many' is not a valid integer"),
        ([], "Missing option '--global-batch'"),
        (["--global-batch", 8, "--stage", 7], "7 is not in the range 0<=x<=3"),
        (["--global-batch", 8, "--method", "best"], "'best' is not one of 'exact', 'uniform', 'flops', 'adapt'"),
        (
            ["--global-batch", 8, "--stage", 2, "--accumulation", "per_rank"],
            "use accumulation='shared', or stage 0 or 1",
        ),
        (["--global-batch", 8, "--out", "/nowhere/at/all.json"], "all.json: there is no folder /nowhere/at"),
        (["--global-batch", 8, "--color"], "No such option"),
    ],
)
def test_wrong_options_are_reported_in_one_line(path: Path, arguments: list[object], words: str) -> None:
    assert words in failure(path, *arguments)
    assert "nothing.json: no such file" in failure(path.with_name("nothing.json"), "--global-batch", 8)


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "colossal_hetero", "plan", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("Usage: python -m colossal_hetero plan [OPTIONS] CLUSTER PROFILE")


def test_the_choices_are_those_of_the_planner() -> None:
    """Commands list them themselves, so that they start without importing the planner."""
    choices = {option.name: option.type.choices for option in batches.params if hasattr(option.type, "choices")}
    assert {name: tuple(valid) for name, valid in choices.items()} == {
        "accumulation": ACCUMULATIONS,
        "method": METHODS,
    }
    (splits,) = (option.type.choices for option in plan.params if option.name == "method")
    assert tuple(splits) == SPLIT_METHODS


def test_unneeded_packages_are_not_imported(tmp_path: Path) -> None:
    """One process runs all commands that need no torch."""
    checkpoints, out = tmp_path / "checkpoints", tmp_path / "plan.json"
    save_steps(checkpoints, 10)
    few = ["--global-batch", 32, "--top", 1, "--micro-batch", 4]
    commands = [
        ["checkpoint", "ls", checkpoints],
        ["checkpoint", "verify", checkpoints],
        ["batches", EXAMPLE, "--global-batch", 64],
        ["plan", CLUSTER, LAYERS, *few, "--out", out],
        ["simulate", out],
        ["plan", CLUSTER, LAYERS, *few, "--schedule", "zbv"],
    ]
    code = (
        "import sys\n"
        "from colossal_hetero.cli.main import main\n"
        "import colossal_hetero.elastic.signals, colossal_hetero.elastic.environment\n"
        "early = {'numpy', 'scipy', 'pydantic', 'rich', 'torch', 'colossalai', 'matplotlib'} & set(sys.modules)\n"
        "assert not early, f'{early} are imported too early'\n"
        f"for command in {[[str(each) for each in command] for command in commands]}:\n"
        "    main(command, standalone_mode=False)\n"
        "    found = {'torch', 'colossalai', 'timm', 'matplotlib'} & set(sys.modules)\n"
        "    assert not found, f'{command} imports {found}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
