"""Signals and files that announce the end of a process. Without torch.

Ranks may see a *notice* that a machine will leave in different iterations, so what counts is what the commit, which is
common to all ranks, says. *Watches* act before SIGTERM or ``abort`` ends the process, even if the main thread waits in
a collective for ever: Python writes a signal's number to a pipe at once, where a thread reads it. SIGABRT ends the
process as soon as its handler has returned, so that handler is a function of C for the system.

[Note: aborts] NCCL's watchdog, a thread of torch, throws an error, which aborts the process, when a collective has
failed or exceeds its time limit, unless ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` is 0 or 2. With 3, torch's default, it
aborts no collective before, so nothing goes on with values that are not complete. Main threads that wait for a GPU in
functions of torch do not hold Python's lock, which the handler needs.
"""

import atexit
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from pathlib import Path
from types import FrameType


class SignalNotice:
    """The notice is SIGTERM to this process. A second signal has its usual effect, but those within
    ``same_within_seconds`` count as one: a worker may get SIGTERM directly and from torchrun. Forked processes, such as
    those of a data loader, react as before; torchrun signals a worker's whole process group, which these leave
    therefore."""

    def __init__(self, same_within_seconds: float = 1.0) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"the thread {threading.current_thread().name!r} cannot receive signals; make SignalNotice in the main "
                "thread, or use FileNotice"
            )
        self._same_within_seconds = same_within_seconds
        self._process = os.getpid()
        self._first_at: float | None = None
        self._before = signal.signal(signal.SIGTERM, self._receive)
        register_after_fork(self, lambda _: os.setpgrp())

    def is_given(self) -> bool:
        return self._first_at is not None

    def close(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

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


EXIT_CODE = 128 + signal.SIGTERM
ABORT_SECONDS = 300.0  # time that further threads that abort the process wait for the first one
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


class TerminationWatch:
    """Calls a function in a thread when SIGTERM arrives; then the process ends. Forked processes react as before."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act, self._process = act, os.getpid()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.signal(signal.SIGTERM, self._handle)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        register_after_fork(self, lambda _: os.setpgrp())  # as in SignalNotice
        threading.Thread(target=self._watch, name="termination", daemon=True).start()

    def close(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        signal.set_wakeup_fd(-1)

    def _watch(self) -> None:
        while number := os.read(self._reader, 1):
            if number[0] == signal.SIGTERM:
                try:
                    self._act()
                finally:
                    os._exit(EXIT_CODE)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self.close()
            os.kill(os.getpid(), number)


class AbortWatch:
    """Calls a function when a thread aborts the process, before it ends; see [Note: aborts]."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act, self._process = act, os.getpid()
        self._is_done = self._is_restored = False
        self._lock = threading.Lock()
        self._handler = _Handler(self._handle)
        self._signal = ctypes.CDLL(None).signal
        self._signal.argtypes, self._signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        self._before = self._signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))
        atexit.register(self.close)  # a handler cannot run when Python has ended

    def close(self) -> None:
        self._signal(signal.SIGABRT, self._before)
        atexit.unregister(self.close)

    def _handle(self, number: int) -> None:
        try:
            # Each process group has a watchdog. The second one must not end the process while the first one acts.
            if os.getpid() == self._process and self._lock.acquire(timeout=ABORT_SECONDS):
                try:
                    if not self._is_done:
                        self._is_done = True
                        self._act()
                finally:
                    self._lock.release()
        finally:
            # Then what the signal does otherwise. Put it back once: the handler of faulthandler removes itself.
            if not self._is_restored:
                self._is_restored = True
                self._signal(number, self._before)
            signal.pthread_kill(threading.get_ident(), number)
