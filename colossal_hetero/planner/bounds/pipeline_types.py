"""The types of pipelines that slots can form, and how many micro-batches each runs at most in a given time.

[Note: a bound on the micro-batches of all pipelines] A type is a composition: n[k] slots of each kind k. Let v be the
number of micro-batches that a pipeline of the type runs at most in P seconds, a whole number by [Note: a lower bound on
a pipeline's time]. At most D pipelines, x of each type, run at most

    max Σ v·x   with   Σ n[k]·x ≤ N[k] for each kind k,   Σ x ≤ D,   x ≥ 0

micro-batches: the plan's own pipelines are one solution. By duality, this is at most Σ λ[k]·N[k] + D·max(0, max (v − Σ
λ[k]·n[k])) for any prices λ ≥ 0, however they were found (``packing.py``). So prices of one time also prove a bound for
others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .packing import Basis, Packed, pack

__all__ = ["PipelineTypes"]

Floats = NDArray[np.float64]

ROUNDING = 1e-9


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
        self, available: NDArray[np.int64], pipelines: int, low: float, high: float, first: Basis, precision: float
    ) -> tuple[float, Basis]:
        """A lower bound on the time in which all micro-batches can be run, at most ``high``; and the last basis.

        Args:
            available: Slots by kind.
            pipelines: How many there are at most.
            low: A lower bound that is known.
            high: A bound that is not larger than this is enough.
            first: Basis to begin with, of other types with the same counts; empty for none.
            precision: Relative; the bound may be lower than the best one by about this share.
        """
        limits, needed = np.append(available, pipelines).astype(float), self.max_micro_batches * (1 - ROUNDING)

        def packed(seconds: float) -> Packed:
            return pack(self.counts, self.micro_batches(seconds), limits, needed, basis)

        def are_too_few(prices: Floats, seconds: float) -> bool:
            """Whether these prices prove that not all micro-batches can be run in this time."""
            worth = self.micro_batches(seconds) - self.counts @ prices
            return bool(prices @ limits[:-1] + limits[-1] * worth.max(initial=0.0) < needed)

        basis, tried, step = first, high, precision
        while low < high and high > low * (1 + precision):
            is_too_little, prices, basis = packed(tried)
            if is_too_little:
                low = tried
            else:
                high = tried
                # The prices of a time prove nearly as much as possible also for times a little below it.
                below, above = low, high
                while above > below * (1 + precision / 4):
                    middle = (below + above) / 2
                    below, above = (middle, above) if are_too_few(prices, middle) else (below, middle)
                low = below
            tried = min((low + high) / 2, low * (1 + step))
            step *= 2
        return low, basis
