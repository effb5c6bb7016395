"""How exact the typical value of repeated measurements is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["relative_error"]

SPREAD_OF_QUARTILES = 1.349
"""Between the quartiles of a normal distribution, in standard deviations."""
MEDIAN_AGAINST_MEAN = math.sqrt(math.pi / 2)
"""Standard error of the median of many normal values, in standard errors of their mean."""
MAX_ERROR = 0.99


def relative_error(values: Sequence[float], *, of_median: bool) -> float:
    """Standard error of the median or the mean of values, as a share of it; 0 for fewer than three values.

    The values count as independent. That of a median is computed from the quartiles, so that a few values that were
    disturbed do not change it.

    Args:
        values: above 0.
        of_median: whether the typical value is the median; otherwise it is the mean.
    """
    if len(values) < 3:
        return 0.0
    if not of_median:
        error = statistics.stdev(values) / statistics.fmean(values)
    else:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        error = MEDIAN_AGAINST_MEAN * (high - low) / SPREAD_OF_QUARTILES / middle
    return min(error / math.sqrt(len(values)), MAX_ERROR)
