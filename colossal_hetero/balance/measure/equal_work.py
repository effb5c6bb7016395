"""A rank's times at its full share of the work, from times that it measured with another load, for reports."""

from __future__ import annotations

from collections import deque
from statistics import mean

from ..decide.plan import RankTimes

__all__ = ["MAX_OVERHEAD", "EqualWork"]

MAX_OVERHEAD = 0.15
"""The largest time that extracting columns, imputing and handling others' units can add to a rank's products, as a
share of the products' time at the rank's full work."""

MIN_RECEIVED = 0.85
"""The shortest time of a load above 1, relative to a proportional time: larger products are more efficient."""

STEADY_ITERATIONS = 8
"""Iterations at one speed from which factors are computed; more would hardly improve them."""


class EqualWork:
    """Scales times that a rank measured at any load to the times of its full share.

    With a load of ``l`` (1 is the rank's full share) products take about ``l`` times as long; the exact factor depends
    on the device. It is measured in the first iterations after the load changed, and limited to
    ``[l, l + MAX_OVERHEAD]`` for a rank that computes less than its share and ``[MIN_RECEIVED·l, l + MAX_OVERHEAD]``
    for one that computes more. If the rank's speed changed at about the same time, the factor cannot be measured and
    ``l`` is used.
    """

    def __init__(self, patience: int) -> None:
        self._load = 1.0
        self._dense: deque[float] = deque(maxlen=patience)
        self._dense_before: float | None = None
        self._calibration: list[float] = []

    def normalize(self, work_seconds: float, matmul_seconds: float, load: float) -> RankTimes:
        """The rank's times at its full share, from an iteration with the given load.

        ``load`` is 1 − resized − migrated + received.

        Raises:
            ValueError: ``load`` is not above zero.
        """
        if not load > 0.0:
            raise ValueError(f"load={load} must be above zero: the speed of a rank without work is unknown")
        if load != self._load:
            self._load, self._calibration = load, []
            steady = self._dense and max(self._dense) <= (1.0 + MAX_OVERHEAD) * min(self._dense)
            self._dense_before = mean(self._dense) if steady else None
        if load != 1.0 and self._is_at_the_same_speed(matmul_seconds):
            self._calibration.append(matmul_seconds)
        dense = matmul_seconds / self._share_of_dense_time()
        self._dense.append(dense)
        return RankTimes(work_seconds - matmul_seconds + dense, dense)

    def _is_at_the_same_speed(self, matmul_seconds: float) -> bool:
        if len(self._calibration) >= STEADY_ITERATIONS:
            return False
        return not self._calibration or abs(matmul_seconds / self._calibration[0] - 1.0) <= MAX_OVERHEAD

    def _share_of_dense_time(self) -> float:
        if self._load == 1.0 or not self._dense_before:
            return self._load
        lower = self._load * (MIN_RECEIVED if self._load > 1.0 else 1.0)
        upper = self._load + MAX_OVERHEAD
        share = mean(self._calibration) / self._dense_before
        if not lower / (1.0 + MAX_OVERHEAD) <= share <= upper * (1.0 + MAX_OVERHEAD):
            return self._load
        return min(max(share, lower), upper)
