"""How far the measurement of micro-batches is, and how long it still takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..progress_display import in_words

__all__ = ["Action", "BatchProgress", "seconds_left"]

Action = Literal["searching", "timing"]
"""Whether the largest micro-batch is searched for, or known sizes are timed."""

RUNS = 3
"""Number of runs of a timed size that is assumed for the estimate."""
TIMED_SIZES = 3
"""Number of sizes with a full measurement that is assumed: with a straight curve there are so many."""


@dataclass(frozen=True)
class BatchProgress:
    """Progress of profiling a device."""

    action: Action
    batch: int
    """Samples of the next micro-batch."""
    largest: int
    """Samples of the largest micro-batch that has run so far."""
    runs: int
    """Number of passes that have run or failed so far."""
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
    """About how long profiling still takes, if a pass takes time in proportion to its samples.

    Args:
        action: what is done now.
        batch: samples of the next pass.
        known: seconds of a pass, by its samples; without an entry the result is None.
        cap: largest size of the search.
        failed: smallest size that ran out of memory so far; None if there is none.
        min_seconds: shortest measurement of a timed size.
    """
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
