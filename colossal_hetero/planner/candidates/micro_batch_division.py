"""How many of the iteration's micro-batches each pipeline runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["divide_micro_batches"]


def divide_micro_batches(
    fill: Sequence[float], longest: Sequence[float], micro_batches: int, minimum: Sequence[int]
) -> list[int]:
    """How many micro-batches each pipeline runs so that the last pipeline ends as early as possible.

    Args:
        fill: By pipeline, seconds of one micro-batch through the empty pipeline.
        longest: By pipeline, seconds that each further micro-batch adds: the time of its longest stage.
        micro_batches: How many to divide; not fewer than the sum of ``minimum``.
        minimum: By pipeline, how many it runs at least; not below 1.
    """
    # What a pipeline runs in any case counts as its first micro-batch.
    extra = np.asarray(minimum) - 1
    step = np.maximum(np.asarray(longest), 1e-15)
    first = np.asarray(fill) + extra * step
    micro_batches -= int(extra.sum())

    def done(seconds: float) -> NDArray[np.int64]:
        """Micro-batches that each pipeline finishes in this time; at least one."""
        counts: NDArray[np.float64] = np.minimum(np.maximum((seconds - first) // step + 1, 1), micro_batches)
        return counts.astype(np.int64)

    low, high = float(first.max()), float((first + (micro_batches - 1) * step).max()) * (1 + 1e-12)
    if done(low).sum() < micro_batches:
        # If micro-batches could be divided further, all pipelines would end at this time. Whole ones take at most one
        # step longer.
        even = (micro_batches - len(first) + float((first / step).sum())) / float((1.0 / step).sum())
        low, high = max(low, even * (1 - 1e-9)), min(high, (even + float(step.max())) * (1 + 1e-9))
        while high - low > 1e-13 * high:
            middle = (low + high) / 2
            count = done(middle).sum()
            low, high = (low, middle) if count >= micro_batches else (middle, high)
            if count == micro_batches:
                break
        counts, max_counts = done(low), done(high)
    else:
        # The pipeline that takes longest for a single micro-batch decides the time; the others share the rest.
        counts, max_counts = np.ones(len(first), dtype=np.int64), done(low)
    rest = micro_batches - int(counts.sum())
    for pipeline in np.lexsort((np.arange(len(first)), first + counts * step)):
        more = min(rest, int(max_counts[pipeline] - counts[pipeline]))
        counts[pipeline] += more
        rest -= more
    return [int(count) for count in counts + extra]
