"""Do something when SIGTERM arrives, even if the main thread waits in a collective for ever.

Python runs a signal's handler in the main thread, between two of its instructions. The number of the signal, though, is
written to a pipe at once, and a thread reads it there.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["TerminationWatch"]

EXIT_CODE = 128 + signal.SIGTERM


class TerminationWatch:
    """Calls a function in a thread when SIGTERM arrives; then the process ends.

    Processes that are forked from this one, such as those of a data loader, react to the signal as before.

    Args:
        act: what to do before the process ends.

    Raises:
        ValueError: this is not the main thread.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self._act, self._process = act, os.getpid()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.signal(signal.SIGTERM, self._handle)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=self._watch, name="termination", daemon=True).start()

    def close(self) -> None:
        """From now on the signal has the effect that it had before."""
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
