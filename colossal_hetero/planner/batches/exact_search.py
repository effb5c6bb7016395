"""Exact search for the division of a global batch with the least wall time; used by :func:`.allocation.allocate`."""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .time_curve import Curve

__all__ = [
    "TOLERANCE",
    "Runs",
    "exact_per_rank",
    "exact_shared",
    "exact_synchronized",
    "split_evenly",
    "split_per_rank",
]

Runs = tuple[tuple[int, int], ...]
"""One rank's micro-batches in running order: pairs (samples, number of such micro-batches)."""

_PerKind = Sequence[int] | NDArray[np.int64]

TOLERANCE = 1e-10
"""Relative difference below which wall times are equal: sums of floats depend that much on their order."""

# [Note: the order statistic] Let h_i(n) be the least time in which rank i runs n samples; it never decreases with n.
# The time of N samples is the least t with Σ N_i(t) ≥ N, where N_i(t) is the largest n with h_i(n) ≤ t. That is the
# N-th smallest of all values h_i(1), h_i(2), …, but at least max_i h_i(0), because ranks without samples run too. Ranks
# of one kind are computed once and counted by their number. The three problems differ in h, with s the time curve (h_i
# also has the rank's fixed time per global batch in the first two, for n = 0 too):
#
# - accumulation "per_rank", stages 0 and 1: h(n) = min_b ⌊n/b⌋·s(b) + s(n mod b). For given b and t, ⌊t/s(b)⌋ full
#   micro-batches fit, and then as many samples as fit into the remaining time. N(t) is the maximum over b.
# - accumulation "shared", stages 0 and 1: all ranks run G micro-steps. h(n) = (G − r)·s(q) + r·s(q+1) with q, r =
#   divmod(n, G). N(t) has a closed form for all G at once: one pass shows which G can still beat the best time.
# - stages 2 and 3: in one micro-step h(n) = s(n). Let F(m) be the time of a micro-step of m samples over all ranks. One
#   sort gives F(m) for all m, and the best m minimizes ⌊N/m⌋·(F(m) + comm) + (F(N mod m) + comm).
#
# [Note: smallest micro-batch] With a smallest micro-batch of b₀ samples, the times up to b₀ are equal, also for a rank
# without samples. A rank runs no samples or, in G micro-steps, at least G·b₀, split evenly. If N ≥ R·G·b₀ for R ranks,
# every rank can have G·b₀ at no cost, and nothing else changes. Otherwise q = ⌊N / G·b₀⌋ < R ranks have samples, and N
# samples can be run in time t if the sum of the q largest N_i(t) is at least N. The form "per_rank" is not possible:
# its last micro-batch would be too small.
#
# [Note: ticks] Seconds are rounded to whole ticks. A tick is a power of two of seconds, at most 2^-50 of the wall time
# of micro-steps of one sample on every rank, which is always possible. Sums, products and rounded-down quotients of
# such numbers are exact in float64, so no comparison depends on rounding.


class CurveKinds:
    """Ranks grouped by curve, in an order that does not depend on the order of the ranks; times in ticks."""

    def __init__(
        self,
        curves: Sequence[Curve],
        samples: int,
        communication_seconds: float = 0.0,
        fixed_seconds: Sequence[float] | None = None,
    ) -> None:
        fixed = [0.0] * len(curves) if fixed_seconds is None else fixed_seconds
        by_object: dict[tuple[int, float], list[int]] = {}
        for rank, (curve, seconds) in enumerate(zip(curves, fixed, strict=True)):
            by_object.setdefault((id(curve), seconds), []).append(rank)
        by_value: dict[tuple[int, bytes, float], list[int]] = {}
        for (_, fixed_of_kind), ranks in by_object.items():
            held = curves[ranks[0]].seconds[: samples + 1]
            by_value.setdefault((len(held), held.tobytes(), fixed_of_kind), []).extend(ranks)
        keys = sorted(by_value)
        self.ranks = [sorted(by_value[key]) for key in keys]
        self.counts = np.array([len(ranks) for ranks in self.ranks])
        times_by_kind = [np.frombuffer(key[1]) for key in keys]
        self.min_batch = max(curve.min_batch for curve in curves)
        self.max_steps = math.ceil(samples / len(curves)) if self.min_batch == 1 else samples // self.min_batch
        """Largest useful number of micro-steps; if ``min_batch`` is 1, one sample on every rank is possible."""
        longest = max(float(times[1 if self.min_batch == 1 else -1]) for times in times_by_kind)
        bound = self.max_steps * (longest + communication_seconds) + max(fixed)
        tick = math.ldexp(1.0, math.frexp(bound)[1] - 51)
        self.times = [np.maximum(np.rint(times / tick), 1.0) for times in times_by_kind]
        """By kind, ``[min(max_batch, samples) + 1]``: ticks of a micro-batch, by its samples."""
        self.first = float(max(times[self.min_batch] for times in self.times))
        """Ticks of the shortest micro-step, with at most ``min_batch`` samples on every rank."""
        self.fixed = np.rint(np.array([key[2] for key in keys]) / tick)
        """By kind: ticks per global batch that do not depend on its micro-batches."""
        longest_step = 2.0 * max(times[-1] for times in self.times)
        self.enough = float(
            self.least(np.array([self.max_steps]))[0]
            if self.min_batch == 1
            else self.max_steps * longest_step + self.fixed.max()
        )
        """Ticks in which all samples can be run, if they can be run at all."""
        self.communication = float(np.rint(communication_seconds / tick))
        self.samples = samples
        self.world_size = len(curves)

    @property
    def largest(self) -> NDArray[np.int64]:
        return np.array([len(times) - 1 for times in self.times])

    def together(self, room: NDArray[Any], floor: NDArray[Any] | int, samples: int) -> NDArray[np.float64]:
        """Most samples up to ``samples``, if a rank runs none, or ``floor [n]`` to ``room [kinds, n]`` of them."""
        if self.min_batch == 1:
            return np.asarray(self.counts @ room)
        used = np.minimum(samples // floor, self.world_size)
        order = np.argsort(-room, axis=0, kind="stable")
        counts = self.counts[order]
        before = np.cumsum(counts, axis=0) - counts
        return np.asarray((np.take_along_axis(room, order, axis=0) * np.clip(used - before, 0, counts)).sum(axis=0))

    def least(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Ticks of ``steps`` micro-steps with at most one sample on every rank, and of the fixed time."""
        one = np.array([times[1] for times in self.times])
        return np.asarray((self.fixed[:, None] + one[:, None] * steps).max(axis=0))

    def distribute(self, minimum: _PerKind, maximum: _PerKind, samples: int) -> NDArray[np.int64]:
        """Each rank's part of ``samples``, within ``minimum..maximum`` of its kind, with the least sum of squares."""
        low, high = np.asarray(minimum), np.asarray(maximum)
        below, level = int(low.min()), int(high.max())  # all samples fit at `level`
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
        parts = np.zeros(self.world_size, dtype=np.int64)
        for kind, ranks in enumerate(self.ranks):
            parts[ranks] = base[kind]
            if grows[kind]:
                more = min(rest, len(ranks))
                parts[ranks[:more]] += 1
                rest -= more
        assert parts.sum() == samples
        return parts

    def distribute_within(
        self, ticks: float, min_ticks: float, capacity: Callable[[float], _PerKind], samples: int, floor: int = 1
    ) -> NDArray[np.int64]:
        """Each rank's part of ``samples``, where ``ticks`` is the least time in which all can be run."""
        if self.min_batch > 1 and floor * self.world_size > samples:
            return self._among_few(capacity(ticks), floor, samples)
        less = math.floor(ticks * (1.0 - TOLERANCE)) if ticks * TOLERANCE > 1.0 else ticks - 1.0
        minimum = capacity(less) if less >= min_ticks else [0] * len(self.ranks)
        if self.min_batch > 1:
            minimum = np.maximum(minimum, floor)
        return self.distribute(minimum, capacity(ticks), samples)

    def _among_few(self, room: _PerKind, floor: int, samples: int) -> NDArray[np.int64]:
        by_room = sorted((-int(room[kind]), rank) for kind, ranks in enumerate(self.ranks) for rank in ranks)
        parts = np.zeros(self.world_size, dtype=np.int64)
        growing = []
        for negative, rank in by_room[: samples // floor]:
            parts[rank] = floor
            if -negative > floor:
                growing.append((floor, rank, -negative))
        heapq.heapify(growing)
        for _ in range(samples - int(parts.sum())):
            part, rank, most = heapq.heappop(growing)
            parts[rank] = part + 1
            if part + 1 < most:
                heapq.heappush(growing, (part + 1, rank, most))
        return parts

    def by_rank(self, per_kind: Sequence[dict[int, Runs]], parts: NDArray[np.int64]) -> list[Runs]:
        runs: list[Runs] = [()] * self.world_size
        for kind, ranks in enumerate(self.ranks):
            for rank in ranks:
                runs[rank] = per_kind[kind][int(parts[rank])]
        return runs


def split_evenly(samples: int, steps: int) -> Runs:
    """``samples`` in ``steps`` micro-batches that differ by at most one sample, the larger ones first."""
    size, larger = divmod(samples, steps)
    return tuple((b, count) for b, count in ((size + 1, larger), (size, steps - larger)) if count)


def split_per_rank(samples: int, size: int) -> Runs:
    """Micro-batches of ``size`` and a last one with the remainder; without samples, one micro-batch of size 0."""
    full, rest = divmod(samples, size) if samples else (0, 0)
    return tuple((b, count) for b, count in ((size, full), (rest, 1)) if count and b) or ((0, 1),)


def exact_shared(curves: Sequence[Curve], samples: int, fixed_seconds: Sequence[float] | None = None) -> list[Runs]:
    """Each rank's runs in stages 0 and 1, with equally many micro-steps; ``fixed_seconds`` by rank."""
    kinds = CurveKinds(curves, samples, fixed_seconds=fixed_seconds)

    # Ticks by kind and micro-batch, infinite if it does not fit: ``[kinds, largest + 2]``.
    table = np.full((len(kinds.times), kinds.largest.max() + 2), np.inf)
    for row, times in zip(table, kinds.times, strict=True):
        row[: len(times)] = times

    def capacity(ticks: float, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Samples that one rank of each kind runs in ``ticks`` ≥ ``least(steps)``: ``[kinds, len(steps)]``."""
        free = ticks - kinds.fixed[:, None]
        limits = np.floor(free / steps)
        if 0 < len(steps) < len(table):
            whole = np.stack([(table[:, 1:] <= column[:, None]).sum(axis=1) for column in limits.T], axis=1)
        else:
            whole = np.stack(
                [np.searchsorted(times[1:], row, side="right") for times, row in zip(kinds.times, limits, strict=True)]
            )
        time = np.take_along_axis(table, whole, axis=1)
        extra = np.floor((free - steps * time) / (np.take_along_axis(table, whole + 1, axis=1) - time))
        return np.asarray(np.minimum(steps * whole + extra, samples))

    def total(ticks: float, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        return kinds.together(capacity(ticks, steps), steps * kinds.min_batch, samples)

    def min_ticks(steps: float, enough: float) -> float:
        """Least ticks in which all samples can be run in ``steps`` micro-steps; they can in ``enough``."""
        one = np.array([steps])
        low, high = float(kinds.least(one)[0]) - 1.0, enough
        while high - low > 1.0:
            middle = math.floor((low + high) / 2)
            low, high = (low, middle) if total(middle, one)[0] >= samples else (middle, high)
        return high

    fewest = float(math.ceil(samples / int(kinds.counts @ kinds.largest)))
    every = np.arange(fewest, kinds.max_steps + 1)
    shortest = kinds.least(every)
    wall = kinds.enough
    candidates = every
    while True:
        target = min(wall - 1.0, math.floor(wall * (1.0 - TOLERANCE)))
        candidates = candidates[kinds.least(candidates) <= target]
        room = total(target, candidates)
        candidates, room = candidates[room >= samples], room[room >= samples]
        if len(candidates) == 0:
            break
        # The candidate that runs most samples in this time is likely to be the best, or close to it.
        wall = min_ticks(candidates[room.argmax()], target)
    if kinds.min_batch > 1 and wall == kinds.enough:
        raise _no_division(samples, kinds.min_batch)
    # Among equal wall times, take the fewest micro-steps.
    enough = math.ceil(wall * (1.0 + TOLERANCE))
    candidates = every[shortest <= enough]
    steps = float(candidates[total(enough, candidates) >= samples][0])
    wall = min_ticks(steps, enough)
    parts = kinds.distribute_within(
        wall,
        float(kinds.least(np.array([steps]))[0]),
        lambda ticks: capacity(ticks, np.array([steps]))[:, 0].astype(int),
        samples,
        int(steps) * kinds.min_batch,
    )
    splits = [{int(n): split_evenly(int(n), int(steps)) for n in np.unique(parts[ranks])} for ranks in kinds.ranks]
    return kinds.by_rank(splits, parts)


def exact_per_rank(curves: Sequence[Curve], samples: int, fixed_seconds: Sequence[float] | None = None) -> list[Runs]:
    """Each rank's runs in stages 0 and 1, with its own number of micro-steps; else as :func:`exact_shared`."""
    kinds = CurveKinds(curves, samples, fixed_seconds=fixed_seconds)

    def capacities(kind: int, ticks: float, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Samples that a rank of ``kind`` runs in ``ticks``, by the size of its full micro-batches."""
        times, free = kinds.times[kind], ticks - kinds.fixed[kind]
        full = np.floor(free / times[sizes])
        rest = np.searchsorted(times[1:], free - full * times[sizes], side="right")
        return np.asarray(np.minimum(full * sizes + rest, samples))

    # Bisection on the time: `high` is long enough for all samples, `low` is not. A size remains a candidate as long as
    # it runs at least as many samples in `high` as the best size in `low`.
    sizes = [np.arange(1, len(times)) for times in kinds.times]
    least, high = (float(kinds.least(np.array([steps]))[0]) for steps in (1, kinds.max_steps))
    low = least - 1.0
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
        keep = [reachable >= needed for reachable, needed in zip(at_high, best, strict=True)]
        sizes = [each[kept] for each, kept in zip(sizes, keep, strict=True)]
        at_high = [each[kept] for each, kept in zip(at_high, keep, strict=True)]

    every = [np.arange(1, len(times)) for times in kinds.times]
    parts = kinds.distribute_within(
        high,
        least,
        lambda ticks: [int(capacities(kind, ticks, each).max()) for kind, each in enumerate(every)],
        samples,
    )

    def split(kind: int, count: int) -> Runs:
        """The fastest split; among equal ones the fewest micro-steps, then the smallest full micro-batch."""
        if count == 0:
            return split_per_rank(0, 1)
        times, sizes = kinds.times[kind], every[kind][:count]
        full, rest = np.divmod(count, sizes)
        ticks = full * times[sizes] + np.where(rest > 0, times[rest], 0.0)
        steps = np.where(ticks <= ticks.min() * (1.0 + TOLERANCE), full + (rest > 0), np.inf)
        return split_per_rank(count, int(sizes[steps.argmin()]))

    splits = [{int(n): split(kind, int(n)) for n in np.unique(parts[ranks])} for kind, ranks in enumerate(kinds.ranks)]
    return kinds.by_rank(splits, parts)


def exact_synchronized(curves: Sequence[Curve], samples: int, communication_seconds: float) -> list[Runs]:
    """Each rank's runs in stages 2 and 3, where the ranks synchronize at every micro-step."""
    kinds = CurveKinds(curves, samples, communication_seconds)
    values = np.maximum(np.concatenate([times[1:] for times in kinds.times]), kinds.first)
    weights = np.concatenate([np.full(len(t) - 1, c) for t, c in zip(kinds.times, kinds.counts, strict=True)])
    order = np.argsort(values, kind="stable")
    values, held = values[order], np.cumsum(weights[order])
    sizes = np.arange(1, min(samples, int(held[-1])) + 1)
    cost = values[np.searchsorted(held, sizes)] + kinds.communication  # a micro-step of 1, 2, … samples over all ranks
    if kinds.min_batch > 1:
        few = sizes[: kinds.min_batch * kinds.world_size - 1]
        cost[: len(few)] = [_ticks_of_few(kinds, values, int(size)) + kinds.communication for size in few]
    full, rest = np.divmod(samples, sizes)
    walls = full * cost + np.where(rest > 0, cost[rest - 1], 0.0)
    if not math.isfinite(walls.min()):
        raise _no_division(samples, kinds.min_batch)
    equal = walls <= walls.min() * (1.0 + TOLERANCE)
    size = int(sizes[np.where(equal, full + (rest > 0), np.inf).argmin()])

    def distribute(count: int) -> NDArray[np.int64]:
        return kinds.distribute_within(
            float(cost[count - 1] - kinds.communication),
            kinds.first,
            lambda ticks: [int(np.searchsorted(times[1:], ticks, side="right")) for times in kinds.times],
            count,
            kinds.min_batch,
        )

    steps, left = divmod(samples, size)
    batches = [(distribute(size), steps)] + ([(distribute(left), 1)] if left else [])
    return [tuple((int(parts[rank]), count) for parts, count in batches) for rank in range(len(curves))]


def _ticks_of_few(kinds: CurveKinds, values: NDArray[np.float64], samples: int) -> float:
    """Ticks of a micro-step of ``samples``, too few for all ranks, among ascending ``values``; infinite for none."""
    if samples < kinds.min_batch:
        return math.inf

    def fits(ticks: float) -> bool:
        room = np.array([[np.searchsorted(times[1:], ticks, side="right")] for times in kinds.times])
        return bool(kinds.together(room, kinds.min_batch, samples)[0] >= samples)

    index = bisect.bisect_left(values, True, key=fits)
    return float(values[index]) if index < len(values) else math.inf


def _no_division(samples: int, min_batch: int) -> ValueError:
    return ValueError(
        f"{samples} samples cannot be divided into micro-batches of at least {min_batch} samples, the fewest that the "
        "model trains with, which all devices hold; use another global batch size"
    )
