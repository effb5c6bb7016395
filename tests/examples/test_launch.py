"""How the examples start their ranks, and how a run ends if a rank ends; the elastic example."""

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.common import launch
from examples.elastic import demo, nodes, reference
from examples.elastic.options import check_options, parse_demo_options
from tests.support.forked_python import ForkedPopen
from tests.support.paths import REPOSITORY

SCRIPT = """
import sys
from examples.common.options import OneLineParser, Options, add_ranks_flag
from examples.common.launch import run_command

def parse():
    parser = OneLineParser("Add.", "")
    add_ranks_flag(parser)
    parser.add_argument("--fail", action="store_true")
    return parser.parse_args(namespace=Options())

if __name__ == "__main__":
    sys.exit(run_command("adding", parse, lambda options, world_size: None))

import torch
import torch.distributed as dist

def main(options):
    dist.init_process_group("gloo")
    number = 0
    while True:
        number += 1
        if options.fail and number == 100 and dist.get_rank() == 1:
            raise ArithmeticError("no sums today")
        dist.all_reduce(torch.ones(1000))
        if number == 50 and dist.get_rank() == 0:
            print("adding", flush=True)
"""


class Run:
    """A command that runs in new processes, or in forked ones. A thread reads its output line by line."""

    def __init__(self, *command: str, forked: bool) -> None:
        popen: Any = ForkedPopen if forked else partial(subprocess.Popen, text=True)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.process = popen([sys.executable, *command], env=environment, **streams)
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
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == str(number):
                    return child
        raise AssertionError(f"rank {number} is not running")

    def end(self, timeout_seconds: float) -> tuple[int, str]:
        status = self.process.wait(timeout_seconds)
        self._reader.join(timeout_seconds)
        return status, self.lines[-1].strip() if self.lines else ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    script = tmp_path / "adding.py"
    script.write_text(SCRIPT)
    runs: list[Run] = []

    def start_run(*arguments: str, forked: bool = True) -> Run:
        runs.append(Run(str(script), *arguments, forked=forked))
        return runs[-1]

    yield start_run
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(30)


def test_if_a_rank_is_killed_or_fails_the_run_ends_and_names_it(start: Callable[..., Run]) -> None:
    run = start(forked=False)
    run.wait_for("adding")
    ranks = [run.rank(0), run.rank(1)]
    ranks[1].send_signal(signal.SIGKILL)
    status, last = run.end(20)
    assert status == 1 and "rank 1 was ended by SIGKILL" in last
    assert not any(rank.is_running() for rank in ranks)
    run = start("--fail")
    status, last = run.end(120)
    assert status == 1 and "rank 1 failed: ArithmeticError: no sums today" in last
    assert sum("Traceback" in line for line in run.lines) == 1


def test_an_interrupt_ends_the_run_without_a_traceback(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_for("adding")
    ranks = psutil.Process(run.process.pid).children()
    assert len(ranks) == 2
    run.process.send_signal(signal.SIGINT)
    assert run.end(20) == (130, "Interrupted.")
    assert not any("Traceback" in line for line in run.lines)
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize(
    ("example", "refused", "says"),
    [
        ("vit", "--tp 3 --nproc 3 --heads 4", "--tp 3 does not divide the 4 heads"),
        ("zero", "--global-batch 2000", "--global-batch 2000 is more than the 1438 training images"),
        ("pipeline", "--depth 0", "--depth 0 must be at least 1"),
        ("language", "--context 1", "--context 1 leaves nothing to predict from"),
    ],
)
def test_every_example_can_be_started_by_its_path(example, refused, says, monkeypatch):
    """An invalid flag gives one line of output. A script tells its ranks to import the script itself."""
    path = REPOSITORY / "examples" / example / "train.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, str(path), *refused.split()], env=environment, cwd="/", capture_output=True, text=True
    )
    assert run.returncode == 2 and not run.stdout
    assert run.stderr.startswith(f"train.py: error: {says}") and run.stderr.count("\n") == 1, run.stderr

    named: list[str] = []
    monkeypatch.setattr(launch, "run_command", lambda module, parse, check: named.append(module) or 0)
    with pytest.raises(SystemExit):
        runpy.run_path(str(path), run_name="__main__")
    assert importlib.util.find_spec(named[0]).origin == str(path)  # type: ignore[attr-defined, union-attr]


LATER = """
import colossal_hetero.layers, logging, sys, warnings
import colossalai.shardformer.policies.mixtral
print('imported', file=sys.stderr)
warnings.warn('Please install apex from source, says a user')
logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load CPU gemm_4bit_forward again')
"""


def test_the_imports_of_the_readme_print_nothing_and_later_warnings_are_shown() -> None:
    """Those of its first Python example; ``tests/unit/test_docs.py`` checks the order of the others."""
    example = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    imports = "\n".join(line for line in example.splitlines() if line.startswith(("from ", "import ")))
    assert "Booster" in imports and "HeteroHybridParallelPlugin" in imports
    done = subprocess.run([sys.executable, "-c", imports + LATER], capture_output=True, text=True, check=True)
    before, after = done.stderr.split("imported\n")
    assert done.stdout + before == ""
    assert "UserWarning: Please install apex from source, says a user" in after
    assert "Failed to load CPU gemm_4bit_forward again" in after


SMALL = "--hidden 16 --depth 2 --heads 2 --patch 16 --global-batch 128 --micro-batch 16 --epochs 6"


def test_rank_0_is_killed(tmp_path, monkeypatch):
    """The job ends with the parameters of training that nothing has happened to."""

    def start_forked(command, variables, **streams) -> ForkedPopen:
        return ForkedPopen(command, os.environ | variables, **streams)

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
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
