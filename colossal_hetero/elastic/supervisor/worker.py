"""One worker process of a node: its command, its environment, its start and its output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ..environment import ElasticEnvironment
from .descendants import end_with_parent
from .output import Passage

__all__ = ["WorkerProcess", "python_command", "worker_environment"]

OF_OTHER_LAUNCHERS = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that name one fixed world. Workers do not inherit them, nor those that begin with ``TORCHELASTIC_``."""


def python_command(script: str, arguments: Sequence[str], is_module: bool = False) -> list[str]:
    """The command of a worker, with output that is not buffered; ``script`` may be the name of a module."""
    return [sys.executable, "-u", *(["-m"] if is_module else []), script, *arguments]


def worker_environment(inherited: Mapping[str, str], place: ElasticEnvironment) -> dict[str, str]:
    """Environment variables of the worker at ``place``; see :mod:`colossal_hetero.elastic.environment`."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in OF_OTHER_LAUNCHERS and not name.startswith("TORCHELASTIC_")
    }
    return {"OMP_NUM_THREADS": "1", **kept, **place.variables()}


class WorkerProcess:
    """A worker that runs, in a process group of its own. It ends with the process that started it.

    ``passages`` are the ways of its standard output and standard error; without the first, it writes to the standard
    output of this process itself. Its standard input is empty.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], passages: tuple[Passage | None, Passage]
    ) -> None:
        parent = os.getpid()

        def prepare() -> None:
            os.setpgid(0, 0)
            end_with_parent(parent)

        # This process has one thread, so a function may run between fork and exec.
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=None if passages[0] is None else subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=prepare,
        )
        self.pid = self._process.pid
        self.errors = passages[1]
        pipes = [(self._process.stdout, passages[0]), (self._process.stderr, passages[1])]
        self._streams = {pipe.fileno(): passage for pipe, passage in pipes if pipe is not None and passage is not None}
        for stream in self._streams:
            os.set_blocking(stream, False)

    @property
    def streams(self) -> tuple[int, ...]:
        """File descriptors of the pipes from the worker."""
        return tuple(self._streams)

    def pass_on(self, stream: int) -> bool:
        """Pass on what can be read from ``stream`` now; false when nobody can write to it any more."""
        try:
            piece = os.read(stream, 1 << 16)
        except BlockingIOError:
            return True
        self._streams[stream].pass_on(piece)
        return piece != b""

    def send(self, number: int) -> None:
        """Send a signal to the worker itself, not to processes that it has started."""
        os.kill(self.pid, number)

    def close(self, status: int) -> None:
        """The worker has ended with ``status``, which somebody else has read, and its group has ended."""
        self._process.returncode = status
        for stream, passage in self._streams.items():
            while (piece := _available(stream)) != b"":
                passage.pass_on(piece)
            passage.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _available(stream: int) -> bytes:
    try:
        return os.read(stream, 1 << 16)
    except BlockingIOError:  # a process that has left the group could still write
        return b""
