"""Start torchrun as a user does, and look at all processes that belong to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.support.paths import REPOSITORY

MARK = "MARK_OF_TEST"
LIMIT_SECONDS = 180.0
STORE = (sys.executable, "-m", "colossal_hetero.cli.main", "store", "--host", "127.0.0.1", "--port")
TRAINING = REPOSITORY / "tests/support/torchrun_script.py"


class TorchrunNodes:
    """Nodes on this machine, each with a torchrun of its own. What they run writes into ``folder``.

    Leaving the ``with`` block kills everything that is left.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        """The process of each node's torchrun, and of a ``store``."""

    def start(self, node: str, *command: object, variables: Mapping[str, str] | None = None) -> None:
        """Start a node: with what follows ``torchrun``, and more environment variables."""
        self._start(node, [sys.executable, "-m", "torch.distributed.run", *map(str, command)], variables or {})

    def start_store(self) -> dict[str, str]:
        """Start ``colossal-hetero store``; the variables of nodes that use it."""
        store = self._start("store", [*STORE, "0"], {})
        assert store.stdout is not None
        return {"COLOSSAL_HETERO_STORE": store.stdout.readline().decode().strip()}

    def _start(self, node: str, command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        own = {"PYTHONPATH": str(REPOSITORY), "COLOSSAL_HETERO_NODE": node, MARK: self._mark(node)}
        with (self.folder / f"errors.{node}").open("w") as errors:
            self.agents[node] = subprocess.Popen(
                command,
                env=os.environ | own | dict(variables),
                stdout=subprocess.PIPE if node == "store" else None,
                stderr=errors,
                start_new_session=True,
            )
        return self.agents[node]

    def __enter__(self) -> TorchrunNodes:
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

    def processes(self, node: str, variable: str = "") -> list[int]:
        """Ids of all running processes that have inherited the environment of a node, and have a further variable."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (path / "environ").read_text(errors="replace").split("\0")
                if f"{MARK}={self._mark(node)}" in variables and any(each.startswith(variable) for each in variables):
                    found.append(int(path.name))
        return found

    def _mark(self, node: str) -> str:
        return f"{self.folder}/{node}"

    def errors(self, node: str) -> str:
        """What a node has written to standard error."""
        return (self.folder / f"errors.{node}").read_text()

    def told(self, node: str = "*") -> list[list[int]]:
        """Of each process, the oldest first: after which step it has begun, and the steps that it has made."""
        found = []
        for path in sorted(self.folder.glob(f"told.{node}.*"), key=lambda path: path.stat().st_ctime_ns):
            messages = [json.loads(line) for line in path.read_text().splitlines()]
            found.append([content[0] for kind, *content in messages if kind in ("started", "step")])
        return found

    def end(self, node: str) -> int:
        """The exit status of a node, after its end."""
        self.wait(lambda: self.agents[node].poll() is not None)
        return self.agents[node].returncode

    def wait(self, is_true: Callable[[], bool]) -> None:
        """Wait until the job is as far as a test wants."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_true():
            assert time.monotonic() < deadline, f"{self.told()} {[self.errors(node)[-3000:] for node in self.agents]}"
            time.sleep(0.05)
