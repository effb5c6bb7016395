"""The elastic example: a node is killed while it trains, and what is made of the members' traces."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from examples.elastic import demo, nodes, reference
from examples.elastic.loop_trace import Finished, Loss, Step, World
from examples.elastic.options import Action, check_options, parse_demo_options
from examples.elastic.report import Change, History, throughput
from tests.support.forked_python import ForkedPopen
from tests.support.paths import REPOSITORY

SMALL = "--hidden 16 --depth 2 --heads 2 --patch 16 --global-batch 128 --micro-batch 16 --epochs 6"


def test_rank_0_is_killed(tmp_path, monkeypatch):
    """The job ends with the parameters of training that nothing has happened to."""

    def measure_here(options, folder: Path) -> None:  # no further process, which would import everything again
        reference.make_files(options, folder / "cluster.toml", folder / "profile.json")

    def start_forked(command, variables, **streams) -> ForkedPopen:
        return ForkedPopen(command, os.environ | variables, **streams)

    monkeypatch.setattr(demo, "measure", measure_here)
    monkeypatch.setattr(nodes, "_start", start_forked)
    monkeypatch.setattr(reference, "MIN_SECONDS", 0.0)
    monkeypatch.chdir(REPOSITORY)
    files = {name: tmp_path / name for name in ("summary.json", "plot.png")}
    flags = f"{SMALL} --nodes 2 --kill node-0:3 --summary {files['summary.json']} --plot {files['plot.png']}"
    options = parse_demo_options(flags.split())
    check_options(options)
    summary = demo.demonstrate(options, quiet=True)
    assert json.loads(files["summary.json"].read_text()) == summary
    assert files["plot.png"].stat().st_size > 5_000
    assert summary["steps"] == 1438 // 128 * 6
    lost = next(change for change in summary["changes"] if "node-0 killed" in change["why"])
    assert (lost["before"], lost["after"]) == (2, 1) and lost["step"] >= 3
    comparison = summary["comparison"]
    assert comparison["parameter_difference"] < 1e-9
    assert comparison["loss_difference"] < 1e-5 and comparison["losses_compared"] >= summary["steps"] - 1
    assert comparison["accuracy"] == comparison["undisturbed_accuracy"]


def test_all_processes_of_a_node_end_with_it(tmp_path, monkeypatch):
    """The store and torchrun are replaced by processes that start faster."""
    monkeypatch.setattr(nodes, "STORE", (sys.executable, "-c", "import time; print('', flush=True); time.sleep(99)"))
    launcher = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    monkeypatch.setattr(nodes, "TORCHRUN", (sys.executable, "-c", launcher))
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, pathlib, sys, time\npathlib.Path(sys.argv[1], str(os.getpid())).touch()\ntime.sleep(99)"
    )
    pids = tmp_path / "pids"
    pids.mkdir()

    def started(number: int) -> list[int]:
        wait_until(lambda: len(list(pids.iterdir())) >= number)
        return [int(path.name) for path in pids.iterdir()]

    with pytest.raises(KeyboardInterrupt), nodes.Nodes([str(script), str(pids)], tmp_path) as running:
        running.start("node-1")
        (killed,) = started(1)
        running.kill("node-1")
        wait_until(lambda: not psutil.pid_exists(killed))
        running.start("node-2")
        everyone = started(2)
        raise KeyboardInterrupt
    wait_until(lambda: not any(map(psutil.pid_exists, everyone)))


def wait_until(is_true) -> None:
    """Wait for processes, which takes the system a moment."""
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_changes_and_losses_of_a_history():
    """Node a dies in step 3, of which b and c know a part of the loss each, before and after it; then d joins."""
    history = History([Action("kill", "a", 2), Action("join", "d", 2)])
    history.add(World(node, 0, 3, "first plan") for node in "abc")
    for step in (1, 2):
        history.add(Loss(node, step, 0, float(step), 1 / 3) for node in "abc")
        history.add(Step(node, step, 0, 10.0 * step + number) for number, node in enumerate("abc"))
    history.add([Loss("b", 3, 0, 3.0, 1 / 3), Loss("c", 3, 0, 4.0, 1 / 3), Loss("c", 3, 2, 5.0, 1 / 2)])
    history.add([Step("b", 3, 0, 35.0), Step("c", 3, 2, 36.0)])
    for node, repeated in (("b", 1), ("c", 0)):
        history.add([World(node, 2, 2, "second plan", 1.0, 100, repeated, "connection closed")])
    history.add([Loss("b", 4, 2, 1.0, 1 / 2), Loss("c", 4, 2, 2.0, 1 / 2)])
    history.add([Step("b", 4, 2, 45.0), Step("c", 4, 2, 46.0)])
    history.add([Loss("b", 5, 2, 9.0, 1 / 2), Loss("c", 5, 2, 9.0, 1 / 2)])  # of a step that is not made yet
    history.add(World(node, 4, 3, "third plan", 1.0, 7) for node in "bc")
    assert len(history.changes()) == 1  # d has not written yet
    history.add([World("d", 4, 3, "third plan", received_bytes=70), Finished("b")])
    first, second = history.changes()
    assert first == Change(2, 3, 2, "a killed", "second plan", 15.0, 200, 1)
    assert (second.step, second.before, second.after, second.why) == (4, 2, 3, "d joined")
    assert second.received_bytes == 84 and second.plan == "third plan"
    assert history.losses() == pytest.approx({1: 1.0, 2: 2.0, 4: 1.5})
    assert (history.newest_step, history.members, history.finished) == (4, 3, {"b"})
    edges, rates = throughput(history.times(), 30)
    assert edges == [0, 10, 25, 35] and rates == [3, 2, 3]
