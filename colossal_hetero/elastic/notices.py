"""How a worker learns that its machine will be taken away. Needs no torch.

A notice answers a question that a worker asks before each commit: will this machine leave? When the answer of any rank
of a node is yes, the whole node leaves. Each rank of the node may ask for itself: ``colossal-hetero launch`` forwards
SIGTERM to all workers of its node, and all of them see the same file. They may see it in different iterations, so what
counts is what the commit, which is common to all ranks, says. An answer never goes back from yes to no.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Protocol

__all__ = ["AnyNotice", "FileNotice", "Notice", "SignalNotice"]


class Notice(Protocol):
    """Says whether this machine will be taken away."""

    def is_given(self) -> bool:
        """True if the notice has been given. Once true, always true. Quick, and does not communicate with ranks."""


class SignalNotice:
    """The notice is a signal to this process, by default SIGTERM. A second signal has its usual effect.

    Some systems send SIGTERM to all processes of a service, and then a worker receives it twice: directly, and from
    ``colossal-hetero launch``. So signals within ``same_within_seconds`` of the first count as the same notice.

    Processes that are forked from this one, such as those of a data loader, react to the signal as before, because
    whoever sends it to them wants to end them.
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

    def is_given(self) -> bool:
        """True if this process has received the signal."""
        return self._first_at is not None

    def close(self) -> None:
        """From now on the signal has the effect that it had before."""
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
    """The notice is a file that appears: the hook for notices of a cloud.

    A small script on the machine asks the cloud's own service and makes the file. Use a path on the machine itself,
    such as ``/run/colossal-hetero/leave``, and not in a folder that other machines share. Remove the file before the
    next start on the same machine.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._is_given = False

    def is_given(self) -> bool:
        """True if the file exists, or existed when somebody asked before."""
        self._is_given = self._is_given or self._path.exists()
        return self._is_given


class AnyNotice:
    """The notice is given when any of several is."""

    def __init__(self, *notices: Notice) -> None:
        self._notices = notices

    def is_given(self) -> bool:
        """True if at least one of the notices is given."""
        return any(notice.is_given() for notice in self._notices)
