"""Under torchrun, with a process for each node's agent: a worker or a whole node is killed, and training continues."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.support.elastic_jobs import undisturbed
from tests.support.launched_nodes import processes_with
from tests.support.paths import REPOSITORY
from tests.support.random_examples import IS_THOROUGH

LIMIT_SECONDS = 240.0
MARK = "MARK_OF_TEST"


class Agents:
    """``torchrun`` on the nodes ``big-0``, where its store is, and ``small-0``."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self._options = ["--nnodes", "1:2", "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", folder.name]
        self._options += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
        self._script = [str(REPOSITORY / "tests/support/restarted_script.py"), str(folder), str(steps)]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str, workers: int) -> None:
        """Start a node."""
        more = ["--rdzv-conf", f"last_call_timeout=3,is_host={str(node == 'big-0').lower()}"]
        more += ["--nproc-per-node", str(workers)]
        self.agents[node] = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *self._options, *more, *self._script],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLOSSAL_HETERO_NODE": node, MARK: self._mark(node)},
            stderr=(self._folder / f"errors.{node}").open("w"),
            start_new_session=True,
        )

    def _mark(self, node: str) -> str:
        return f"{self._folder}/{node}"

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.agents:
            self.kill(node)

    def kill(self, node: str) -> None:
        """End everything on a node, as if it lost power."""
        while processes := processes_with(f"{MARK}={self._mark(node)}"):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.agents[node].poll()

    def told(self) -> list[list[int]]:
        """Of each process, the oldest first: after which step it has begun, and the steps that it has made."""
        found = []
        for path in sorted(self._folder.glob("told.*"), key=lambda path: path.stat().st_mtime_ns):
            messages = [json.loads(line) for line in path.read_text().splitlines()]
            found.append([content[0] for kind, *content in messages if kind in ("started", "step")])
        return found

    def wait(self, is_true: Callable[[], bool]) -> None:
        """Wait until the job is as far as a test wants."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_true():
            assert time.monotonic() < deadline, f"{self.told()} {(self._folder / 'errors.big-0').read_text()[-3000:]}"
            time.sleep(0.05)


def check(folder: Path, job: Agents, nodes: list[str], steps: int, worlds: int) -> str:
    """Wait for the end of these nodes, and check what they have trained; returns what ``big-0`` has printed."""
    job.wait(lambda: all(job.agents[node].poll() is not None for node in nodes))
    errors = (folder / "errors.big-0").read_text()
    assert {job.agents[node].returncode for node in nodes} == {0}, errors
    starts, ends = {each[0] for each in job.told() if each}, {each[-1] for each in job.told() if each}
    assert len(starts) == worlds
    assert starts - {0} == ends - {steps}  # nothing but the running iteration is done again
    _, expected = undisturbed(steps)
    files = list(folder.glob("parameters.*"))
    assert files
    for name, found in (item for path in files for item in torch.load(path, weights_only=False).items()):
        reference = expected.get(name, expected["transformer.wte.weight"])
        torch.testing.assert_close(torch.from_numpy(found)[: len(reference)], reference, rtol=1e-9, atol=1e-9)
    assert not (folder / "memory" / folder.name / "big-0").exists()
    return errors


def test_a_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "kill.small-0").write_text(json.dumps(dict(version=3, phase="sums")))
    with Agents(tmp_path, 10) as job:
        job.start("big-0", 1)
        job.start("small-0", 1)
        errors = check(tmp_path, job, ["big-0", "small-0"], 10, worlds=2)
    assert "the state after step 3 is in" in errors
    assert "training continues after step 3, whose state was in memory; members: 2" in errors


@pytest.mark.skipif(not IS_THOROUGH, reason="takes minutes")
def test_a_node_joins_and_is_lost(tmp_path: Path) -> None:
    """The workers of the node that joins have been started less often than the others."""
    (tmp_path / "kill.big-0").write_text(json.dumps(dict(version=3, phase="sums")))
    with Agents(tmp_path, 600) as job:
        job.start("big-0", 1)
        job.wait(lambda: any(each and each[0] for each in job.told()))
        job.start("small-0", 2)
        job.wait(lambda: sum(len(each) > 10 for each in job.told()) == 4)
        job.kill("small-0")
        errors = check(tmp_path, job, ["big-0"], 600, worlds=4)
    assert "members: 3" in errors
