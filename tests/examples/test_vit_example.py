"""The ViT example end to end: what it trains, what it writes, and how it ends when a rank does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.harness import run_ranks
from tests.support.paths import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "vit"
SMALL = "--hidden 32 --depth 2 --heads 4 --patch 8 --batch-size 32"

SUMMARY_KEYS = {
    *("schema", "args", "world_size", "iterations", "warmup_iterations", "iteration_seconds", "samples_per_second"),
    *("loss", "accuracy", "peak_memory_bytes", "ranks", "bound", "what_if"),
}
RANK_KEYS = {"rank", "work_seconds", "matmul_seconds", "wait_seconds", "resized", "migrated", "received"}
TRACE_RANK_KEYS = RANK_KEYS | {
    *("communication_seconds", "block_seconds", "equal_work_seconds", "equal_matmul_seconds", "slowdown"),
    *("relative_score", "own_score"),
}
TRACE_KEYS = {"iteration", "epoch", "seconds", "loss", "exchanged", "plan_changed", "note", "what_if", "ranks"}


# In processes that the test starts --------------------------------------------------------------------------


def _train(lines: list[str]) -> list[dict[str, Any] | None]:
    from options import parse_options
    from training import train

    return [train(parse_options(f"{SMALL} {line}".split()), quiet=True) for line in lines]


def trained(ranks: int, *lines: str) -> list[dict[str, Any]]:
    """Train once per line on ``ranks`` ranks; the summaries, which rank 0 has."""
    results = run_ranks(ranks, _train, list(lines))
    assert all(summary is None for summaries in results[1:] for summary in summaries)
    return results[0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[dict[str, dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("vit")
    lines = {
        "colossalai": "--plugin colossalai --steps 6",
        "off": f"--steps 6 --summary {folder}/off.json",
        "resize": "--balance resize --straggler 1:8 --resize-ratio 0.5 --lr 5e-3 --steps 50 "
        f"--trace {folder}/trace.jsonl --checkpoint {folder}/saved --plot {folder}/timeline.png "
        f"--chrome-trace {folder}/timeline.json",
        "pipeline": "--pp 2 --steps 6",
    }
    return dict(zip(lines, trained(2, *lines.values()), strict=True)), folder


def test_losses_with_balancing_off_are_those_of_colossal_ai(two_ranks):
    summaries, _ = two_ranks
    assert len(summaries["off"]["loss"]) == 6
    assert summaries["off"]["loss"] == summaries["colossalai"]["loss"]
    assert summaries["off"]["accuracy"] == summaries["colossalai"]["accuracy"]


def test_the_summary_file_holds_what_is_promised(two_ranks):
    summaries, folder = two_ranks
    summary = json.loads((folder / "off.json").read_text())
    assert summary == summaries["off"]
    assert set(summary) == SUMMARY_KEYS
    assert summary["schema"] == 1 and summary["world_size"] == 2 and summary["args"]["hidden"] == 32
    assert summary["iterations"] == 6 and len(summary["accuracy"]) == 1
    assert 0 < summary["iteration_seconds"]["p10"] <= summary["iteration_seconds"]["median"]
    assert len(summary["peak_memory_bytes"]) == 2 and min(summary["peak_memory_bytes"]) > 0
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert all(set(rank) == RANK_KEYS and rank["work_seconds"] > 0 for rank in summary["ranks"])
    assert summary["bound"] is None


def test_colossal_ai_s_plugin_has_no_rank_times(two_ranks):
    summaries, _ = two_ranks
    assert set(summaries["colossalai"]) == SUMMARY_KEYS
    assert all(summaries["colossalai"][name] is None for name in ("ranks", "bound", "what_if"))


def test_a_straggler_is_resized_and_the_model_still_learns(two_ranks):
    summary = two_ranks[0]["resize"]
    assert [rank["resized"] for rank in summary["ranks"]] == [0.0, 0.5]
    assert sum(summary["loss"][-10:]) < sum(summary["loss"][:10])
    assert summary["bound"]["ideal_ratio"] == pytest.approx(2 / (1 + 1 / 8))
    assert summary["bound"]["measured_ratio"] > 0


def test_the_trace_has_a_line_per_iteration(two_ranks):
    summaries, folder = two_ranks
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(50))
    assert [line["loss"] for line in lines] == summaries["resize"]["loss"]
    assert lines[0]["epoch"] == 0 and lines[-1]["epoch"] == 1
    for line in lines:
        assert set(line) == TRACE_KEYS
        unbalanced, homogeneous = (line["what_if"][name] for name in ("unbalanced_seconds", "homogeneous_seconds"))
        assert 0 < homogeneous <= line["what_if"]["bound_seconds"] <= unbalanced
        assert all(set(rank) == TRACE_RANK_KEYS for rank in line["ranks"])
        assert [rank["slowdown"] for rank in line["ranks"]] == [1.0, 8.0]
        assert min(rank["wait_seconds"] for rank in line["ranks"]) == 0
    changes = [line["iteration"] for line in lines if line["plan_changed"]]
    assert changes and all(lines[number]["exchanged"] for number in changes)
    assert lines[changes[0]]["ranks"][1]["resized"] == 0 < lines[changes[0] + 1]["ranks"][1]["resized"]


def test_the_timelines_show_the_run_before_and_after_balancing(two_ranks):
    folder = two_ranks[1]
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [title.split(" (")[0] for title in titles] == ["before balancing", "after"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"matmul", "other", "communication", "waiting"}


def test_the_checkpoint_is_the_whole_model(two_ranks):
    import torch
    from model import build_model
    from options import parse_options

    weights = torch.load(two_ranks[1] / "saved" / "model.pt", weights_only=True)
    build_model(parse_options(SMALL.split()), classes=10).load_state_dict(weights)


def test_every_division_of_the_ranks_computes_the_same(two_ranks):
    reference = two_ranks[0]["off"]
    lines = ("--pp 2 --tp 2 --steps 6", "--tp 2 --steps 6")
    for summary in (two_ranks[0]["pipeline"], *trained(4, *lines)):
        assert summary["loss"] == pytest.approx(reference["loss"], rel=1e-3)
        assert summary["accuracy"] == pytest.approx(reference["accuracy"], abs=0.02)
        assert len(summary["ranks"]) == summary["world_size"]


# As a user starts it ----------------------------------------------------------------------------------------


class Run:
    """The example as a process of its own, its output read line by line."""

    def __init__(self, *arguments: str, script: Path = EXAMPLE / "train.py") -> None:
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *SMALL.split(), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def wait_for(self, text: str, timeout_seconds: float = 120) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not any(text in line for line in list(self.lines)):
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.05)

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == str(number):
                    return child
        raise AssertionError(f"no rank {number}")

    def end(self, timeout_seconds: float) -> tuple[int, str]:
        """The exit status and the last line."""
        status = self.process.wait(timeout_seconds)
        self._reader.join(timeout_seconds)
        return status, self.lines[-1].strip() if self.lines else ""


@pytest.fixture
def start() -> Iterator[Any]:
    runs: list[Run] = []

    def start_run(*arguments: str, **options: Any) -> Run:
        runs.append(Run(*arguments, **options))
        return runs[-1]

    yield start_run
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(30)


def test_it_starts_its_ranks_and_says_what_came_of_it(start, tmp_path):
    run = start(
        "--steps", "3", "--balance", "resize", "--straggler", "1:2", "--summary", str(tmp_path / "summary.json")
    )
    status, last = run.end(120)
    text = "".join(run.lines)
    assert status == 0, text
    assert last == f"Summary: {tmp_path / 'summary.json'}"
    assert json.loads((tmp_path / "summary.json").read_text())["iterations"] == 3
    assert "An iteration took" in text and "Unbalanced it would" in text and "Accuracy on held-out images" in text
    assert "arning" not in text and "INFO" not in text


def test_what_cannot_work_ends_before_ranks_start(start):
    run = start("--tp", "3", "--nproc", "3")
    assert run.end(60)[0] == 2
    assert len(run.lines) == 1 and run.lines[0].startswith("train.py: error: --tp 3 does not divide the 4 heads")


def test_a_rank_that_is_killed_ends_the_run_with_its_reason(start):
    run = start("--epochs", "10000")
    run.wait_for("epoch ")
    ranks = [run.rank(0), run.rank(1)]
    ranks[1].send_signal(signal.SIGKILL)
    status, last = run.end(20)
    assert status == 1
    assert "rank 1 was ended by SIGKILL" in last
    assert not any(rank.is_running() for rank in ranks)


def test_an_error_on_one_rank_ends_the_run_with_its_reason(start, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(EXAMPLE)!r})\nimport train\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import training\n"
        "    def fail(self, batch):\n"
        "        raise ArithmeticError('no sums today')\n"
        "    training.Trainer._iterate = fail\n"
        "sys.exit(train.main())\n"
    )
    run = start("--epochs", "10000", script=script)
    status, last = run.end(120)
    assert status == 1
    assert "rank 1 failed: ArithmeticError: no sums today" in last
    assert sum("Traceback" in line for line in run.lines) == 1


def test_an_interrupt_ends_the_run_quietly(start):
    run = start("--epochs", "10000")
    run.wait_for("epoch ")
    ranks = [run.rank(0), run.rank(1)]
    run.process.send_signal(signal.SIGINT)
    status, last = run.end(20)
    assert (status, last) == (130, "Interrupted.")
    assert not any("Traceback" in line for line in run.lines)
    assert not any(rank.is_running() for rank in ranks)
