"""How far the measurement of layers is, how long it still takes, and its display with and without a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status

__all__ = ["MIN_ROUNDS", "WARM_UP_ROUNDS", "LayerProgress", "ProgressDisplay", "seconds_left"]

MIN_ROUNDS = 5
"""Smallest number of rounds that are measured."""
WARM_UP_ROUNDS = 2
"""Number of rounds before the measured ones."""

QUIET_SECONDS = 2.0
"""Without a terminal, nothing is printed before this time has passed."""
LINE_SECONDS = 10.0
"""Without a terminal, a line is printed this often."""


@dataclass(frozen=True)
class LayerProgress:
    """Progress of one rank."""

    micro_batch: int
    """Samples of the micro-batch that is measured now."""
    index: int
    """Index of this size."""
    sizes: int
    """Number of sizes."""
    rounds: int
    """Number of rounds measured so far with this size; 0 also while it warms up."""
    seconds_left: float | None
    """About how long the measurement of this and the other sizes still takes; None before the first round."""

    def __str__(self) -> str:
        which = f" ({self.index + 1} of {self.sizes})" if self.sizes > 1 else ""
        samples = f"{self.micro_batch} sample{'' if self.micro_batch == 1 else 's'}"
        text = f"measuring micro-batches of {samples}{which}"
        return text if self.seconds_left is None else f"{text}, {_in_words(self.seconds_left)} left"


def seconds_left(
    sizes: Sequence[int], index: int, rounds: int, measured_seconds: float, round_seconds: float, min_seconds: float
) -> float:
    """About how long the measurement still takes, if a round takes time in proportion to its micro-batch.

    Args:
        sizes: micro-batches, in the order in which they are measured.
        index: index of the size that is measured now.
        rounds: rounds of this size so far, with those that warm up.
        measured_seconds: how long this size has been measured, without the warm-up.
        round_seconds: time of a round of this size.
        min_seconds: shortest measurement of each size.
    """
    fewest = MIN_ROUNDS if min_seconds > 0 else 1
    ahead = max(WARM_UP_ROUNDS + fewest - rounds, 0) * round_seconds
    warming_up = max(WARM_UP_ROUNDS - rounds, 0) * round_seconds
    total = max(ahead, warming_up + min_seconds - measured_seconds)
    for size in sizes[index + 1 :]:
        each = round_seconds * size / sizes[index]
        total += WARM_UP_ROUNDS * each + max(fewest * each, min_seconds)
    return total


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

    def __call__(self, progress: LayerProgress) -> None:
        """Show it, if it is time to."""
        if self._console.is_terminal:
            self._status.update(f"{progress}{self._place}")
        elif self._now() >= self._next_line and progress.seconds_left is not None:
            self._console.print(f"{progress}{self._place}", markup=False, soft_wrap=True)
            self._next_line = self._now() + LINE_SECONDS


def _in_words(seconds: float) -> str:
    if seconds < 100:
        return f"about {max(math.ceil(seconds), 1)} s"
    return f"about {math.ceil(seconds / 60)} min"
