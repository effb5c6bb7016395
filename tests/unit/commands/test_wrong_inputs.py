"""Inputs that cannot be right: commands say on one line which value is wrong, and nothing is written."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.support.command_line import failure, run
from tests.support.paths import REPOSITORY

CLUSTER = REPOSITORY / "examples/plans/clusters/a100-v100.toml"
PROFILE = REPOSITORY / "examples/plans/opt-350-a100-v100.json"
FILES = (CLUSTER, PROFILE)
LAYOUT = "dp 4 x pp [A100-40 0-23], micro-batch 1 x 32"


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prices") / "prices.toml"
    path.write_text(CLUSTER.read_text().replace("devices = [", "dollars_per_hour = 2.5\ndevices = ["))
    return path


@pytest.mark.parametrize(
    ("line", "reason"),
    [
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
    ],
)
def test_layouts(line: str, reason: str) -> None:
    output = run("evaluate", line, CLUSTER, PROFILE).output
    assert reason in output and "pydantic" not in output and "Traceback" not in output


def test_a_file_may_have_a_bracket_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run[1].json"
    assert run("evaluate", LAYOUT, CLUSTER, PROFILE, "--out", path).exit_code == 0
    assert run("evaluate", path, CLUSTER, PROFILE).exit_code == 0


def test_files_with_one_name_in_several_folders_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name / "plan.json" for name in ("a", "b")]
    for path, batches in zip(paths, (32, 16), strict=True):
        path.parent.mkdir()
        assert run("evaluate", LAYOUT.replace("32", str(batches)), CLUSTER, PROFILE, "--out", path).exit_code == 0
    other = tmp_path / "other.json"
    paths[0].rename(other)
    assert "other: 99.4 % slower than plan" in run("evaluate", other, paths[1], *FILES).output
    other.rename(paths[0])
    assert "1: 99.4 % slower than 2" in run("evaluate", *paths, *FILES).output


def test_equal_plans_are_equally_fast() -> None:
    output = run("evaluate", LAYOUT, LAYOUT, *FILES).output
    assert "2: as fast as 1\n  the same layout on other devices, or the same plan" in output


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("rent", ("--budget", "--deadline", "--time-limit")),
        ("plan", ("--time-limit", "--gap", "--memory-reserve")),
    ],
)
def test_numbers_are_finite(prices: Path, command: str, options: tuple[str, ...]) -> None:
    for option, number in product(options, ("nan", "inf")):
        words = failure(command, prices, PROFILE, "--global-batch", 32, option, number)
        assert "is not a finite number" in words, option
    assert "--memory-reserve" in failure("evaluate", LAYOUT, *FILES, "--memory-reserve", "1e300")


def test_numbers_that_are_too_large(prices: Path) -> None:
    arguments = ("rent", prices, PROFILE, "--global-batch", 32)
    assert "is above 1,000,000,000,000,000" in failure(*arguments, "--samples", "9" * 400)
    assert "1000000001 is above 1,000,000,000" in failure(*arguments, "--micro-batch", "1,1000000001")
    line = "dp 4 x pp [A100-40 0-23], micro-batch 1"
    assert "is above 1,000,000,000" in failure("evaluate", line, CLUSTER, PROFILE, "--global-batch", 10**20)


def test_choices_may_be_written_as_the_help_shows_them() -> None:
    few = ("--schedule", "1F1B", "--top", 1, "--micro-batch", 4)
    result = run("plan", CLUSTER, PROFILE, "--global-batch", 32, *few)
    assert result.exit_code == 0, result.output


def test_the_output_is_checked_before_the_input_is_read(tmp_path: Path) -> None:
    out = tmp_path / "none" / "plan.json"
    assert "cannot write" in failure("evaluate", LAYOUT, tmp_path / "none", PROFILE, "--out", out)
