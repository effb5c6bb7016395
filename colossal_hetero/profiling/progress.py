"""Progress of a measurement: how long it still takes, and its display with and without a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status

QUIET_SECONDS = 2.0
"""Seconds before the first line without a terminal."""
LINE_SECONDS = 10.0
"""Seconds between two lines without a terminal."""


@dataclass(frozen=True)
class Progress:
    action: str
    samples: int
    """Of the micro-batch that runs next."""
    seconds_left: float | None = None
    """About how long the measurement still takes; None if unknown."""

    def __str__(self) -> str:
        text = f"{self.action}, {self.samples} sample{'' if self.samples == 1 else 's'}"
        if self.seconds_left is None:
            return text
        if self.seconds_left < 100:
            return f"{text}, about {max(math.ceil(self.seconds_left), 1)} s left"
        return f"{text}, about {math.ceil(self.seconds_left / 60)} min left"


class ProgressDisplay:
    """Shows progress: with a terminal in one line that changes, else with a line now and then if it takes long."""

    def __init__(
        self, console: Console, status: Status, place: str = "", now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._status = status
        self._place = place
        self._now = now
        self._next_line = now() + QUIET_SECONDS

    def __call__(self, progress: Progress) -> None:
        if self._console.is_terminal:
            self._status.update(f"{progress}{self._place}")
        elif self._now() >= self._next_line and progress.seconds_left is not None:
            self._console.print(f"{progress}{self._place}", markup=False, soft_wrap=True)
            self._next_line = self._now() + LINE_SECONDS


# Batches -------------------------------------------------------------------------------------------------------------


SEARCHING = "measuring memory and speed of each device: searching for the largest micro-batch"
TIMING = "measuring memory and speed of each device: timing micro-batches"
RUNS = 3
"""Runs of a timed size that are assumed for the estimate."""
TIMED_SIZES = 3
"""Sizes with a full measurement that are assumed: a straight curve has so many."""


def seconds_left(
    action: str, batch: int, known: Mapping[int, float], cap: int, failed: int | None, min_seconds: float
) -> float | None:
    """About how long profiling still takes, if a pass takes time in proportion to its samples."""
    if not known:
        return None
    last = max(known)
    sample_seconds = known[last] / last
    if action == TIMING:
        return max((RUNS - 1) * batch * sample_seconds, min_seconds) + (batch == last) * min_seconds
    if failed is None:
        # Doubling up to the cap, as long as no pass runs out of memory.
        sizes = [min(batch * 2**step, cap) for step in range(math.ceil(math.log2(max(cap / batch, 1))) + 1)]
        largest = cap
    else:
        sizes = [batch] * math.ceil(math.log2(max(failed - last, 2)))
        largest = batch
    timing = (RUNS - 1) * largest * sample_seconds + (TIMED_SIZES - 1) * min_seconds
    return sum(sizes) * sample_seconds + timing


# Layers --------------------------------------------------------------------------------------------------------------


MIN_ROUNDS = 5
WARM_UP_ROUNDS = 2


def layer_seconds_left(
    sizes: Sequence[int], index: int, rounds: int, measured_seconds: float, round_seconds: float, min_seconds: float
) -> float:
    """About how long the measurement still takes, if a round takes time in proportion to its micro-batch."""
    fewest = MIN_ROUNDS if min_seconds > 0 else 1
    ahead = max(WARM_UP_ROUNDS + fewest - rounds, 0) * round_seconds
    warming_up = max(WARM_UP_ROUNDS - rounds, 0) * round_seconds
    total = max(ahead, warming_up + min_seconds - measured_seconds)
    for size in sizes[index + 1 :]:
        each = round_seconds * size / sizes[index]
        total += WARM_UP_ROUNDS * each + max(fewest * each, min_seconds)
    return total
