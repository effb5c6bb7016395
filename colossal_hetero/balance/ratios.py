"""Pruning ratios: per rank from measured times, and per layer from the rank's ratio (SEMI, Sec. III)."""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .config import Pruning


def resize_ratios(
    work_seconds: ArrayLike, matmul_seconds: ArrayLike, reference_seconds: float, max_resize: float
) -> np.ndarray:
    """``γ_i = (T_i − T_ref) / M_i``, clipped to [0, γ_max] (SEMI, Eq. 1), or 0 if ``M_i = 0``; float64 ``[ranks]``."""
    work, matmul = np.asarray(work_seconds, dtype=float), np.asarray(matmul_seconds, dtype=float)
    excess = np.maximum(work - reference_seconds, 0.0)
    # Products are compared, because dividing by a tiny M could overflow.
    beyond = excess >= max_resize * matmul
    ratios = np.divide(excess, matmul, out=np.full_like(excess, max_resize), where=~beyond)
    return np.where(matmul > 0, ratios, 0.0)


def layer_ratios(
    ratio: float, candidate_shares: Sequence[float], costs: Sequence[float], rules: Pruning, max_resize: float
) -> np.ndarray:
    """``γ_k`` per layer for the rank's ``ratio`` γ (SEMI, Sec. III-B, Algorithm 1 line 11); float64 ``[layers]``.
    ``candidate_shares`` are the shares of columns whose weights vary little, ``costs`` (c_k) the layers' matmul times
    in any unit. ``printed``: ``max(share, α·γ)``. ``budgeted`` scales these so that ``Σ c_k γ_k = γ Σ c_k`` with each
    within [0, γ_max]; γ itself must not exceed γ_max."""
    shares, cost = np.asarray(candidate_shares, dtype=float), np.asarray(costs, dtype=float)
    if ratio == 0.0 or len(shares) == 0:
        return np.zeros(len(shares))
    printed = np.maximum(shares, rules.decay * ratio)
    if rules.ratio_form == "printed":
        limited: np.ndarray = np.minimum(printed, max_resize)
        return limited
    assert ratio <= max_resize
    full = np.zeros(len(shares), dtype=bool)
    while not full.all():
        # Layers at the maximum stay there; others share the rest in proportion to their printed ratio, or evenly.
        weight = np.where(full, 0.0, printed)
        free = weight / weight.max() if weight.any() else np.where(full, 0.0, 1.0)
        rest = ratio * cost.sum() - max_resize * cost[full].sum()
        ratios = np.where(full, max_resize, free * rest / (cost * free).sum())
        over = ~full & (ratios > max_resize)
        if not over.any():
            return np.maximum(ratios, 0.0)
        full |= over
    return np.full(len(shares), max_resize)


@dataclass(frozen=True)
class Line:
    """The time of a rank with ``units`` units and a little more or fewer: ``seconds + slope·(n − units)``."""

    units: float
    seconds: float
    slope: float
    slope_above: float  # slope from the rank's own full share on, where it computes other ranks' units, too
    full: float

    def __call__(self, units: float) -> float:
        return self._to_full(units) - self._to_full(self.units) + self.seconds

    def _to_full(self, units: float) -> float:
        beyond = units - self.full
        return beyond * (self.slope_above if beyond > 0 else self.slope)


@dataclass(frozen=True)
class KindProblem:
    """Blocks of one kind, with each rank's speed and the cost of sending."""

    units: int
    grain: int  # number of units that move together, at most ``units``
    max_taken: int  # number of units that a rank has memory for in addition to its own
    lines: Sequence[Line]  # work by rank, in seconds of an iteration
    seconds_per_unit: float = 0.0  # seconds that each moved unit adds to an iteration (Φ1)

    @property
    def nothing(self) -> tuple[int, ...]:
        """The counts by rank if nothing moves."""
        return (self.units,) * len(self.lines)

    def moved(self, counts: Sequence[int]) -> int:
        return sum(max(0, self.units - count) for count in counts)

    def seconds(self, counts: Sequence[int]) -> float:
        """Seconds of the slowest rank, if the ranks compute ``counts`` units, and of sending."""
        slowest = max(line(count) for line, count in zip(self.lines, counts, strict=True))
        return slowest + self.seconds_per_unit * self.moved(counts)


def fastest_counts(kind: KindProblem) -> tuple[int, ...]:
    """Units that each rank should compute for the shortest time; their sum is ``kind.units`` times the number of ranks.

    The result minimizes ``max_i line_i(n_i) + seconds_per_unit·moved`` (docs/algorithms.md, 1.8) over all ``n_i ≥ 1``
    that differ from the full share by whole grains; of equally fast divisions it is one that moves the least.
    """
    lines, full = kind.lines, kind.units
    least = -((full - 1) // kind.grain)
    most = kind.max_taken // kind.grain
    best, best_seconds = kind.nothing, kind.seconds(kind.nothing)
    # No division is faster than the slowest rank with a single grain less than it could give away.
    times = [[line(full + grains * kind.grain) for grains in range(least, most + 1)] for line in lines]
    earliest = max(of_rank[0] for of_rank in times)
    deadlines = sorted({t for of_rank in times for t in of_rank if earliest <= t < best_seconds})
    for deadline in deadlines:
        if deadline >= best_seconds:
            break
        capacity = [bisect_right(of_rank, deadline) - 1 + least for of_rank in times]
        if sum(capacity) < 0:
            continue
        given = -sum(min(0, grains) for grains in capacity)
        seconds = deadline + kind.seconds_per_unit * given * kind.grain
        if seconds < best_seconds:
            best_seconds = seconds
            grains = [min(0, count) for count in capacity]
            _hand_out(given, grains, capacity, kind)
            best = tuple(full + count * kind.grain for count in grains)
        if kind.seconds_per_unit == 0.0:
            break
    return best


def _hand_out(given: int, grains: list[int], capacity: Sequence[int], kind: KindProblem) -> None:
    """Give each of ``given`` grains to the rank that finishes first with it; changes ``grains``."""
    lines = kind.lines
    queue = [(lines[rank](kind.units + kind.grain), rank) for rank, most in enumerate(capacity) if most > 0]
    heapq.heapify(queue)
    for _ in range(given):
        _, rank = heapq.heappop(queue)
        grains[rank] += 1
        if grains[rank] < capacity[rank]:
            heapq.heappush(queue, (lines[rank](kind.units + (grains[rank] + 1) * kind.grain), rank))
