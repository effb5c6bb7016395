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

STEPS = 10
LIMIT_SECONDS = 240.0
MARK = "MARK_OF_TEST"


class Agents:
    """``torchrun`` on the nodes ``big-0``, with one worker, and ``small-0``, with one or two."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        options = ["--nnodes", "1:2", "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", folder.name]
        options += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
        script = [str(REPOSITORY / "tests/support/restarted_script.py"), str(folder), str(STEPS)]
        self.agents = {
            node: subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, *more, *script],
                env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLOSSAL_HETERO_NODE": node, MARK: self._mark(node)},
                stderr=(folder / f"errors.{node}").open("w"),
                start_new_session=True,
            )
            for node, more in (
                ("big-0", ["--nproc-per-node", "1", "--rdzv-conf", "last_call_timeout=3,is_host=true"]),
                ("small-0", ["--nproc-per-node", str(workers), "--rdzv-conf", "last_call_timeout=3,is_host=false"]),
            )
        }

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


@pytest.mark.parametrize("loses_node", [False, *([True] if IS_THOROUGH else [])])
def test_training_continues(tmp_path: Path, loses_node: bool) -> None:
    (tmp_path / "kill.small-0").write_text(json.dumps(dict(version=3, phase="sums")))
    with Agents(tmp_path, 1 + loses_node) as job:
        if loses_node:
            job.wait(lambda: any(each[0] and each[-1] >= 6 for each in job.told()))
            job.kill("small-0")
            nodes = ["big-0"]
        else:
            nodes = ["big-0", "small-0"]
        job.wait(lambda: all(job.agents[node].poll() is not None for node in nodes))
        errors = (tmp_path / "errors.big-0").read_text()
        assert {job.agents[node].returncode for node in nodes} == {0}, errors
        starts = {each[0] for each in job.told() if each}
        ends = {each[-1] for each in job.told() if each}
    assert "the state after step 3 is in" in errors
    assert "processes continue after step 3, whose state was in memory" in errors
    assert (len(starts), len(ends)) == ((3, 3) if loses_node else (2, 2))
    assert starts - {0} == ends - {STEPS}  # nothing but the running iteration is done again
    _, expected = undisturbed(STEPS)
    files = list(tmp_path.glob("parameters.*"))
    assert len(files) == len(nodes)
    for name, found in (item for path in files for item in torch.load(path, weights_only=False).items()):
        reference = expected.get(name, expected["transformer.wte.weight"])
        torch.testing.assert_close(torch.from_numpy(found)[: len(reference)], reference, rtol=1e-9, atol=1e-9)
    assert not (tmp_path / "memory" / tmp_path.name / "big-0").exists()
