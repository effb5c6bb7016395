"""Progress of a measurement, and its display with and without a terminal."""

import time
from typing import NamedTuple

from rich.console import Console
from rich.status import Status

QUIET_SECONDS = 2.0  # seconds before the first line without a terminal
LINE_SECONDS = 10.0  # seconds between two lines without a terminal

SEARCHING = "measuring memory and speed of each device: searching for the largest micro-batch"
TIMING = "measuring memory and speed of each device: timing micro-batches"


class Progress(NamedTuple):
    action: str
    samples: int

    def __str__(self) -> str:
        return f"{self.action}, {self.samples} sample{'' if self.samples == 1 else 's'}"


class ProgressDisplay:
    """Shows progress: with a terminal in one line that changes, else with a line now and then if it takes long."""

    def __init__(self, console: Console, status: Status, place: str = "") -> None:
        self._console, self._status, self._place = console, status, place
        self._next_line = time.monotonic() + QUIET_SECONDS

    def __call__(self, progress: Progress) -> None:
        if self._console.is_terminal:
            self._status.update(f"{progress}{self._place}")
        elif time.monotonic() >= self._next_line:
            self._console.print(f"{progress}{self._place}", markup=False, soft_wrap=True)
            self._next_line = time.monotonic() + LINE_SECONDS
