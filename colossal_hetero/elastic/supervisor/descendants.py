"""Let no process outlive the one that is responsible for it. Linux only.

A process that *adopts orphans* becomes the parent of all processes below it whose parent ends, also of those that have
left their process group or session. So when it kills its children until it has none, all processes below it are gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator

__all__ = ["adopt_orphans", "check_platform", "end_with_parent", "kill_descendants"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

KILL_SECONDS = 10.0
"""How long to wait for killed processes. A process that waits for a broken disk cannot end before that."""


def check_platform() -> None:
    """Check that this is Linux.

    Raises:
        ValueError: it is another system.
    """
    if sys.platform != "linux":
        raise ValueError(f"workers cannot be supervised on {sys.platform!r}, only on 'linux'")


def adopt_orphans() -> None:
    """From now on this process is the parent of all processes below it whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """From now on this process receives the signal ``number`` when ``parent``, which has forked it, ends.

    It stays so when the process executes another program, but processes that it forks do not inherit it.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has ended before
        os.kill(os.getpid(), number)


def kill_descendants() -> bool:
    """Kill all processes below this one, which has called :func:`adopt_orphans`; whether none is left."""
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)  # a child that has ended exists until its status is read
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def _children() -> Iterator[int]:
    """Process ids of this process's children."""
    me = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
            if parent == me:
                yield int(name)
