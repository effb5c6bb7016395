"""A rank's speed from one iteration to the next: times at equal work, and whether they moved.

Pure state machines on numbers; the clocks are in :mod:`.clock`.
"""

from __future__ import annotations

from collections import deque
from statistics import mean, median

from ..config import BalanceConfig
from ..decide.plan import RankTimes
from .damping import Damping

__all__ = ["EqualWork", "SpeedWatch"]

MAX_OVERHEAD = 0.15
"""The most that extracting columns, imputing and handling others' units adds to a rank's products, as a share of what
they take at its full share."""

MIN_RECEIVED = 0.85
"""The least time of a load above 1, as a share of what is proportional: larger products are more efficient."""

STEADY_ITERATIONS = 8
"""Iterations at one speed that estimates are taken from; more would not make them much sharper."""


class EqualWork:
    """Scales what a rank measured at another load back to what its full share would take.

    A load of ``l``, 1 being the rank's full share, takes its products about ``l`` times as long; how long exactly
    depends on the device. That is taken from the first iterations after the load changed, within the bounds
    ``[l, l + MAX_OVERHEAD]`` for a rank that does less than its share and ``[MIN_RECEIVED·l, l + MAX_OVERHEAD]`` for
    one that does more. Where the rank's speed changed at about the same moment nothing can be learnt: it is ``l``.
    """

    def __init__(self, patience: int) -> None:
        self._load = 1.0
        self._dense: deque[float] = deque(maxlen=patience)
        self._dense_before: float | None = None
        self._calibration: list[float] = []

    def normalize(self, work_seconds: float, matmul_seconds: float, load: float) -> RankTimes:
        """The rank's times at its full share, from an iteration in which it did ``load`` of it.

        ``load`` is 1 − resized − migrated + received.

        Raises:
            ValueError: ``load`` is not above zero.
        """
        if not load > 0.0:
            raise ValueError(f"load={load} must be above zero: a rank that did nothing has shown no speed")
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
        least = self._load * (MIN_RECEIVED if self._load > 1.0 else 1.0)
        most = self._load + MAX_OVERHEAD
        share = mean(self._calibration) / self._dense_before
        if not least / (1.0 + MAX_OVERHEAD) <= share <= most * (1.0 + MAX_OVERHEAD):
            return self._load
        return min(max(share, least), most)


class SpeedWatch:
    """Notices when a rank's equal-work time has moved by more than the threshold since the last exchange."""

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
        """Take in an iteration; True if the group has to exchange its times.

        That is when the first iterations are in, and while enough iterations in a row have been off the value of the
        last exchange, all in the same direction, by more than the threshold: ``patience`` of them, or more if they are
        slower and the rank has flickered (:mod:`.damping`).
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
            # So far it was nothing.
            self._deviating = []
        if off:
            self._slower = change > 0.0
            self._deviating.append(times)
        else:
            self._steady.append(times)
            self._since_exchange += 1
            if self._since_exchange < STEADY_ITERATIONS:
                self._baseline_seconds = self.current().work_seconds
        # The patience that holds for this iteration, before it may relax.
        patience = self._damping.patience if self._slower else self._config.patience
        self._damping.observed(self._slower and len(self._deviating) >= self._config.patience)
        if not off or len(self._deviating) < patience:
            return False
        # What came before was another speed.
        self._steady.clear()
        self._steady.extend(self._deviating)
        return True

    @property
    def ready(self) -> bool:
        """Whether there is something to exchange."""
        return len(self._steady) >= self._config.patience

    def current(self) -> RankTimes:
        """The rank's times at the speed that is believed: medians over the iterations since it moved."""
        return RankTimes(
            median(times.work_seconds for times in self._steady),
            median(times.matmul_seconds for times in self._steady),
            median(times.communication_seconds for times in self._steady),
        )

    def exchanged(self) -> None:
        """From now on changes are counted from :meth:`current`."""
        if self._deviating and self._steady[-1] is self._deviating[-1]:
            self._deviating = []
        self._baseline_seconds = self.current().work_seconds
        self._since_exchange = 0

    def relieved(self, share: float) -> None:
        """The group decided on a plan by which this rank prunes or gives away ``share`` of its work."""
        self._damping.relieved(share)
