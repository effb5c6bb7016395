"""Notices that a worker's machine will be taken away. Without torch.

A worker asks before each commit whether its machine will leave. If any rank of a node says yes, the whole node leaves.
Ranks may see a notice in different iterations, so what counts is what the commit, which is common to all ranks, says.
An answer never goes back from yes to no.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.util import register_after_fork
from pathlib import Path
from types import FrameType

__all__ = ["FileNotice", "SignalNotice"]


class SignalNotice:
    """The notice is a signal to this process, by default SIGTERM. A second signal has its usual effect.

    Signals within ``same_within_seconds`` count as one: a worker may get SIGTERM directly and from torchrun. Forked
    processes, such as those of a data loader, react as before: who sends it to them wants to end them. But torchrun
    sends it to a worker's whole process group, which those that multiprocessing forks leave therefore.
    """

    def __init__(self, number: int = signal.SIGTERM, same_within_seconds: float = 1.0) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"the thread {threading.current_thread().name!r} cannot receive signals; make SignalNotice in the main "
                "thread, or use FileNotice"
            )
        self._number = number
        self._same_within_seconds = same_within_seconds
        self._process = os.getpid()
        self._first_at: float | None = None
        self._before = signal.signal(number, self._receive)
        register_after_fork(self, lambda _: os.setpgrp())

    def is_given(self) -> bool:
        return self._first_at is not None

    def close(self) -> None:
        signal.signal(self._number, signal.SIG_DFL if self._before is None else self._before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() == self._process:
            if self._first_at is None:
                self._first_at = now
            if now - self._first_at <= self._same_within_seconds:
                return
        self.close()
        os.kill(os.getpid(), number)


class FileNotice:
    """The notice is a file that appears, for example made by a script that asks the cloud's own service.

    Use a path on the machine itself, such as ``/run/colossal-hetero/leave``, not in a folder that machines share.
    Remove the file before the next start.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._is_given = False

    def is_given(self) -> bool:
        self._is_given = self._is_given or self._path.exists()
        return self._is_given
