"""Under torchrun: workers, whole nodes, torchrun itself and the store are killed, and training continues."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command_line import failure
from tests.support.elastic_jobs import check_parameters
from tests.support.forked_python import ForkedPopen
from tests.support.paths import REPOSITORY
from tests.support.random_examples import IS_THOROUGH

WARNED = """
import multiprocessing, os, sys, time
from pathlib import Path
from colossal_hetero.elastic.signals import SignalNotice

folder, place = Path(sys.argv[1]), ".".join(os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "LOCAL_RANK"))

def note(what, process):
    (folder / f"{what}.{place}").write_text(str(process.pid))

if __name__ == "__main__":
    notice = SignalNotice()
    loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), daemon=True)
    loader.start()
    while os.getpgid(loader.pid) != loader.pid:
        time.sleep(0.01)
    note("started", loader)
    while not notice.is_given():
        time.sleep(0.01)
        if (folder / f"fail.{place}").exists():
            sys.exit(7)
    time.sleep(0.3)
    if loader.is_alive():
        note("left", loader)
"""
"""Writes what a worker sees of the signals that torchrun sends."""


def check_folder(folder: Path, steps: int) -> None:
    check_parameters((torch.load(path, weights_only=False) for path in folder.glob("parameters.*")), steps)


LIMIT_SECONDS = 60.0
STORE = (sys.executable, "-m", "colossal_hetero.cli.main", "store", "--host", "127.0.0.1", "--port")
TRAINING = REPOSITORY / "tests/support/torchrun_script.py"


class TorchrunNodes:
    """Nodes on this machine, each with a torchrun of its own. What they run writes into ``folder``."""

    def __init__(self, folder: Path, with_new_interpreters: bool = IS_THOROUGH) -> None:
        self.folder = folder
        self._popen: Any = (
            partial(subprocess.Popen, text=True, start_new_session=True) if with_new_interpreters else ForkedPopen
        )
        self.agents: dict[str, Any] = {}  # the process of each node's torchrun, and of a ``store``

    def start(self, node: str, *command: object, variables: Mapping[str, str] | None = None) -> None:
        """Start a node: with what follows ``torchrun``, and more environment variables."""
        self._start(node, [sys.executable, "-m", "torch.distributed.run", *map(str, command)], variables or {})

    def start_store(self) -> dict[str, str]:
        store = self._start("store", [*STORE, "0"], {})
        assert store.stdout is not None
        return {"COLOSSAL_HETERO_STORE": store.stdout.readline().strip()}

    def _start(self, node: str, command: list[str], variables: Mapping[str, str]) -> Any:
        own = {"PYTHONPATH": str(REPOSITORY), "COLOSSAL_HETERO_NODE": node}
        with self._errors(node).open("a") as errors:
            stdout = subprocess.PIPE if node == "store" else None
            environment = os.environ | own | dict(variables)
            self.agents[node] = self._popen(command, env=environment, stdout=stdout, stderr=errors)
        return self.agents[node]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for node, agent in self.agents.items():
            self.kill(node)
            if agent.stdout is not None:
                agent.stdout.close()

    def kill(self, node: str) -> None:
        """End everything on a node, as if it lost power."""
        while processes := self.processes(node):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.agents[node].poll()
        self.agents[node].wait()

    def processes(self, node: str) -> list[int]:
        """Ids of all running processes that write errors of a node."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (path / "fd/2").readlink() == self._errors(node):
                    found.append(int(path.name))
        return found

    def _errors(self, node: str) -> Path:
        return self.folder.resolve() / f"errors.{node}"

    def errors(self, node: str) -> str:
        return self._errors(node).read_text()

    def told(self, node: str = "*") -> list[list[int]]:
        """Of each process, the oldest first: after which step it has begun, and the steps that it has made."""
        found = []
        for path in sorted(self.folder.glob(f"told.{node}.*"), key=lambda path: path.stat().st_ctime_ns):
            messages = [json.loads(line) for line in path.read_text().splitlines()]
            found.append([content[0] for kind, *content in messages if kind in ("started", "step")])
        return found

    def end(self, node: str) -> int:
        self.wait(lambda: self.agents[node].poll() is not None)
        return self.agents[node].returncode

    def wait(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_true():
            assert time.monotonic() < deadline, f"{self.told()} {[self.errors(node)[-3000:] for node in self.agents]}"
            time.sleep(0.05)


def test_a_worker_and_a_torchrun_are_killed_while_another_node_goes_on(tmp_path: Path) -> None:
    steps = 12
    (tmp_path / "kill.small-0").write_text(json.dumps(dict(version=3, phase="sums")))
    with TorchrunNodes(tmp_path) as job:
        store = job.start_store()
        for node, workers in (("big-0", 1), ("small-0", 2)):
            options = ("--standalone", "--nproc-per-node", workers, "--max-restarts", 1)
            job.start(node, *options, TRAINING, tmp_path, steps, variables=store)
        job.wait(lambda: sum(9 in each for each in job.told()) == 3)
        torchrun = job.agents["small-0"]
        assert len(job.processes("small-0")) == 3
        torchrun.kill()
        job.wait(lambda: not job.processes("small-0"))
        assert job.end("big-0") == 0
        assert job.told("big-0") == [list(range(steps + 1))]
        *killed_and_warned, third, fourth = job.told("small-0")
        assert killed_and_warned[0] == [0, 1, 2, 3] and killed_and_warned[1][:5] == [0, 1, 2, 3, 4]
        assert third[0] >= 6 and fourth[0] >= 6, "torchrun has started both workers again"
        errors = job.errors("big-0")
        assert "3 members became 2 after step 3" in errors and "2 members became 1 after step" in errors
        assert "3 members became 1 after step 9" in errors
    check_folder(tmp_path, steps)


def test_a_torchrun_is_killed_while_its_worker_starts_and_then_a_store(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with TorchrunNodes(tmp_path) as job:
        store = job.start_store()
        job.start("big-0", "--standalone", TRAINING, tmp_path, 10**6, variables=store | {"MEMBERS": "1"})
        job.wait(lambda: not (tmp_path / "wait").exists())
        job.agents["big-0"].kill()
        job.wait(lambda: not job.processes("big-0"))
        assert "the torchrun of this process has ended before it joined its job" in job.errors("big-0")
        assert not job.told()
        two = ("--standalone", "--nproc-per-node", 2, TRAINING, tmp_path, 10**6)
        job.start("small-0", *two, variables=store | {"MEMBERS": "2"})
        job.wait(lambda: sum(2 in each for each in job.told()) == 2)
        job.agents["store"].kill()
        assert job.end("small-0") == 1
        assert not job.processes("small-0")
        assert "StoreLostError: the store at 127.0.0.1:" in job.errors("small-0")


def test_a_warned_worker_ends_by_itself_and_keeps_its_loader(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WARNED)
    with TorchrunNodes(tmp_path, with_new_interpreters=True) as job:
        job.start("a", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, tmp_path / "script.py", tmp_path)
        job.wait(lambda: len(list(tmp_path.glob("started.0.*"))) == 2)
        (tmp_path / "fail.0.1").touch()
        job.wait(lambda: len(list(tmp_path.glob("started.1.*"))) == 2)
        assert [path.name for path in tmp_path.glob("left.*")] == ["left.0.0"]
        job.agents["a"].send_signal(signal.SIGTERM)
        assert job.end("a") == 1
        assert sorted(path.name for path in tmp_path.glob("left.*")) == ["left.0.0", "left.1.0", "left.1.1"]
        assert not job.processes("a")


def test_the_store_runs_until_a_signal_comes(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with TorchrunNodes(tmp_path) as job:
            host, port = job.start_store()["COLOSSAL_HETERO_STORE"].split(":")
            socket.create_connection((host, int(port))).close()
            options = ("store", "--host", host, "--port", port)
            assert f"no store can listen on {host}:{port}: Address already in use" in failure(*options)
            os.kill(job.agents["store"].pid, number)
            assert job.end("store") == 0
    assert "port 65536 does not exist; valid are 1 to 65535" in failure("store", "--port", 65536)


class Restarted(TorchrunNodes):
    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder)
        self._steps = steps
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]

    def join(self, node: str, workers: int) -> None:
        options = ["--nnodes", "1:2", "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", self.folder.name]
        options += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--nproc-per-node", str(workers)]
        options += ["--rdzv-conf", f"last_call_timeout=3,is_host={str(node == 'big-0').lower()}"]
        self.start(node, *options, TRAINING, self.folder, self._steps)

    def check(self, nodes: list[str], worlds: int) -> str:
        """Wait for the end of these nodes, and check what they have trained; returns what ``big-0`` has printed."""
        assert {self.end(node) for node in nodes} == {0}, self.errors("big-0")
        starts, ends = {each[0] for each in self.told() if each}, {each[-1] for each in self.told() if each}
        assert len(starts) == worlds
        assert starts - {0} == ends - {self._steps}  # nothing but the running iteration is done again
        check_folder(self.folder, self._steps)
        assert not (self.folder / "memory" / self.folder.name / "big-0").exists()
        return self.errors("big-0")


def test_a_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "kill.small-0").write_text(json.dumps(dict(version=3, phase="sums")))
    with Restarted(tmp_path, 10) as job:
        job.join("big-0", 1)
        job.join("small-0", 1)
        errors = job.check(["big-0", "small-0"], worlds=2)
    assert "the state after step 3 is in" in errors
    assert "training continues after step 3, whose state was in memory; members: 2" in errors


@pytest.mark.skipif(not IS_THOROUGH, reason="takes minutes")
def test_a_node_joins_and_is_lost(tmp_path: Path) -> None:
    """The workers of the node that joins have been started less often than the others."""
    (tmp_path / "kill.big-0").write_text(json.dumps(dict(version=3, phase="sums")))
    with Restarted(tmp_path, 600) as job:
        job.join("big-0", 1)
        job.wait(lambda: any(each and each[0] for each in job.told()))
        job.join("small-0", 2)
        job.wait(lambda: sum(len(each) > 10 for each in job.told()) == 4)
        job.kill("small-0")
        errors = job.check(["big-0"], worlds=4)
    assert "members: 3" in errors
