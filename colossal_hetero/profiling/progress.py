"""Show the progress of a measurement, with and without a terminal."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.console import Console
from rich.status import Status

__all__ = [
    "MIN_ROUNDS",
    "WARM_UP_ROUNDS",
    "Action",
    "BatchProgress",
    "LayerProgress",
    "Progress",
    "ProgressDisplay",
    "in_words",
    "layer_seconds_left",
    "relative_error",
    "seconds_left",
]


QUIET_SECONDS = 2.0
"""Seconds before the first line without a terminal."""
LINE_SECONDS = 10.0
"""Seconds between two lines without a terminal."""


class Progress(Protocol):
    """Progress of a measurement; ``str`` of it is a line in words."""

    @property
    def seconds_left(self) -> float | None:
        """About how long the measurement still takes; None if unknown."""


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


def in_words(seconds: float) -> str:
    if seconds < 100:
        return f"about {max(math.ceil(seconds), 1)} s"
    return f"about {math.ceil(seconds / 60)} min"


# Standard error ------------------------------------------------------------------------------------------------------


SPREAD_OF_QUARTILES = 1.349
"""Distance of the quartiles of a normal distribution, in standard deviations."""
MEDIAN_AGAINST_MEAN = math.sqrt(math.pi / 2)
"""Standard error of the median of many normal values, in standard errors of their mean."""
MAX_ERROR = 0.99


def relative_error(values: Sequence[float], *, of_median: bool) -> float:
    """Standard error of the median or mean of independent values, as a share of it; 0 for fewer than three values. That
    of a median is computed from the quartiles, so that a few disturbed values do not change it."""
    if len(values) < 3:
        return 0.0
    if not of_median:
        error = statistics.stdev(values) / statistics.fmean(values)
    else:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        error = MEDIAN_AGAINST_MEAN * (high - low) / SPREAD_OF_QUARTILES / middle
    return min(error / math.sqrt(len(values)), MAX_ERROR)


# Progress ------------------------------------------------------------------------------------------------------------


Action = Literal["searching", "timing"]
RUNS = 3
"""Runs of a timed size that are assumed for the estimate."""
TIMED_SIZES = 3
"""Sizes with a full measurement that are assumed: a straight curve has so many."""


@dataclass(frozen=True)
class BatchProgress:
    action: Action
    batch: int
    largest: int
    """Samples of the largest micro-batch that has run so far."""
    runs: int
    seconds_left: float | None = None
    """About how long it still takes; None before the first pass is timed."""

    def __str__(self) -> str:
        what = "searching for the largest micro-batch" if self.action == "searching" else "timing micro-batches"
        samples = f"{self.batch} sample{'' if self.batch == 1 else 's'}"
        text = f"measuring memory and speed of each device: {what}, {samples}"
        return text if self.seconds_left is None else f"{text}, {in_words(self.seconds_left)} left"


def seconds_left(
    action: Action, batch: int, known: Mapping[int, float], cap: int, failed: int | None, min_seconds: float
) -> float | None:
    """About how long profiling still takes, if a pass takes time in proportion to its samples."""
    if not known:
        return None
    last = max(known)
    sample_seconds = known[last] / last
    if action == "timing":
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


# Progress ------------------------------------------------------------------------------------------------------------


MIN_ROUNDS = 5
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class LayerProgress:
    micro_batch: int
    index: int
    sizes: int
    rounds: int
    """Number of rounds measured so far with this size; 0 also while it warms up."""
    seconds_left: float | None

    def __str__(self) -> str:
        which = f" ({self.index + 1} of {self.sizes})" if self.sizes > 1 else ""
        samples = f"{self.micro_batch} sample{'' if self.micro_batch == 1 else 's'}"
        text = f"measuring micro-batches of {samples}{which}"
        return text if self.seconds_left is None else f"{text}, {in_words(self.seconds_left)} left"


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
