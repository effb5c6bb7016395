"""The exact search for the batches with the least wall time: every rank's samples, and how they are cut.

All three problems are order statistics, see [Note: the order statistic]. :func:`.allocation.allocate` is their face.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .time_curve import Curve

__all__ = ["TOLERANCE", "Runs", "exact_own", "exact_shared", "exact_synchronized", "split_evenly", "split_own"]

Runs = tuple[tuple[int, int], ...]
"""One rank's micro-batches in the order in which it runs them: (samples, how many such micro-batches)."""

_PerKind = Sequence[int] | NDArray[np.int64]

TOLERANCE = 1e-10
"""Wall times that differ by less than this share are equal: sums of floats in another order differ by as much."""

# [Note: the order statistic]
# Let h_i(n) be the least time in which rank i runs n samples: it never falls with n. The slowest rank decides, so N
# samples take the least t with Σ N_i(t) ≥ N, where N_i(t) is the largest n with h_i(n) ≤ t: the N-th smallest of all
# values h_i(1), h_i(2), …, but at least max_i h_i(0), since ranks without samples run too. Ranks of one kind count
# once, times their number. The three problems differ in h:
# - accumulation "own", stages 0 and 1: h(n) = min_b ⌊n/b⌋·s(b) + s(n mod b). For a given b and t, ⌊t/s(b)⌋ full steps
#   fit, and then as many samples as the rest of the time allows. N(t) is the best over b.
# - "shared": all ranks run G micro-steps. h(n) = (G − r)·s(q) + r·s(q+1) with q, r = divmod(n, G). N(t) is known in
#   closed form for all G at once, so one pass tells which G can still beat the best time so far.
# - stages 2 and 3: in one micro-step h(n) = s(n). F(m), the time of a step of m samples in all, comes for every m from
#   one sort, and the best m is the least of ⌊N/m⌋·(F(m) + comm) + (F(N mod m) + comm).
#
# [Note: ticks]
# Seconds become whole numbers of ticks, below 2^51 at the time that micro-steps of one sample on every rank take,
# which always suffice. Sums and products of such numbers are exact in float64, and so are quotients rounded down: no
# comparison depends on rounding. A tick is a power of two of seconds, and at most 2^-50 of that time.


class Kinds:
    """Ranks grouped by curve, in an order that does not depend on the order of the ranks."""

    def __init__(self, curves: Sequence[Curve], samples: int, communication_seconds: float = 0.0) -> None:
        by_object: dict[int, list[int]] = {}
        for rank, curve in enumerate(curves):
            by_object.setdefault(id(curve), []).append(rank)
        by_value: dict[tuple[int, bytes], list[int]] = {}
        for ranks in by_object.values():
            held = curves[ranks[0]].seconds[: samples + 1]
            by_value.setdefault((len(held), held.tobytes()), []).extend(ranks)
        keys = sorted(by_value)
        self.ranks = [sorted(by_value[key]) for key in keys]
        self.counts = np.array([len(ranks) for ranks in self.ranks])
        seconds = [np.frombuffer(key[1]) for key in keys]
        self.most_steps = math.ceil(samples / len(curves))
        """Micro-steps of one sample on every rank, which always fit: a better allocation takes no more."""
        bound = self.most_steps * (max(times[1] for times in seconds) + communication_seconds)
        tick = math.ldexp(1.0, math.frexp(bound)[1] - 51)
        self.times = [np.maximum(np.rint(times / tick), 1.0) for times in seconds]
        """By kind, ``[min(max_batch, samples) + 1]``: ticks by micro-batch."""
        self.first = float(max(times[1] for times in self.times))
        """Ticks that a micro-step takes at least, with at most one sample on every rank."""
        self.communication = float(np.rint(communication_seconds / tick))
        self.samples = samples
        self.world_size = len(curves)

    @property
    def largest(self) -> NDArray[np.int64]:
        return np.array([len(times) - 1 for times in self.times])

    def deal(self, least: _PerKind, most: _PerKind, samples: int) -> NDArray[np.int64]:
        """``samples`` over the ranks, each within ``least..most`` of its kind, with the least sum of squares."""
        low, high = np.asarray(least), np.asarray(most)
        below, level = int(low.min()), int(high.max())  # all fit at `level`
        while level - below > 1:
            middle = (below + level) // 2
            if self.counts @ np.clip(middle, low, high) >= samples:
                level = middle
            else:
                below = middle
        if self.counts @ np.clip(below, low, high) >= samples:
            level = below
        base = np.clip(level - 1, low, high)
        grows = np.clip(level, low, high) > base
        rest = samples - int(self.counts @ base)
        dealt = np.zeros(self.world_size, dtype=np.int64)
        for kind, ranks in enumerate(self.ranks):
            dealt[ranks] = base[kind]
            if grows[kind]:
                more = min(rest, len(ranks))
                dealt[ranks[:more]] += 1
                rest -= more
        assert dealt.sum() == samples
        return dealt

    def deal_within(
        self, ticks: float, least_ticks: float, capacity: Callable[[float], _PerKind], samples: int
    ) -> NDArray[np.int64]:
        """Each rank's samples, where ``ticks`` is the least time in which ``samples`` can be run.

        A rank gets what it runs in less than ``ticks`` anyway; what is left goes to those that run more in just that
        time. ``capacity`` gives, by kind, a rank's samples in a time, which is at least ``least_ticks``.
        """
        less = math.floor(ticks * (1.0 - TOLERANCE)) if ticks * TOLERANCE > 1.0 else ticks - 1.0
        least = capacity(less) if less >= least_ticks else [0] * len(self.ranks)
        return self.deal(least, capacity(ticks), samples)

    def by_rank(self, per_kind: Sequence[dict[int, Runs]], dealt: NDArray[np.int64]) -> list[Runs]:
        """Each rank's runs, which its kind and number of samples decide."""
        runs: list[Runs] = [()] * self.world_size
        for kind, ranks in enumerate(self.ranks):
            for rank in ranks:
                runs[rank] = per_kind[kind][int(dealt[rank])]
        return runs


def split_evenly(samples: int, steps: int) -> Runs:
    """``samples`` in ``steps`` micro-batches that differ by at most one, the larger ones first."""
    size, larger = divmod(samples, steps)
    return tuple((b, count) for b, count in ((size + 1, larger), (size, steps - larger)) if count)


def split_own(samples: int, size: int) -> Runs:
    """Micro-batches of ``size`` and a last one of the rest; one of size 0 if there are no samples."""
    full, rest = divmod(samples, size) if samples else (0, 0)
    return tuple((b, count) for b, count in ((size, full), (rest, 1)) if count and b) or ((0, 1),)


def exact_shared(curves: Sequence[Curve], samples: int) -> list[Runs]:
    """Stages 0 and 1, every rank with the same number of micro-steps: each rank's runs."""
    kinds = Kinds(curves, samples)

    # By kind and micro-batch, endless where it does not fit: ``[kinds, largest + 2]``.
    table = np.full((len(kinds.times), kinds.largest.max() + 2), np.inf)
    for row, times in zip(table, kinds.times, strict=True):
        row[: len(times)] = times

    def capacity(ticks: float, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Samples that one rank of each kind runs in ``ticks``, at least ``steps·first``: ``[kinds, len(steps)]``."""
        limits = np.floor(ticks / steps)
        if 0 < len(steps) < len(table):
            whole = np.stack([(table[:, 1:] <= limit).sum(axis=1) for limit in limits], axis=1)
        else:
            whole = np.stack([np.searchsorted(times[1:], limits, side="right") for times in kinds.times])
        time = np.take_along_axis(table, whole, axis=1)
        extra = np.floor((ticks - steps * time) / (np.take_along_axis(table, whole + 1, axis=1) - time))
        return np.asarray(np.minimum(steps * whole + extra, samples))

    def total(ticks: float, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        return kinds.counts @ capacity(ticks, steps)

    def least_ticks(steps: float, enough: float) -> float:
        """Of ``steps`` micro-steps; ``enough`` suffices."""
        low, high, one = steps * kinds.first - 1.0, enough, np.array([steps])
        while high - low > 1.0:
            middle = math.floor((low + high) / 2)
            low, high = (low, middle) if total(middle, one)[0] >= samples else (middle, high)
        return high

    fewest = float(math.ceil(samples / int(kinds.counts @ kinds.largest)))
    wall = kinds.most_steps * kinds.first
    candidates = np.arange(fewest, kinds.most_steps + 1)
    while True:
        target = min(wall - 1.0, math.floor(wall * (1.0 - TOLERANCE)))
        candidates = candidates[candidates * kinds.first <= target]
        room = total(target, candidates)
        candidates, room = candidates[room >= samples], room[room >= samples]
        if len(candidates) == 0:
            break
        # The one with most room is likely to be the best, or close to it.
        wall = least_ticks(candidates[room.argmax()], target)
    # Fewer micro-steps win among equal ones.
    enough = math.ceil(wall * (1.0 + TOLERANCE))
    candidates = np.arange(fewest, min(kinds.most_steps, enough // kinds.first) + 1)
    steps = float(candidates[total(enough, candidates) >= samples][0])
    wall = least_ticks(steps, enough)
    dealt = kinds.deal_within(
        wall, steps * kinds.first, lambda ticks: capacity(ticks, np.array([steps]))[:, 0].astype(int), samples
    )
    splits = [{int(n): split_evenly(int(n), int(steps)) for n in np.unique(dealt[ranks])} for ranks in kinds.ranks]
    return kinds.by_rank(splits, dealt)


def exact_own(curves: Sequence[Curve], samples: int) -> list[Runs]:
    """Stages 0 and 1, every rank with micro-batches and steps of its own: each rank's runs."""
    kinds = Kinds(curves, samples)

    def capacities(kind: int, ticks: float, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Samples that a rank runs in ``ticks``, by the size of its full steps."""
        times = kinds.times[kind]
        full = np.floor(ticks / times[sizes])
        rest = np.searchsorted(times[1:], ticks - full * times[sizes], side="right")
        return np.asarray(np.minimum(full * sizes + rest, samples))

    # Bisection on the time, until what is left is rounding. A size stays in the race while, at the time that suffices,
    # it does at least as much as the best one at the time that does not.
    sizes = [np.arange(1, len(times)) for times in kinds.times]
    low, high = kinds.first - 1.0, kinds.most_steps * kinds.first
    best = [0.0] * len(sizes)
    at_high = [capacities(kind, high, each) for kind, each in enumerate(sizes)]
    while high - low > max(1.0, 0.01 * TOLERANCE * high):
        middle = math.floor((low + high) / 2)
        found = [capacities(kind, middle, each) for kind, each in enumerate(sizes)]
        reached = [float(each.max()) for each in found]
        if kinds.counts @ reached >= samples:
            high, at_high = middle, found
        else:
            low, best = middle, reached
        keep = [most >= least for most, least in zip(at_high, best, strict=True)]
        sizes = [each[kept] for each, kept in zip(sizes, keep, strict=True)]
        at_high = [each[kept] for each, kept in zip(at_high, keep, strict=True)]

    every = [np.arange(1, len(times)) for times in kinds.times]
    dealt = kinds.deal_within(
        high,
        kinds.first,
        lambda ticks: [int(capacities(kind, ticks, each).max()) for kind, each in enumerate(every)],
        samples,
    )

    def split(kind: int, count: int) -> Runs:
        """In the least time; among equal ones in the fewest steps, then with the smallest full step."""
        if count == 0:
            return split_own(0, 1)
        times, sizes = kinds.times[kind], every[kind][:count]
        full, rest = np.divmod(count, sizes)
        ticks = full * times[sizes] + np.where(rest > 0, times[rest], 0.0)
        steps = np.where(ticks <= ticks.min() * (1.0 + TOLERANCE), full + (rest > 0), np.inf)
        return split_own(count, int(sizes[steps.argmin()]))

    splits = [{int(n): split(kind, int(n)) for n in np.unique(dealt[ranks])} for kind, ranks in enumerate(kinds.ranks)]
    return kinds.by_rank(splits, dealt)


def exact_synchronized(curves: Sequence[Curve], samples: int, communication_seconds: float) -> list[Runs]:
    """Stages 2 and 3, a synchronization at every micro-step: each rank's runs."""
    kinds = Kinds(curves, samples, communication_seconds)
    values = np.maximum(np.concatenate([times[1:] for times in kinds.times]), kinds.first)
    weights = np.concatenate([np.full(len(t) - 1, c) for t, c in zip(kinds.times, kinds.counts, strict=True)])
    order = np.argsort(values, kind="stable")
    values, held = values[order], np.cumsum(weights[order])
    sizes = np.arange(1, min(samples, int(held[-1])) + 1)
    cost = values[np.searchsorted(held, sizes)] + kinds.communication  # of a step of 1, 2, … samples in all
    full, rest = np.divmod(samples, sizes)
    walls = full * cost + np.where(rest > 0, cost[rest - 1], 0.0)
    equal = walls <= walls.min() * (1.0 + TOLERANCE)
    size = int(sizes[np.where(equal, full + (rest > 0), np.inf).argmin()])

    def deal(count: int) -> NDArray[np.int64]:
        wall = values[np.searchsorted(held, count)]
        return kinds.deal_within(
            float(wall),
            kinds.first,
            lambda ticks: [int(np.searchsorted(times[1:], ticks, side="right")) for times in kinds.times],
            count,
        )

    steps, left = divmod(samples, size)
    parts = [(deal(size), steps)] + ([(deal(left), 1)] if left else [])
    return [tuple((int(dealt[rank]), count) for dealt, count in parts) for rank in range(len(curves))]
