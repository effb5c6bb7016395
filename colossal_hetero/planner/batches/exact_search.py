"""Exact search for the division of a global batch with the least wall time; used by :func:`.allocation.allocate`."""

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .time_curve import Curve

Runs = tuple[tuple[int, int], ...]
"""One rank's micro-batches in running order: pairs (samples, number of such micro-batches)."""

TOLERANCE = 1e-10
"""Relative difference below which wall times are equal: sums of floats depend that much on their order."""
PRECISION = 1e-13
"""Relative precision of times that are found by bisection, and the error of sums that counts as rounding."""

# [Note: the order statistic] Let h_i(n) be the least time in which rank i runs n samples; it never decreases with n.
# The time of N samples is the least t with Σ N_i(t) ≥ N, where N_i(t) is the largest n with h_i(n) ≤ t. That is the
# N-th smallest of all values h_i(1), h_i(2), …, but at least max_i h_i(0), because ranks without samples run too. Ranks
# of one kind are computed once and counted by their number. The three problems differ in h, with s the time curve (h_i
# also has the rank's fixed time per global batch in the first two, for n = 0 too):
#
# - accumulation "per_rank", stages 0 and 1: h(n) = min_b ⌊n/b⌋·s(b) + s(n mod b). For given b and t, ⌊t/s(b)⌋ full
#   micro-batches fit, and then as many samples as fit into the remaining time. N(t) is the maximum over b.
# - accumulation "shared", stages 0 and 1: all ranks run G micro-steps. h(n) = (G − r)·s(q) + r·s(q+1) with q, r =
#   divmod(n, G). N(t) has a formula for all G at once: one pass shows which G can still beat the best time.
# - stages 2 and 3: in one micro-step h(n) = s(n). Let F(m) be the time of a micro-step of m samples over all ranks. One
#   sort gives F(m) for all m, and the best m minimizes ⌊N/m⌋·(F(m) + comm) + (F(N mod m) + comm).
#
# [Note: smallest micro-batch] With a smallest micro-batch of b₀ samples, the times up to b₀ are equal, also for a rank
# without samples. A rank runs no samples or, in G micro-steps, at least G·b₀, split evenly. If N ≥ R·G·b₀ for R ranks,
# every rank can have G·b₀ at no cost, and nothing else changes. Otherwise q = ⌊N / G·b₀⌋ < R ranks have samples, and N
# samples can be run in time t if the sum of the q largest N_i(t) is at least N. The form "per_rank" is not possible:
# its last micro-batch would be too small.


class _Kinds:
    """Ranks grouped by curve and fixed time, in an order that does not depend on the order of the ranks."""

    def __init__(self, curves: Sequence[Curve], samples: int, fixed_seconds: Sequence[float] | None = None) -> None:
        fixed = [0.0] * len(curves) if fixed_seconds is None else fixed_seconds
        held = {key: each.seconds[: samples + 1].tobytes() for key, each in {id(c): c for c in curves}.items()}
        kinds: dict[tuple[bytes, float], list[int]] = {}
        for rank, (curve, seconds) in enumerate(zip(curves, fixed, strict=True)):
            kinds.setdefault((held[id(curve)], seconds), []).append(rank)
        keys = sorted(kinds)
        self.times = [np.frombuffer(times) for times, _ in keys]
        """By kind, ``[min(max_batch, samples) + 1]``: seconds of a micro-batch, by its samples."""
        self.fixed = np.array([seconds for _, seconds in keys])
        """By kind: seconds per global batch that do not depend on its micro-batches."""
        self.counts = np.array([len(kinds[key]) for key in keys])
        self.order = [rank for key in keys for rank in kinds[key]]
        self.min_batch = max(curve.min_batch for curve in curves)
        self.max_steps = math.ceil(samples / len(curves)) if self.min_batch == 1 else samples // self.min_batch
        """Largest useful number of micro-steps; if ``min_batch`` is 1, one sample on every rank is possible."""

    def least(self, steps: NDArray[Any]) -> NDArray[np.float64]:
        """Seconds of ``steps`` micro-steps with at most ``min_batch`` samples on every rank, and of the fixed time."""
        one = np.array([times[1] for times in self.times])
        return np.asarray((self.fixed[:, None] + one[:, None] * steps).max(axis=0))

    def together(self, room: NDArray[Any], floor: NDArray[Any] | int, samples: int) -> NDArray[np.float64]:
        """Most samples up to ``samples``, if a rank runs none, or ``floor [n]`` to ``room [kinds, n]`` of them."""
        if self.min_batch == 1:
            return np.asarray(self.counts @ room)
        used = np.minimum(samples // floor, len(self.order))
        order = np.argsort(-room, axis=0, kind="stable")
        counts = self.counts[order]
        before = np.cumsum(counts, axis=0) - counts
        return np.asarray((np.take_along_axis(room, order, axis=0) * np.clip(used - before, 0, counts)).sum(axis=0))

    def parts(
        self, room: Callable[[float], NDArray[Any]], seconds: float, least: float, samples: int, floor: int = 1
    ) -> NDArray[np.int64]:
        """Each rank's part of ``samples``, where ``seconds`` is the least time in which all can be run. No rank gets
        less than its ``room`` in a shorter time, and the sum of squares is the least possible, so that ranks wait
        little and those of a kind differ by at most one sample."""
        high = np.repeat(room(seconds), self.counts).astype(np.int64)
        low = np.zeros_like(high)
        if seconds * (1.0 - TOLERANCE) >= least:
            low = np.repeat(room(seconds * (1.0 - TOLERANCE)), self.counts).astype(np.int64)
        if self.min_batch > 1:
            low = np.maximum(low, floor)
            if floor * len(high) > samples:
                used = np.argsort(-high, kind="stable")[: samples // floor]
                few = np.isin(np.arange(len(high)), used)
                low, high = np.where(few, floor, 0), np.where(few, high, 0)
        levels = range(int(high.max()) + 1)
        level = bisect.bisect_left(levels, samples, key=lambda each: int(np.clip(each, low, high).sum()))
        dealt: NDArray[np.int64] = np.clip(level - 1, low, high)
        grows = np.flatnonzero(np.clip(level, low, high) > dealt)
        dealt[grows[: samples - int(dealt.sum())]] += 1
        assert dealt.sum() == samples
        return dealt[np.argsort(self.order)]


def _least_seconds(is_enough: Callable[[float], bool], low: float, high: float) -> float:
    """The shortest time from ``low`` on that ``is_enough``, as ``high`` is."""
    if is_enough(low):
        return low
    while high - low > PRECISION * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def split_evenly(samples: int, steps: int) -> Runs:
    """``samples`` in ``steps`` micro-batches that differ by at most one sample, the larger ones first."""
    size, larger = divmod(samples, steps)
    return tuple((b, count) for b, count in ((size + 1, larger), (size, steps - larger)) if count)


def split_per_rank(samples: int, size: int) -> Runs:
    """Micro-batches of ``size`` and a last one with the remainder; without samples, one of size 0."""
    full, rest = divmod(samples, size) if samples else (0, 0)
    return tuple((b, count) for b, count in ((size, full), (rest, 1)) if count and b) or ((0, 1),)


def exact_shared(
    curves: Sequence[Curve], samples: int, fixed_seconds: Sequence[float] | None = None, least_gain: float = TOLERANCE
) -> list[Runs]:
    """Each rank's runs in stages 0 and 1, with equally many micro-steps; ``fixed_seconds`` by rank. More micro-steps
    must save more than the share ``least_gain`` of the wall time."""
    kinds = _Kinds(curves, samples, fixed_seconds)
    largest = np.array([len(times) - 1 for times in kinds.times])
    # Seconds by kind and micro-batch, infinite if it does not fit: ``[kinds, largest + 2]``.
    table = np.full((len(largest), largest.max() + 2), np.inf)
    for row, times in zip(table, kinds.times, strict=True):
        row[: len(times)] = times

    def room(seconds: float, steps: NDArray[Any]) -> NDArray[np.float64]:
        """Samples that one rank of each kind runs in ``seconds`` ≥ ``least(steps)``: ``[kinds, len(steps)]``."""
        free = (1.0 + PRECISION) * seconds - kinds.fixed[:, None]
        limits = np.maximum(free / steps, table[:, 1:2])  # also for steps that take longer, which `total` leaves out
        if len(steps) == 1:  # many kinds at once: replicas whose speeds were measured are all different
            whole = (table[:, 1:] <= limits).sum(axis=1, keepdims=True)
        else:
            pairs = zip(kinds.times, limits, strict=True)
            whole = np.stack([np.searchsorted(times[1:], row, side="right") for times, row in pairs])
        time = np.take_along_axis(table, whole, axis=1)
        extra = np.floor((free - steps * time) / (np.take_along_axis(table, whole + 1, axis=1) - time))
        return np.asarray(np.minimum(steps * whole + np.maximum(extra, 0.0), samples))

    def total(seconds: float, steps: NDArray[Any]) -> NDArray[np.float64]:
        run = kinds.together(room(seconds, steps), steps * kinds.min_batch, samples)
        return np.where(kinds.least(steps) <= seconds, run, 0.0)

    def least_seconds(steps: NDArray[Any], enough: float) -> float:
        return _least_seconds(
            lambda seconds: bool(total(seconds, steps)[0] >= samples), float(kinds.least(steps)[0]), enough
        )

    every = np.arange(math.ceil(samples / int(kinds.counts @ largest)), kinds.max_steps + 1)
    wall, candidates = math.inf, every
    # In this time, every number of micro-steps runs what it can run at all.
    target = float(2.0 * kinds.max_steps * max(times[-1] for times in kinds.times) + kinds.fixed.max())
    while True:
        run = total(target, candidates)
        candidates, run = candidates[run >= samples], run[run >= samples]
        if len(candidates) == 0:
            break
        # The candidate that runs most samples in this time is likely to be the best, or close to it.
        wall = least_seconds(candidates[[run.argmax()]], target)
        target = wall * (1.0 - TOLERANCE)
    if wall == math.inf:
        raise _no_division(samples, kinds.min_batch)
    enough = wall * (1.0 + least_gain)
    best = every[total(enough, every) >= samples][:1]
    parts = kinds.parts(
        lambda seconds: room(seconds, best)[:, 0],
        least_seconds(best, enough),
        float(kinds.least(best)[0]),
        samples,
        int(best[0]) * kinds.min_batch,
    )
    return [split_evenly(int(part), int(best[0])) for part in parts]


def exact_per_rank(curves: Sequence[Curve], samples: int, fixed_seconds: Sequence[float] | None = None) -> list[Runs]:
    """Each rank's runs in stages 0 and 1, with its own number of micro-steps; else as :func:`exact_shared`."""
    kinds = _Kinds(curves, samples, fixed_seconds)

    def room(seconds: float) -> NDArray[np.float64]:
        """Samples that a rank of each kind runs in ``seconds``: the most over the sizes of its full micro-batches."""
        most = []
        for times, free in zip(kinds.times, (1.0 + PRECISION) * seconds - kinds.fixed, strict=True):
            full = np.floor(free / times[1:])
            rest = np.searchsorted(times[1:], free - full * times[1:], side="right")
            most.append((full * np.arange(1, len(times)) + rest).max())
        return np.minimum(most, samples)

    least, enough = (float(each) for each in kinds.least(np.array([1, kinds.max_steps])))
    wall = _least_seconds(lambda seconds: bool(kinds.counts @ room(seconds) >= samples), least, enough)
    parts = kinds.parts(room, wall, least, samples)

    def split(seconds: NDArray[np.float64], count: int) -> Runs:
        """The fastest split; among equal ones the fewest micro-steps, then the smallest full micro-batch."""
        if count == 0:
            return split_per_rank(0, 1)
        sizes = np.arange(1, min(len(seconds) - 1, count) + 1)
        full, rest = np.divmod(count, sizes)
        walls = full * seconds[sizes] + np.where(rest > 0, seconds[rest], 0.0)
        steps = np.where(walls <= walls.min() * (1.0 + TOLERANCE), full + (rest > 0), np.inf)
        return split_per_rank(count, int(sizes[steps.argmin()]))

    splits: dict[tuple[int, int], Runs] = {}
    for curve, part in zip(curves, parts, strict=True):
        if (id(curve), int(part)) not in splits:
            splits[id(curve), int(part)] = split(curve.seconds, int(part))
    return [splits[id(curve), int(part)] for curve, part in zip(curves, parts, strict=True)]


def exact_synchronized(
    curves: Sequence[Curve], samples: int, communication_seconds: float, least_gain: float = TOLERANCE
) -> list[Runs]:
    """Each rank's runs in stages 2 and 3, where the ranks synchronize at every micro-step; ``least_gain`` as above."""
    kinds = _Kinds(curves, samples)
    first = float(kinds.least(np.array([1]))[0])

    def room(seconds: float) -> NDArray[np.int64]:
        return np.array([np.searchsorted(times[1:], seconds, side="right") for times in kinds.times])

    values = np.maximum(np.concatenate([times[1:] for times in kinds.times]), first)
    weights = np.concatenate([np.full(len(t) - 1, c) for t, c in zip(kinds.times, kinds.counts, strict=True)])
    order = np.argsort(values, kind="stable")
    values, held = values[order], np.cumsum(weights[order])
    sizes = np.arange(1, min(samples, int(held[-1])) + 1)
    cost = values[np.searchsorted(held, sizes)]  # a micro-step of 1, 2, … samples over all ranks
    if kinds.min_batch > 1:
        for size in sizes[: kinds.min_batch * len(curves) - 1]:

            def fits(seconds: float, size: int = int(size)) -> bool:
                run = kinds.together(room(seconds)[:, None], kinds.min_batch, size)
                return bool(size >= kinds.min_batch and run[0] >= size)

            index = bisect.bisect_left(values, True, key=fits)
            cost[size - 1] = values[index] if index < len(values) else math.inf
    full, rest = np.divmod(samples, sizes)
    number = full + (rest > 0)
    walls = full * cost + np.where(rest > 0, cost[rest - 1], 0.0) + number * communication_seconds
    if not math.isfinite(walls.min()):
        raise _no_division(samples, kinds.min_batch)
    few = np.where(walls <= walls.min() * (1.0 + least_gain), number, np.inf)
    walls = np.where(few == few.min(), walls, np.inf)
    size = int(sizes[(walls <= walls.min() * (1.0 + TOLERANCE)).argmax()])
    steps, left = divmod(samples, size)
    by_step = [
        (kinds.parts(room, float(cost[count - 1]), first, count, kinds.min_batch), number)
        for count, number in ((size, steps), (left, 1))
        if count
    ]
    return [tuple((int(parts[rank]), number) for parts, number in by_step) for rank in range(len(curves))]


def _no_division(samples: int, min_batch: int) -> ValueError:
    return ValueError(
        f"{samples} samples cannot be divided into micro-batches of at least {min_batch} samples, the fewest that the "
        "model trains with, which all devices hold; use another global batch size"
    )
