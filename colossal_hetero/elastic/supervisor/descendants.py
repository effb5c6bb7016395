"""End of all processes below the one that is responsible for them. Linux only.

A process that *adopts orphans* becomes the parent of all processes below it whose parent ends, also of those that have
left their process group or session. So when it ends its children until it has none, all are gone. They are not killed
at once: Python starts some that remove shared memory after the end of their owner, ignore SIGTERM, and need a moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

__all__ = ["adopt_orphans", "check_platform", "end_descendants", "end_group", "end_with_parent"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

CLEAN_UP_SECONDS = 1.0
"""Time between SIGTERM and SIGKILL for processes whose owner has ended."""
LIMIT_SECONDS = 10.0
"""Time to wait for killed processes. One that waits for a broken disk cannot end."""
POLL_SECONDS = 0.005


def check_platform() -> None:
    if sys.platform != "linux":
        raise ValueError(f"workers cannot be supervised on {sys.platform!r}, only on 'linux'")


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Receive ``number`` when ``parent``, which forked this process, ends; also after ``exec``, not in forks."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has ended before
        os.kill(os.getpid(), number)


def end_descendants() -> bool:
    """End all processes below this one, which adopts orphans, by SIGTERM, later SIGKILL; true if none is left."""
    deadline = time.monotonic() + LIMIT_SECONDS
    kill_at: dict[int, float] = {}
    while True:
        now = time.monotonic()
        for child in [each.pid for each in _processes() if each.parent == os.getpid()]:
            with suppress(ProcessLookupError, PermissionError):
                if child not in kill_at:
                    kill_at[child] = now + CLEAN_UP_SECONDS
                    os.kill(child, signal.SIGTERM)
                elif now > kill_at[child]:
                    os.kill(child, signal.SIGKILL)
        try:
            while child := os.waitpid(-1, os.WNOHANG)[0]:
                kill_at.pop(child, None)
        except ChildProcessError:
            return True
        if now > deadline:
            return False
        time.sleep(POLL_SECONDS)


def end_group(group: int) -> None:
    """End a group by SIGTERM, later SIGKILL. Call it before its first process is reaped, which frees its number."""
    deadline = time.monotonic() + CLEAN_UP_SECONDS
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        while any(each.group == group and each.is_running for each in _processes()):
            if time.monotonic() > deadline:
                os.killpg(group, signal.SIGKILL)
                return
            time.sleep(POLL_SECONDS)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int
    is_running: bool
    """False if it has ended, and its parent has not read the status."""


def _processes() -> Iterator[_Process]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent, group = file.read().rpartition(b")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
            yield _Process(int(name), int(parent), int(group), state not in (b"Z", b"X"))
