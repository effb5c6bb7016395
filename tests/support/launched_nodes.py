"""Start ``colossal-hetero launch`` as a user does, and look at all processes that belong to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support.paths import REPOSITORY

MARK = "MARK_OF_TEST"
LIMIT_SECONDS = 60.0


class LaunchedNode:
    """``colossal-hetero launch`` with ``options``, running ``script`` in ``folder``, with ``folder`` as its argument.

    Leaving the ``with`` block kills everything that is left.
    """

    def __init__(self, folder: Path, script: str, store: str, *options: object) -> None:
        self.folder = folder
        path = folder / "script.py"
        path.write_text(script)
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        command = [sys.executable, "-m", "colossal_hetero.cli.main", "launch", "--store", store, *map(str, options)]
        self.process = subprocess.Popen(
            [*command, path.stem if "--module" in options else str(path), str(folder)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), MARK: self._mark.partition("=")[2]},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> LaunchedNode:
        return self

    def __exit__(self, *error: object) -> None:
        while processes := self.processes():
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.process.poll()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def processes(self) -> list[int]:
        """Ids of all running processes that have inherited the environment of this node."""
        return processes_with(self._mark)

    def supervising_process(self) -> int:
        """The process id of the parent of the workers."""
        (worker, *_) = self.starts(0)
        return int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])

    def starts(self, local_rank: int) -> list[int]:
        """Process ids of a worker, the oldest first; workers write them to files ``started.RANK``."""
        path = self.folder / f"started.{local_rank}"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error, after the end."""
        output, errors = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, output.decode(), errors.decode()


def processes_with(variable: str) -> list[int]:
    """Ids of all running processes whose environment has ``NAME=VALUE``."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Wait for a state of other processes.

    Raises:
        TimeoutError: it does not come.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {LIMIT_SECONDS} s until {what}")
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
