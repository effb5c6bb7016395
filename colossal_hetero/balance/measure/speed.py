"""A rank's speed over iterations: its times at equal work, and whether they have changed.

The classes only compute with numbers; the clocks are in :mod:`.clock`.
"""

from __future__ import annotations

from collections import deque
from statistics import mean, median

from ..config import BalanceConfig
from ..decide.plan import RankTimes
from .damping import Damping

__all__ = ["EqualWork", "SpeedWatch"]

MAX_OVERHEAD = 0.15
"""The largest time that extracting columns, imputing and handling others' units can add to a rank's products, as a
share of the products' time at the rank's full work."""

MIN_RECEIVED = 0.85
"""The shortest time of a load above 1, relative to a proportional time: larger products are more efficient."""

STEADY_ITERATIONS = 8
"""Iterations at one speed from which estimates are computed; more would hardly improve them."""


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


class SpeedWatch:
    """Detects that a rank's equal-work time has changed by more than the threshold since the last exchange."""

    def __init__(self, config: BalanceConfig) -> None:
        self._config = config
        self._skip = config.warmup_iterations
        self._damping = Damping(config.patience)
        self._steady: deque[RankTimes] = deque(maxlen=max(STEADY_ITERATIONS, config.patience))
        self._deviating: list[RankTimes] = []
        self._slower = False
        self._baseline_seconds: float | None = None
        self._since_exchange = 0

    def observe(self, times: RankTimes) -> bool:
        """Take in an iteration; returns whether the group has to exchange its times.

        That is so after the first iterations, and while enough consecutive iterations differ from the last exchanged
        time by more than the threshold in the same direction: ``patience`` iterations, or more if they are slower and
        the rank's speed has flickered (:mod:`.damping`).
        """
        if self._skip > 0:
            self._skip -= 1
            return False
        if self._baseline_seconds is None:
            self._steady.append(times)
            return self.ready
        change = times.work_seconds / self._baseline_seconds - 1.0
        off = abs(change) > self._config.threshold
        if not off or (change > 0.0) != self._slower:
            # The deviation did not last.
            self._deviating = []
        if off:
            self._slower = change > 0.0
            self._deviating.append(times)
        else:
            self._steady.append(times)
            self._since_exchange += 1
            if self._since_exchange < STEADY_ITERATIONS:
                self._baseline_seconds = self.current().work_seconds
        # The patience for this iteration; observing it may change the patience.
        patience = self._damping.patience if self._slower else self._config.patience
        self._damping.observed(self._slower and len(self._deviating) >= self._config.patience)
        if not off or len(self._deviating) < patience:
            return False
        # Earlier iterations had another speed.
        self._steady.clear()
        self._steady.extend(self._deviating)
        return True

    @property
    def ready(self) -> bool:
        """Whether there are enough iterations for an exchange."""
        return len(self._steady) >= self._config.patience

    def current(self) -> RankTimes:
        """The rank's times at its present speed: medians over the iterations since the speed changed."""
        return RankTimes(
            median(times.work_seconds for times in self._steady),
            median(times.matmul_seconds for times in self._steady),
            median(times.communication_seconds for times in self._steady),
        )

    def exchanged(self) -> None:
        """Measure changes relative to :meth:`current` from now on."""
        if self._deviating and self._steady[-1] is self._deviating[-1]:
            self._deviating = []
        self._baseline_seconds = self.current().work_seconds
        self._since_exchange = 0

    def relieved(self, share: float) -> None:
        """Take note of a new plan, in which this rank prunes or gives away ``share`` of its work."""
        self._damping.relieved(share)
