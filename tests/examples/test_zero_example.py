"""The ZeRO example end to end: what it trains, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from choices import check_choices, parse_choices
from slow_flags import slowdowns
from slowing import repeat_passes
from usage import UsageError

from tests.support.harness import run_ranks
from tests.support.paths import REPOSITORY

SMALL = "--hidden 16 --depth 1 --heads 2 --global-batch 256 --epochs 2"


def _compare(lines: list[str]) -> list[dict[str, Any] | None]:
    from comparison import compare

    return [compare(parse_choices(f"{SMALL} {line}".split()), quiet=True) for line in lines]


def compared(ranks: int, *lines: str) -> list[dict[str, Any]]:
    """Run once per line on ``ranks`` ranks; the summaries, which rank 0 has."""
    results = run_ranks(ranks, _compare, list(lines))
    assert all(summary is None for summaries in results[1:] for summary in summaries)
    return results[0]


def test_both_ways_train_alike_at_every_stage(tmp_path):
    """And the slow rank, which really is, is found by measuring and gets less."""
    file = tmp_path / "summary.json"
    lines = [f"--slow 1:8 --slow-by repeat --stage {stage} --summary {file}" for stage in (0, 1, 2, 3)]
    summaries = compared(2, *lines)
    assert json.loads(file.read_text()) == summaries[-1]
    for stage, summary in enumerate(summaries):
        assert summary["slowed"] == {"ranks": {"1": 8}, "means": "repeat"} and summary["world_size"] == 2
        uniform, exact = summary["trainings"]
        assert (uniform["method"], exact["method"]) == ("uniform", "exact")
        assert uniform["stage"] == exact["stage"] == stage
        assert [rank["samples"] for rank in uniform["ranks"]] == [128, 128]
        shares = [rank["samples"] for rank in exact["ranks"]]
        assert sum(shares) == 256 and shares[0] > 1.5 * shares[1]
        assert len(exact["loss"]) == exact["iterations"] == 2 * (1438 // 256) and len(exact["accuracy"]) == 2
        # Sums in another order: rounding, nothing else.
        assert exact["loss"] == pytest.approx(uniform["loss"], rel=1e-3)
        assert summary["largest_loss_difference"] < 1e-2
        assert exact["accuracy"] == pytest.approx(uniform["accuracy"], abs=0.02)
        assert summary["speedup"] == pytest.approx(
            uniform["iteration_seconds"]["median"] / exact["iteration_seconds"]["median"]
        )


def test_a_profile_is_written_and_used_again(tmp_path):
    path = tmp_path / "profile.json"
    first, second = compared(2, *[f"--method exact --slow none --epochs 1 --profile {path}"] * 2)
    profile = json.loads(path.read_text())
    assert profile["stage"] == 1 and len(profile["ranks"]) == 2
    assert first["speedup"] is None and first["slowed"] is None and len(second["trainings"]) == 1
    assert second["trainings"][0]["boost_seconds"] < first["trainings"][0]["boost_seconds"]
    with pytest.raises(UsageError, match="made with --stage 1, not 2"):
        check_choices(parse_choices(f"--stage 2 --profile {path}".split()), 2)
    with pytest.raises(UsageError, match="is of 2 ranks, not 3"):
        check_choices(parse_choices(f"--profile {path}".split()), 3)


def test_repeated_passes_change_only_the_time():
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    passes = []

    class Counted(torch.autograd.Function):
        """A linear layer's neighbor that notes each pass."""

        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            passes.append("forward")
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            passes.append("backward")
            return gradient

    class Counter(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return Counted.apply(value)

    models[1].append(Counter())
    names = [name for name, _ in models[1].named_parameters()]
    repeat_passes(models[1], 5)
    assert [name for name, _ in models[1].named_parameters()] == names
    inputs = torch.randn(4, 5)
    for model in models:
        for _ in range(2):
            model(inputs).square().mean().backward()
    assert passes.count("forward") == passes.count("backward") == 10
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    passes.clear()
    models[1].eval()
    models[1](inputs)
    with torch.no_grad():
        models[1].train()(inputs)
    assert passes == ["forward"] * 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--slow 2:4", ["--slow 2:4", "no rank 2", "0 to 1"]),
        ("--slow 1:2.5", ["--slow 1:2.5", "whole number", "2.5"]),
        ("--slow 1:0", ["--slow 1:0", "1 or more"]),
        ("--slow 1", ["--slow 1", "RANK:FACTOR"]),
        ("--stage 4", ["--stage", "'4'"]),
        ("--method fastest", ["--method", "fastest"]),
        ("--global-batch 0", ["--global-batch 0", "at least 1"]),
        ("--epochs 0", ["--epochs 0"]),
        ("--lr 0", ["--lr 0"]),
        ("--patch 5", ["--patch 5", "1, 2, 4, 8, 16, 32"]),
        ("--heads 3", ["--heads 3", "--hidden 256"]),
        ("--precision fp16 --stage 3", ["--precision fp16", "--stage 3"]),
        ("--stage auto --profile p.json", ["--profile", "auto"]),
        ("--summary /nowhere/at/all.json", ["--summary /nowhere/at/all.json", "no directory /nowhere/at"]),
        ("--profile /nowhere/at/all.json", ["--profile /nowhere/at/all.json", "no directory /nowhere/at"]),
        (f"--profile {__file__}", ["--profile", "JSON"]),
    ],
)
def test_what_cannot_work_is_said_in_one_line(line, says):
    with pytest.raises(UsageError) as error:
        check_choices(parse_choices(line.split()), 2)
    assert all(text in str(error.value) for text in says), str(error.value)
    assert "\n" not in str(error.value)


def test_one_rank_is_not_slowed_unless_that_is_asked_for():
    assert slowdowns(parse_choices([]).slow, 1) == {}
    assert slowdowns(parse_choices([]).slow, 2) == {1: 4}
    assert slowdowns(parse_choices(["--slow", "0:2,1:1"]).slow, 2) == {0: 2}


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "zero" / "train.py"), *SMALL.split(), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_it_starts_its_ranks_and_compares(tmp_path):
    path = tmp_path / "summary.json"
    done = run_example("--slow", "1:8", "--summary", str(path))
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert done.stdout.splitlines()[-1] == f"Summary: {path}"
    for part in ("rank 1 slowed × 8 by", "An iteration, by rank", "Both ways", "times as fast as equal ones"):
        assert part in text
    assert "arning" not in text and "INFO" not in text, text
    summary = json.loads(path.read_text())
    assert [training["iterations"] for training in summary["trainings"]] == [10, 10]


def test_what_cannot_work_ends_before_ranks_start():
    done = run_example("--global-batch", "2000")
    assert done.returncode == 2
    assert done.stderr.startswith("train.py: error: --global-batch 2000 is more than the 1438 training images")
    assert len(done.stderr.splitlines()) == 1 and not done.stdout
