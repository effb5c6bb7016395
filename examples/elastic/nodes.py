"""The nodes of an elastic job, all on this machine: the processes of each are started, killed and warned together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from colossal_hetero.common.launch import end_with_parent

STORE = (sys.executable, "-m", "colossal_hetero.cli.main", "store", "--host", "127.0.0.1", "--port", "0")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3")


class Nodes:
    """The store and the nodes. All their processes end with the block, and with this process.

    Args:
        script: the command line of the training script.
        folder: for the nodes' output, in one file for each node.
    """

    def __init__(self, script: Sequence[str], folder: Path) -> None:
        self._script, self._folder = list(script), folder
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._warned: set[str] = set()

    def __enter__(self) -> Nodes:
        self._store = _start(STORE, {}, stdout=subprocess.PIPE)
        assert self._store.stdout is not None
        self._address = self._store.stdout.readline().strip()
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._processes.values(), self._store):
            _kill(process)

    def start(self, node: str) -> None:
        """Start a node as a machine would: with torchrun."""
        job = {"COLOSSAL_HETERO_STORE": self._address, "COLOSSAL_HETERO_NODE": node}
        with self.output(node).open("a") as output:
            command = (*TORCHRUN, *self._script)
            self._processes[node] = _start(command, job, stdout=output, stderr=subprocess.STDOUT)
        self._warned.discard(node)

    def kill(self, node: str) -> None:
        """Kill all processes of a node, as when its power fails."""
        _kill(self._processes.pop(node))

    def warn(self, node: str) -> None:
        """Tell a node that it will be taken away. torchrun passes this on, and ends with 1."""
        self._processes[node].send_signal(signal.SIGTERM)
        self._warned.add(node)

    def failed(self) -> dict[str, int]:
        """Exit status of each node that has ended with an error."""
        ended = {node: process.poll() for node, process in self._processes.items() if node not in self._warned}
        return {node: status for node, status in ended.items() if status}

    def output(self, node: str) -> Path:
        """The file with what a node has printed."""
        return self._folder / f"{node}.txt"


def _start(command: Sequence[str], variables: dict[str, str], **streams: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        command,
        text=True,
        env={"OMP_NUM_THREADS": "1", **os.environ, **variables},
        start_new_session=True,  # Ctrl-C reaches this process only, which ends the others
        preexec_fn=end_with_parent,
        **streams,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and all below it."""
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        for each in (launcher, *launcher.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()
