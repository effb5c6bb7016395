"""The types of pipelines that slots can form, and how many micro-batches each runs at most in a given time.

[Note: a bound on the micro-batches of all pipelines] A type is a composition: n[k] slots of each kind k. Let v be the
number of micro-batches that a pipeline of the type runs at most in P seconds, a whole number by [Note: a lower bound on
a pipeline's time]. At most D pipelines, x of each type, run at most

    max Σ v·x   with   Σ n[k]·x ≤ N[k] for each kind k,   Σ x ≤ D,   x ≥ 0

micro-batches: the plan's own pipelines are one solution. By duality, this is at most Σ λ[k]·N[k] + D·max(0, max (v − Σ
λ[k]·n[k])) for any prices λ ≥ 0, however they were found. So prices of one problem also bound others: with more time,
other types, fewer pipelines. They are found by linear programming with few of the types; types that are worth more than
their slots are added until there are none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

__all__ = ["PipelineTypes"]

Floats = NDArray[np.float64]

FIRST_TYPES, MORE_TYPES = 64, 32
"""Types with which the linear program starts, and that are added at a time."""
MAX_PROGRAMS = 8
"""Linear programs per problem: prices need not be the best ones."""
ROUNDING = 1e-9
NOT_NEGATIVE = Bounds(0.0, np.inf)


@dataclass(frozen=True, eq=False)
class PipelineTypes:
    """Types of pipelines, and what they need."""

    counts: Floats
    """Slots by kind, ``[types, kinds]``."""
    first_seconds: Floats
    """Of the first micro-batch, ``[options, types]``; see :meth:`.PipelineBounds.options`."""
    further_seconds: Floats
    """Of each further one, ``[options, types]``."""
    min_micro_batches: NDArray[np.int64]
    """That a pipeline runs at least, ``[types]``."""
    max_micro_batches: int
    """Of all pipelines together."""

    def micro_batches(self, seconds: float) -> Floats:
        """How many micro-batches a pipeline of each type runs at most in this time, ``[types]``; 0 if too few."""
        further = ((seconds - self.first_seconds) / self.further_seconds).max(axis=0, initial=-1.0)
        most = np.minimum(np.floor(further * (1 + ROUNDING) + ROUNDING) + 1.0, self.max_micro_batches)
        return np.where(most >= self.min_micro_batches, most, 0.0)

    def least_seconds(
        self, available: NDArray[np.int64], pipelines: int, low: float, high: float, known: Floats, precision: float
    ) -> tuple[float, Floats]:
        """A lower bound on the time in which all micro-batches can be run, at most ``high``; and the last prices.

        Args:
            available: Slots by kind.
            pipelines: How many there are at most.
            low: A lower bound that is known.
            high: A bound that is not larger than this is enough.
            known: Prices to begin with, at least one row, ``[rows, kinds]``.
            precision: Relative; the bound may be lower than the best one by about this share.
        """
        problem = _Packing(self, available, pipelines)
        prices, tried, step = problem.best(known, high), high, precision
        low = problem.impossible_until(prices, low, high, precision)
        while low < high and high > low * (1 + precision):
            is_possible, prices = problem.prices(tried, prices)
            if is_possible:
                high = tried
            # The prices of a time prove nearly as much as possible also for times a little below it.
            low = problem.impossible_until(prices, low, high, precision)
            tried = min((low + high) / 2, low * (1 + step))
            step *= 2
        return low, prices


class _Packing:
    """All micro-batches are to be run by at most so many pipelines of some types.

    Args:
        types: of pipelines.
        available: Slots by kind.
        pipelines: How many there are at most.
    """

    def __init__(self, types: PipelineTypes, available: NDArray[np.int64], pipelines: int) -> None:
        self._types, self._available, self._pipelines = types, available, pipelines
        self._limits = np.append(available, pipelines).astype(float)
        self._needed = types.max_micro_batches * (1 - ROUNDING)

    def best(self, known: Floats, seconds: float) -> Floats:
        """The row of prices ``[rows, kinds]`` by which the fewest micro-batches can be run in this time."""
        worth = self._types.micro_batches(seconds) - known @ self._types.counts.T
        most = known @ self._available + self._pipelines * worth.max(axis=1, initial=0.0)
        return np.asarray(known[int(most.argmin())])

    def _too_few(self, prices: Floats, micro_batches: Floats) -> bool:
        """Whether these prices prove that not all micro-batches can be run, from those of each type."""
        worth = micro_batches - self._types.counts @ prices
        return bool(prices @ self._available + self._pipelines * worth.max(initial=0.0) < self._needed)

    def impossible_until(self, prices: Floats, low: float, high: float, precision: float) -> float:
        """The last time up to which these prices prove that it is impossible, at least ``low`` and at most ``high``."""
        if low >= high or self._too_few(prices, self._types.micro_batches(high)):
            return high
        while high > low * (1 + precision / 4):
            middle = (low + high) / 2
            if self._too_few(prices, self._types.micro_batches(middle)):
                low = middle
            else:
                high = middle
        return low

    def prices(self, seconds: float, first: Floats) -> tuple[bool, Floats]:
        """Whether it may be possible in this time, and prices; if not, they prove it.

        Args:
            seconds: for all micro-batches.
            first: Prices that decide which types the linear program starts with.
        """
        worth, counts = self._types.micro_batches(seconds), self._types.counts
        chosen, prices = self._promising(worth, first), np.zeros_like(first)
        if not len(chosen):
            return False, prices
        for _ in range(MAX_PROGRAMS):
            rows = np.column_stack([counts[chosen], np.ones(len(chosen))])
            found = milp(self._limits, constraints=LinearConstraint(rows, worth[chosen]), bounds=NOT_NEGATIVE)
            if found.status != 0:
                break
            *slots, each = np.maximum(found.x, 0.0).tolist()
            prices = np.array(slots)
            if self._too_few(prices, worth):
                return False, prices
            gain = worth - counts @ prices - each
            better = np.flatnonzero(gain > ROUNDING * max(worth.max(), 1.0))
            if not len(better) or found.fun >= self._needed:
                break
            chosen = np.union1d(chosen, better[_largest(gain[better], MORE_TYPES)])
        return True, prices

    def _promising(self, worth: Floats, prices: Floats) -> NDArray[np.int64]:
        """Types that gain much by these prices, absolutely or relatively."""
        able = np.flatnonzero(worth > 0)
        cost = self._types.counts[able] @ prices
        half = FIRST_TYPES // 2
        ratio = worth[able] / np.maximum(cost, 1e-300)
        return able[np.union1d(_largest(ratio, half), _largest(worth[able] - cost, half))]


def _largest(values: Floats, number: int) -> NDArray[np.int64]:
    """The places of the largest values."""
    return np.argpartition(-values, number)[:number] if len(values) > number else np.arange(len(values))
