"""A rank's speed from one iteration to the next: times at equal work, and whether they moved.

Pure state machines on numbers; the clocks are in :mod:`.clock`.
"""

from __future__ import annotations

from collections import deque
from statistics import mean, median

from .config import BalanceConfig
from .decide import RankTimes

__all__ = ["EqualWork", "SpeedWatch"]

MAX_OVERHEAD = 0.15
"""The most that extracting columns and imputing adds to a layer's products, as a share of their dense time."""

STEADY_ITERATIONS = 8
"""Iterations at one speed that estimates are taken from; more would not make them much sharper."""


class EqualWork:
    """Scales what a rank measured while pruning back to what its full share would take.

    Pruning γ of the columns leaves ``1 − γ`` of the products plus an overhead that depends on the device. The overhead
    is taken from the first iterations after the ratio changed, on the assumption that the rank's speed did not change
    at the same moment, within the bounds ``[1 − γ, 1 − γ + MAX_OVERHEAD]`` of what resizing can cost.
    """

    def __init__(self, patience: int) -> None:
        self._ratio = 1.0
        self._dense: deque[float] = deque(maxlen=patience)
        self._dense_before: float | None = None
        self._calibration: list[float] = []

    def normalise(self, work_seconds: float, matmul_seconds: float, load: float) -> RankTimes:
        """The rank's times at its full share, from an iteration in which it pruned ``ratio`` of it."""
        ratio = load
        if ratio != self._ratio:
            self._ratio, self._calibration = ratio, []
            self._dense_before = mean(self._dense) if self._dense else None
        if ratio != 1 and self._is_at_the_same_speed(matmul_seconds):
            self._calibration.append(matmul_seconds)
        dense = matmul_seconds / self._share_of_dense_time()
        self._dense.append(dense)
        return RankTimes(work_seconds - matmul_seconds + dense, dense)

    def _is_at_the_same_speed(self, matmul_seconds: float) -> bool:
        if len(self._calibration) >= STEADY_ITERATIONS:
            return False
        return not self._calibration or abs(matmul_seconds / self._calibration[0] - 1.0) <= MAX_OVERHEAD

    def _share_of_dense_time(self) -> float:
        if self._ratio == 1.0:
            return 1.0
        least = self._ratio
        if not self._dense_before:
            return least
        return min(max(mean(self._calibration) / self._dense_before, least), least + MAX_OVERHEAD)


class SpeedWatch:
    """Notices when a rank's equal-work time has moved by more than the threshold since the last exchange."""

    def __init__(self, config: BalanceConfig) -> None:
        self._config = config
        self._skip = config.warmup_iterations
        self._steady: deque[RankTimes] = deque(maxlen=max(STEADY_ITERATIONS, config.patience))
        self._baseline_seconds: float | None = None
        self._since_exchange = 0

    def observe(self, times: RankTimes) -> bool:
        """Take in an iteration; True if the group has to exchange its times.

        That is when the first iterations are in, and when ``patience`` iterations in a row were off the value of the
        last exchange, all in the same direction, by more than the threshold.
        """
        if self._skip > 0:
            self._skip -= 1
            return False
        self._steady.append(times)
        if not self.ready:
            return False
        if self._baseline_seconds is None:
            return True
        latest = list(self._steady)[-self._config.patience :]
        changes = [times.work_seconds / self._baseline_seconds - 1.0 for times in latest]
        if min(changes) > self._config.threshold or max(changes) < -self._config.threshold:
            # What came before was another speed.
            self._steady.clear()
            self._steady.extend(latest)
            return True
        self._since_exchange += 1
        if self._since_exchange < STEADY_ITERATIONS:
            self._baseline_seconds = self.current().work_seconds
        return False

    @property
    def ready(self) -> bool:
        """Whether there is something to exchange."""
        return len(self._steady) >= self._config.patience

    def current(self) -> RankTimes:
        """The rank's times at its present speed: medians over the iterations since it moved."""
        return RankTimes(
            median(times.work_seconds for times in self._steady),
            median(times.matmul_seconds for times in self._steady),
        )

    def exchanged(self) -> None:
        """From now on changes are counted from :meth:`current`."""
        self._baseline_seconds = self.current().work_seconds
        self._since_exchange = 0
