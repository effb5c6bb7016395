"""A rank's speed from one iteration to the next: times at equal work, and whether they moved.

Pure state machines on numbers; the clocks are in :mod:`.clock`.
"""

from __future__ import annotations

from collections import deque

from .config import BalanceConfig
from .decide import RankTimes

__all__ = ["EqualWork", "SpeedWatch"]

MAX_OVERHEAD = 0.15
"""The most that extracting columns and imputing adds to a layer's products, as a share of its dense time."""

BASELINE_ITERATIONS = 8
"""Iterations after an exchange that sharpen the value which later ones are compared with."""


class EqualWork:
    """Scales what a rank measured while pruning back to what its full share would take.

    Pruning γ of the columns leaves ``1 − γ`` of the products plus an overhead that depends on the device. The overhead
    is taken from the first iterations after the ratio changed, on the assumption that the rank's speed did not change
    at the same moment, within the bounds ``[1 − γ, 1 − γ + MAX_OVERHEAD]`` of what resizing can cost.
    """

    def __init__(self, calibration_iterations: int) -> None:
        self._calibration_iterations = calibration_iterations
        self._ratio = 0.0
        self._dense_seconds: float | None = None
        self._dense_seconds_before: float | None = None
        self._measured: list[float] = []

    def normalise(self, work_seconds: float, matmul_seconds: float, ratio: float) -> RankTimes:
        """The rank's times at its full share, from an iteration in which it pruned ``ratio`` of it."""
        if ratio != self._ratio:
            self._ratio, self._measured, self._dense_seconds_before = ratio, [], self._dense_seconds
        if ratio > 0 and len(self._measured) < self._calibration_iterations:
            self._measured.append(matmul_seconds)
        self._dense_seconds = matmul_seconds / self._share_of_dense_time()
        return RankTimes(work_seconds - matmul_seconds + self._dense_seconds, self._dense_seconds)

    def _share_of_dense_time(self) -> float:
        if self._ratio == 0.0:
            return 1.0
        least = 1.0 - self._ratio
        if not self._dense_seconds_before:
            return least
        measured = sum(self._measured) / len(self._measured)
        return min(max(measured / self._dense_seconds_before, least), least + MAX_OVERHEAD)


class SpeedWatch:
    """Notices when a rank's equal-work time has moved by more than the threshold since the last exchange."""

    def __init__(self, config: BalanceConfig) -> None:
        self._config = config
        self._skip = config.warmup_iterations
        self._recent: deque[RankTimes] = deque(maxlen=config.patience)
        self._baseline_seconds: float | None = None
        self._baseline_count = 0

    def observe(self, times: RankTimes) -> bool:
        """Take in an iteration; True if the group has to exchange its times.

        That is when the first iterations are in, and when ``patience`` iterations in a row were off the value of the
        last exchange, all in the same direction, by more than the threshold.
        """
        if self._skip > 0:
            self._skip -= 1
            return False
        self._recent.append(times)
        if len(self._recent) < self._config.patience:
            return False
        if self._baseline_seconds is None:
            return True
        changes = [recent.work_seconds / self._baseline_seconds - 1.0 for recent in self._recent]
        if min(changes) > self._config.threshold or max(changes) < -self._config.threshold:
            return True
        if self._baseline_count < BASELINE_ITERATIONS and abs(changes[-1]) <= self._config.threshold:
            self._baseline_count += 1
            self._baseline_seconds += (times.work_seconds - self._baseline_seconds) / self._baseline_count
        return False

    @property
    def ready(self) -> bool:
        """Whether there is something to exchange."""
        return len(self._recent) == self._config.patience

    def current(self) -> RankTimes:
        """The mean of the latest iterations."""
        count = len(self._recent)
        return RankTimes(
            sum(times.work_seconds for times in self._recent) / count,
            sum(times.matmul_seconds for times in self._recent) / count,
        )

    def exchanged(self) -> None:
        """From now on changes are counted from :meth:`current`."""
        self._baseline_seconds = self.current().work_seconds
        self._baseline_count = len(self._recent)
