"""Two processes supervise a node, so that either of them can be killed and nothing remains.

The *guard* is the process that the user has started. It forks the *supervising process*, whose children are the
workers. If the guard is killed, the supervising process gets a signal, ends everything below it and ends. If the
supervising process is killed, workers end with it, and the guard ends the processes that these have left. Only if both
are killed at the same moment may processes remain that a worker has started; the workers themselves end then too.

The guard also forwards signals. The supervising process has a session of its own, so that Ctrl+C in a terminal reaches
only the guard, and each signal reaches workers once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from .decisions import describe_status, shell_status
from .descendants import adopt_orphans, end_descendants, end_with_parent
from .node_name import BEAT_SECONDS, NameTaken
from .supervise import say

__all__ = ["run_guarded"]

FORWARDED = (signal.SIGTERM, signal.SIGINT)
GUARD_HAS_ENDED = signal.SIGUSR1


def run_guarded(supervise: Callable[[socket.socket], int], beat: Callable[[], None]) -> int:
    """Call ``supervise(requests)`` in another process, whose exit status is returned; no process below it remains.

    ``beat`` is called here about once each ``BEAT_SECONDS``. When it raises :class:`NameTaken`, the workers are asked
    to end, and the exit status is not 0. With ``OSError`` the workers go on.
    """
    adopt_orphans()
    ours, theirs = socket.socketpair()
    guard = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    process = os.fork()
    if process == 0:
        ours.close()
        _run_supervising_process(supervise, theirs, guard)
    theirs.close()

    def forward(number: int, frame: FrameType | None = None) -> None:
        with suppress(OSError):  # the supervising process has ended
            ours.send(bytes([number]))

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    is_lost = _beat_until_end(ours, beat, forward)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status < 0:
        say(f"the supervising process {process} ended with {describe_status(status)}; its workers end with it")
    if not end_descendants():
        say("some processes could not be ended; they wait for a device or a disk")
    return shell_status(status) or int(is_lost)


def _run_supervising_process(supervise: Callable[[socket.socket], int], requests: socket.socket, guard: int) -> None:
    """Does not return."""
    status = 1
    try:
        os.setsid()
        adopt_orphans()
        for number in FORWARDED:  # the guard says when workers get them
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        signal.signal(GUARD_HAS_ENDED, _end_at_once)
        end_with_parent(guard, GUARD_HAS_ENDED)
        status = supervise(requests)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            end_descendants()
        finally:
            os._exit(status)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    try:
        end_descendants()
    finally:
        os._exit(1)


def _beat_until_end(connection: socket.socket, beat: Callable[[], None], forward: Callable[[int], None]) -> bool:
    """Call ``beat`` until the supervising process ends; whether the name of the node was lost."""
    is_lost = False
    unreachable_since: float | None = None
    connection.settimeout(BEAT_SECONDS)
    while True:
        try:
            if not connection.recv(1):
                return is_lost
        except TimeoutError:
            pass
        except OSError:
            return is_lost
        if is_lost:
            continue
        try:
            beat()
        except NameTaken as error:
            is_lost = True
            say(f"{error}. The workers of this node are asked to end")
            forward(signal.SIGTERM)
        except OSError as error:
            if unreachable_since is None:
                unreachable_since = time.monotonic()
                say(f"the store cannot be reached ({error}); the workers go on as long as they do not need it")
        else:
            if unreachable_since is not None:
                say(f"the store can be reached again, after {time.monotonic() - unreachable_since:.0f} s")
                unreachable_since = None
