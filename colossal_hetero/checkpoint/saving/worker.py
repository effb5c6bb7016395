"""A thread that writes while training goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

__all__ = ["Worker"]


class Worker:
    """Runs jobs one after another. The thread does not keep the process alive, so a write that hangs cannot either."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._pending = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether all jobs are done."""
        return self._idle.is_set()

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise an error, after those before it."""
        with self._lock:
            self._pending += 1
            self._idle.clear()
        self._jobs.put(job)

    def wait(self, deadline: float) -> bool:
        """Whether all jobs are done before ``deadline``, a time of :func:`time.monotonic`."""
        return self._idle.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End the thread after the jobs that are there.

        Waits for its end, unless a write hangs: a thread that is in a store of torch when Python ends aborts the
        process.
        """
        self._jobs.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                with self._lock:
                    self._pending -= 1
                    if self._pending == 0:
                        self._idle.set()
