"""Show the progress of a measurement, with and without a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.status import Status

__all__ = ["Progress", "ProgressDisplay", "in_words"]

QUIET_SECONDS = 2.0
"""Without a terminal, nothing is printed before this time has passed."""
LINE_SECONDS = 10.0
"""Without a terminal, a line is printed this often."""


class Progress(Protocol):
    """The progress of a measurement; ``str`` of it is a line in words."""

    @property
    def seconds_left(self) -> float | None:
        """About how long the measurement still takes; None if unknown."""


class ProgressDisplay:
    """Shows progress: with a terminal in one line that changes, else with a line now and then if it takes long.

    Args:
        console: where lines are printed.
        status: the line that changes.
        place: appended to each line.
        now: the time in seconds.
    """

    def __init__(
        self, console: Console, status: Status, place: str = "", now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._status = status
        self._place = place
        self._now = now
        self._next_line = now() + QUIET_SECONDS

    def __call__(self, progress: Progress) -> None:
        """Show it, if it is time to."""
        if self._console.is_terminal:
            self._status.update(f"{progress}{self._place}")
        elif self._now() >= self._next_line and progress.seconds_left is not None:
            self._console.print(f"{progress}{self._place}", markup=False, soft_wrap=True)
            self._next_line = self._now() + LINE_SECONDS


def in_words(seconds: float) -> str:
    """A duration, rounded up, in words."""
    if seconds < 100:
        return f"about {max(math.ceil(seconds), 1)} s"
    return f"about {math.ceil(seconds / 60)} min"
