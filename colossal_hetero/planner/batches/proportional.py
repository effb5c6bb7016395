"""Divide a global batch in proportion to weights, for comparison with the exact search.

``uniform`` is the rule of DeepSpeed (equal weights), ``flops`` that of Whale (FLOP/s), ``adapt`` that of ADAPT
(measured throughput). The micro-batches are the largest that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .exact_search import Runs, split_evenly, split_per_rank
from .time_curve import Curve

__all__ = ["METHODS", "largest_remainders"]


def largest_remainders(weights: Sequence[float] | NDArray[np.float64], samples: int) -> NDArray[np.int64]:
    """Whole numbers in proportion to ``weights`` that sum to ``samples``, by the largest-remainder method."""
    shares = np.asarray(weights, dtype=np.float64)
    exact = shares / shares.sum() * samples
    # The small number keeps a whole number whole if it was rounded to slightly less.
    parts: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    first = np.argsort(-(exact - parts), kind="stable")
    parts[first[: samples - int(parts.sum())]] += 1
    return parts


def _in_proportion(curves: Sequence[Curve], samples: int, kind: str, weights: NDArray[np.float64]) -> list[Runs]:
    """Each rank's micro-batches with samples in proportion to ``weights``.

    ``kind`` is the accumulation or, in stages 2 and 3, ``synchronized``. ``synchronized`` divides every micro-step in
    proportion, with the largest micro-steps that fit. ``shared`` divides all samples and splits each rank's part evenly
    into the smallest number of micro-steps that fits on all ranks. ``per_rank`` does the same with full micro-batches
    of one size and a last one with the remainder.
    """
    largest = np.array([curve.max_batch for curve in curves])
    min_batch = max(curve.min_batch for curve in curves)
    if kind == "synchronized":
        # Each rank gets at least its proportion rounded down, which limits the samples of a micro-step.
        bound = ((largest + 1) * (weights.sum() / weights)).min()
        size = int(min(samples, math.ceil(bound)))
        while True:
            full, left = divmod(samples, size)
            parts = [(largest_remainders(weights, size), full)]
            parts += [(largest_remainders(weights, left), 1)] if left else []
            if min_batch > 1:
                parts = [(_without_small_parts(step, min_batch), count) for step, count in parts]
            if size <= min_batch or all((step <= largest).all() and step.sum() >= min_batch for step, _ in parts):
                return [tuple((int(step[rank]), count) for step, count in parts) for rank in range(len(curves))]
            size -= 1
    by_rank = largest_remainders(weights, samples)
    steps = int(np.ceil(by_rank / largest).max())
    if kind == "shared":
        if min_batch > 1:
            by_rank = _without_small_parts(by_rank, steps * min_batch)
            if (by_rank > steps * largest).any():
                raise ValueError(
                    f"{samples} samples cannot be divided in proportion, because the model trains with at least "
                    f"{min_batch} samples; use method='exact', or another global batch size"
                )
        return [split_evenly(int(count), steps) for count in by_rank]
    return [split_per_rank(int(count), max(math.ceil(count / steps), 1)) for count in by_rank]


def _without_small_parts(parts: NDArray[np.int64], floor: int) -> NDArray[np.int64]:
    """``parts`` with the same sum and, as far as the sum permits, each either 0 or at least ``floor``.

    Small parts grow at the cost of the largest ones. If there are too few samples for all, the smallest parts become 0.
    """
    if parts.min() >= floor or parts.sum() < floor:
        return parts
    parts = parts.copy()
    used = np.argsort(-parts, kind="stable")[: int(parts.sum()) // floor]
    total, kept = int(parts.sum()), parts[used]
    parts[:] = 0
    kept = np.maximum(kept, floor)
    for _ in range(int(kept.sum()) - total):
        kept[kept.argmax()] -= 1
    for _ in range(total - int(kept.sum())):
        kept[kept.argmin()] += 1
    parts[used] = kept
    return parts


def _uniform(curves: Sequence[Curve], samples: int, kind: str, flops: Sequence[float] | None) -> list[Runs]:
    """The same number of samples on every rank, or one more, in micro-batches that every rank holds."""
    largest = min(curve.max_batch for curve in curves)
    if kind != "per_rank":
        return _in_proportion([curve.limited(largest) for curve in curves], samples, kind, np.ones(len(curves)))
    by_rank = largest_remainders(np.ones(len(curves)), samples)
    steps = math.ceil(by_rank.max() / largest)
    size = math.ceil(by_rank.max() / steps)
    return [split_per_rank(int(count), size) for count in by_rank]


def _flops(curves: Sequence[Curve], samples: int, kind: str, flops: Sequence[float] | None) -> list[Runs]:
    assert flops is not None
    return _in_proportion(curves, samples, kind, np.asarray(flops, dtype=np.float64))


def _adapt(curves: Sequence[Curve], samples: int, kind: str, flops: Sequence[float] | None) -> list[Runs]:
    speeds = {id(curve): curve.peak_speed for curve in curves}
    return _in_proportion(curves, samples, kind, np.array([speeds[id(curve)] for curve in curves]))


METHODS: dict[str, Callable[[Sequence[Curve], int, str, Sequence[float] | None], list[Runs]]] = {
    "uniform": _uniform,
    "flops": _flops,
    "adapt": _adapt,
}
