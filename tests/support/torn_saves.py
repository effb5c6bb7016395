"""Saves that are interrupted: by the end of the process at any operation on files, or at any time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from colossal_hetero.checkpoint.storage import FileOperations
from tests.support.layer_checkpoints import assert_loads, newest_step, one_saver, pieces_of, reader_of, tensors

KILLED = 9


class EndingFiles(FileOperations):
    """Ends the process at an operation, as a power cut would. An operation that writes has written half by then."""

    def __init__(self, last: int | None = None) -> None:
        self.count = 0
        self._last = last

    def __getattribute__(self, name: str) -> Any:
        operation = super().__getattribute__(name)
        return partial(self._reach, operation) if name in OPERATIONS else operation

    def _reach(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        self.count += 1
        if self.count == self._last:
            if operation.__name__ == "write":
                descriptor, data = arguments
                operation(descriptor, data[: len(data) // 2])
            os._exit(KILLED)
        return operation(*arguments)


OPERATIONS = {name for name in vars(FileOperations) if not name.startswith("_")}


def save(root: Path, run: str, *steps: int, files: FileOperations | None = None) -> None:
    """Save these steps into a local and a shared folder, of which each keeps two."""
    with one_saver(root, local=root / "local", shared=root / "shared", keep=2, run=run, files=files) as saver:
        for step in steps:
            saver.save(step, pieces_of(tensors(step)), ready=(True, True))
            saver.wait()


def operations_of_a_save(root: Path) -> int:
    """How many operations on files the save has that :func:`check_killed` interrupts."""
    files = EndingFiles()
    save(root, "first", 10, 20)
    save(root, "second", 30, files=files)
    return files.count


def start_save(root: Path, again: bool, operation: int | None = None) -> int:
    """Save two steps, then start a process that saves step 30 and ends at an operation. Returns its id."""
    save(root, "first", 10, 30 if again else 20)
    child = os.fork()
    if child == 0:
        try:
            save(root, "second", 30, files=EndingFiles(operation))
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def seconds_of_a_save(root: Path) -> float:
    """How long the process lives that saves step 30, if nobody kills it."""
    child = start_save(root, False)
    start = time.perf_counter()
    os.waitpid(child, 0)
    return time.perf_counter() - start


def check_killed(root: Path, *, operation: int | None = None, seconds: float | None = None) -> str:
    """Save steps 10 and 20, then kill a process that saves step 30; check what is whole."""
    again = root.name.endswith("again")
    child = start_save(root, again, operation)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    ended = "killed" if os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == KILLED else "finished"
    assert ended == "killed" or os.WEXITSTATUS(status) == 0, "the save failed"
    before = 30 if again else 20
    for folder in (root / "local", root / "shared"):
        reader = reader_of(folder)
        found = reader.checkpoint.step
        assert found in (before, 30) and (ended == "killed" or found == 30), found
        assert_loads(reader)
        assert not reader.problems, reader.problems
    local = newest_step(root / "local")
    save(root, "third", 40)
    for folder in (root / "local", root / "shared"):
        reader = reader_of(folder)
        assert reader.checkpoint.step == 40
        assert_loads(reader)
        names = sorted(path.name for path in folder.iterdir())
        assert len(names) == 2 and all(name.startswith("step-") for name in names), names
    return f"{local} {ended}"
