"""Dealing a global batch by a simple rule, for comparison with the exact search.

``uniform`` is what DeepSpeed does, ``flops`` what Whale does, ``adapt`` ADAPT's redistribution by throughput. Each rule
deals samples in proportion to weights; the micro-batches are the largest that then fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .exact_search import Runs, split_evenly, split_own
from .time_curve import Curve

__all__ = ["METHODS", "largest_remainders"]


def largest_remainders(weights: Sequence[float] | NDArray[np.float64], samples: int) -> NDArray[np.int64]:
    """``samples`` in proportion to ``weights``: rounded down, and what is left to the largest remainders, by rank."""
    shares = np.asarray(weights, dtype=np.float64)
    exact = shares / shares.sum() * samples
    # What is whole but for rounding is whole.
    dealt: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    first = np.argsort(-(exact - dealt), kind="stable")
    dealt[first[: samples - int(dealt.sum())]] += 1
    return dealt


def _in_proportion(curves: Sequence[Curve], samples: int, kind: str, weights: NDArray[np.float64]) -> list[Runs]:
    """Micro-batches of samples dealt in proportion to ``weights``.

    ``kind``: ``synchronized`` deals every micro-step, the largest that fits; ``shared`` deals all samples and splits
    each rank's evenly into as few micro-steps as fit everywhere; ``own`` makes the full steps equal instead.
    """
    largest = np.array([curve.max_batch for curve in curves])
    if kind == "synchronized":
        # A rank gets at least its proportion rounded down, which bounds the step.
        bound = ((largest + 1) * (weights.sum() / weights)).min()
        size = int(min(samples, math.ceil(bound)))
        while True:
            full, left = divmod(samples, size)
            parts = [(largest_remainders(weights, size), full)]
            parts += [(largest_remainders(weights, left), 1)] if left else []
            if all((dealt <= largest).all() for dealt, _ in parts):
                return [tuple((int(dealt[rank]), count) for dealt, count in parts) for rank in range(len(curves))]
            size -= 1
    dealt = largest_remainders(weights, samples)
    steps = int(np.ceil(dealt / largest).max())
    if kind == "shared":
        return [split_evenly(int(count), steps) for count in dealt]
    return [split_own(int(count), max(math.ceil(count / steps), 1)) for count in dealt]


def _uniform(curves: Sequence[Curve], samples: int, kind: str, flops: Sequence[float] | None) -> list[Runs]:
    """Every rank the same, as near as possible, in micro-batches that every rank holds."""
    least = min(curve.max_batch for curve in curves)
    if kind != "own":
        return _in_proportion([curve.limited(least) for curve in curves], samples, kind, np.ones(len(curves)))
    dealt = largest_remainders(np.ones(len(curves)), samples)
    steps = math.ceil(dealt.max() / least)
    size = math.ceil(dealt.max() / steps)
    return [split_own(int(count), size) for count in dealt]


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
