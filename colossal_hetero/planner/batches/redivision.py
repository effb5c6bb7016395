"""Decide when global batches are divided again: a closed loop on the times that replicas take for their present parts.

[Note: the closed loop] Replicas wait for each other in the sum of gradients. A replica's time for a global batch is
what it needs until it begins to wait. After each interval of training, the times of the present division are compared
with what the time curves say. Their ratios are the replicas' speeds; the best division for these speeds replaces the
present one if iterations are predicted to become shorter by more than the noise of the measurement explains. Errors of
the curves, of the prediction and of the measurement are corrected by the next interval, which is measured in the new
division.

[Note: times of replicas that wait] A device whose time is limited (a CPU quota, a limit of power or temperature) may
save up time while it waits. Its time for the present part is then shorter than it would be for a larger part. So
the time of a replica that waits is an optimistic estimate, and that of a replica for which the others wait is a
reliable one. The last reliable speed is remembered, and replaced by a better, optimistic one only if

- the replica has become faster in the same division, which only a real change explains; or
- it would be the slowest replica now, if the remembered speed were still right; or
- it looked faster for :data:`PATIENCE` checks, in which no step was possible.

Until then, a division is only chosen if the iteration is at most :data:`MAX_RISK` longer if the remembered speed is
right. That is enough for a small step in the right direction, whose result decides. If the step was wrong, optimistic
speeds of that replica are not used for some checks, twice as many each time.

This file reads no clock. All ranks compute the same from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, stdev
from typing import NamedTuple

from .allocation import Allocation, Share
from .replica_speeds import BatchDivider, Speed

__all__ = ["GlobalBatchTime", "Redivision"]

MIN_ITERATIONS = 3
"""Smallest number of global batches from which speeds are computed."""

MIN_SECONDS = 0.5
"""Smallest total time of these global batches. It holds several periods of a CPU quota, which are 0.1 s long."""

WINDOW = 256
"""Largest number of global batches from which speeds are computed."""

MANY = 4
"""Number of global batches from which the longest ones are left out: a single delay is not a change of speed."""
LEFT_OUT = 0.1
"""Share of the global batches that is left out, but at least one."""

ASSUMED_NOISE = 0.03
"""Least relative standard deviation of a replica's time while fewer than :data:`FEW` global batches are known."""
FEW = 8
UNCERTAINTY = 1.5
"""By how much the standard deviation of n < :data:`FEW` values is raised, times n."""

CERTAIN = 3.0
"""How many standard errors a gain must have."""

CHANGED = 2.5
"""How many standard errors a time must differ from earlier ones in the same division to be a change of speed."""
MIN_CHANGE = 0.05
"""Least relative difference that is a change of speed."""

MIN_GROWTH = 0.25
"""Least relative difference by which a replica became so much faster that its former speed is forgotten."""

SLOWEST = 0.02
"""A replica that waits for at most this share of the time is measured reliably."""

REFUTED = 0.03
"""A remembered speed is wrong if the replica would be slower with it than the slowest one by more than this share."""

PROFILE_ERROR = 0.5
"""How much longer than in training a replica's time may be in its profile, without being an optimistic time."""

MAX_RISK = 0.01
"""How much longer an iteration may become if a remembered speed is right and the optimistic one is wrong."""

PATIENCE = 4
"""Number of checks after which an optimistic speed is believed, and for which it is not after a wrong step."""
MAX_DOUBLINGS = 6

REFINEMENTS = 6
"""Number of bisections between an optimistic speed and a remembered one."""


class GlobalBatchTime(NamedTuple):
    """What a replica took for its part of one global batch, without waiting for other replicas."""

    expected_seconds: float
    """What the time curve says for its micro-batches."""
    samples: int
    """Samples that it loaded, including placeholders."""
    work_seconds: float
    """Forward and backward passes, and everything else outside of loading data."""
    data_seconds: float
    """Waiting for data."""

    @property
    def ratio(self) -> float:
        """Measured / expected time."""
        return (self.work_seconds + self.data_seconds) / self.expected_seconds


class _SpeedEstimate(NamedTuple):
    """A replica's speed in the present division."""

    speed: Speed
    error: float
    """Relative standard error."""


class Redivision:
    """Takes in the times of global batches, and says when and by which speeds they are divided again.

    Args:
        divider: divides global batches.
        global_batch_size: samples of a full global batch.
        min_gain: least share by which an iteration must be predicted to become shorter.
    """

    def __init__(self, divider: BatchDivider, global_batch_size: int, min_gain: float) -> None:
        count = len(divider.curves)
        self._divider = divider
        self._samples = global_batch_size
        self._min_gain = min_gain
        self.speeds: tuple[Speed, ...] = (Speed(),) * count
        """The speeds by which global batches are divided, by replica. At first they are those of the curves."""
        self.allocation: Allocation = divider.divide(self.speeds, global_batch_size)
        """The present division of a full global batch."""
        self._window: list[list[GlobalBatchTime]] = [[] for _ in range(count)]
        self._pending: list[list[GlobalBatchTime]] = [[] for _ in range(count)]
        self._skip = 0
        # The last reliable speeds. Passes that were timed for the curves did not wait either.
        self._reliable: list[Speed | None] = [Speed()] * count
        self._is_from_profile = [True] * count
        self._faster = [False] * count
        self._held_back = [0] * count
        self._wrong_steps = [0] * count
        self._distrusted = [0] * count
        self._limits: dict[int, float] = {}

    def skip(self, global_batches: int) -> None:
        """Leave out the next so many global batches: they have the former division, or are the first of a new one."""
        self._skip = global_batches

    def observe(self, times: Sequence[Sequence[GlobalBatchTime]]) -> bool:
        """Take in ``times[replica][global_batch]``, equally many for all; whether :attr:`speeds` have changed.

        If so, global batches must be divided by the new :attr:`speeds`, and :attr:`allocation` is the new division.
        """
        for pending, new in zip(self._pending, times, strict=True):
            pending.extend(new[self._skip :])
        self._skip = max(0, self._skip - len(times[0]))
        if not _are_enough(self._pending):
            return False
        self._take_in()
        if not _are_enough(self._window):
            return False
        estimates = _estimates(self._window)
        self._judge_last_step(estimates)
        speeds = self._decide(estimates)
        self._faster = [False] * len(self._faster)
        if speeds is None:
            return False
        allocation = self._divider.divide(speeds, self._samples)
        self._expect(allocation, estimates)
        self.speeds, self.allocation = speeds, allocation
        self._window = [[] for _ in self._window]
        return True

    def _take_in(self) -> None:
        """Add the pending times to the window. If a speed has changed in the same division, keep those since then."""
        new, self._pending = self._pending, [[] for _ in self._pending]
        earlier = self._window
        self._window = [(old + latest)[-WINDOW:] for old, latest in zip(earlier, new, strict=True)]
        if len(earlier[0]) < MIN_ITERATIONS:
            return
        limits = [
            max(MIN_CHANGE, CHANGED * math.hypot(before.error, after.error))
            for before, after in zip(_estimates(earlier), _estimates(new), strict=True)
        ]
        relative = _against_others(_changes(earlier, new))
        if all(abs(change) <= limit for change, limit in zip(relative, limits, strict=True)):
            return
        most = max(range(len(relative)), key=lambda replica: abs(relative[replica]))
        place = _change_point(self._window, most)
        before = [of_replica[:place] for of_replica in self._window]
        self._window = [of_replica[place:] for of_replica in self._window]
        for replica, (change, limit) in enumerate(zip(_changes(before, self._window), limits, strict=True)):
            self._faster[replica] |= change < -max(limit, MIN_GROWTH)

    def _seconds(self, speed: Speed, replica: int, share: Share | None = None) -> float:
        """What the replica takes for ``share``, or its present part of a full global batch, at ``speed``."""
        sizes = (share or self.allocation.shares[replica]).sizes
        return speed.seconds(self._divider.expected_seconds(replica, sizes), sum(max(size, 1) for size in sizes))

    def _expect(self, allocation: Allocation, estimates: Sequence[_SpeedEstimate]) -> None:
        """Note for each replica with an optimistic speed that gets more samples the time above which this is wrong."""
        self._limits = {}
        for replica, (estimate, old, new) in enumerate(
            zip(estimates, self.allocation.shares, allocation.shares, strict=True)
        ):
            remembered = self._reliable[replica]
            if remembered is not None and remembered != estimate.speed and new.samples > old.samples:
                times = (self._seconds(speed, replica, new) for speed in (estimate.speed, remembered))
                self._limits[replica] = math.sqrt(math.prod(times))

    def _judge_last_step(self, estimates: Sequence[_SpeedEstimate]) -> None:
        """Learn whether the replicas that got more samples in the last step were as fast as they looked."""
        self._distrusted = [max(0, checks - 1) for checks in self._distrusted]
        for replica, limit in self._limits.items():
            if self._seconds(estimates[replica].speed, replica) > limit:
                self._distrusted[replica] = PATIENCE << min(self._wrong_steps[replica], MAX_DOUBLINGS)
                self._wrong_steps[replica] += 1
            else:
                self._wrong_steps[replica] = 0
        self._limits = {}

    def _decide(self, estimates: Sequence[_SpeedEstimate]) -> tuple[Speed, ...] | None:
        """The speeds to divide by from now on; None to keep the division."""
        cautious = self._cautious(estimates)
        measured = tuple(
            other if distrusted else estimate.speed
            for estimate, other, distrusted in zip(estimates, cautious, self._distrusted, strict=True)
        )
        present = tuple(estimate.speed for estimate in estimates)
        now = self._divider.evaluate(present, self.allocation.shares).wall_seconds
        best = self._divider.divide(measured, self._samples)
        noise = CERTAIN * max(estimate.error for estimate in estimates)
        if now / best.wall_seconds - 1.0 <= max(self._min_gain, noise):
            return None

        def is_safe(speeds: tuple[Speed, ...], limit: float) -> bool:
            shares = self._divider.divide(speeds, self._samples).shares
            return self._divider.evaluate(cautious, shares).wall_seconds <= limit

        limit = (1.0 + MAX_RISK) * now
        if is_safe(measured, limit):
            chosen = measured
        else:
            low, high = 0.0, 1.0
            for _ in range(REFINEMENTS):
                middle = (low + high) / 2.0
                low, high = (low, middle) if is_safe(_between(measured, cautious, middle), limit) else (middle, high)
            chosen = _between(measured, cautious, high)
        gains = now / self._divider.evaluate(measured, self._shares(chosen)).wall_seconds - 1.0
        if gains <= 0.0 or (chosen != measured and self._shares(chosen) == self.allocation.shares):
            for replica, (one, other) in enumerate(zip(measured, cautious, strict=True)):
                self._held_back[replica] += one != other
            return None
        return chosen

    def _shares(self, speeds: Sequence[Speed]) -> Sequence[Share]:
        return self._divider.divide(speeds, self._samples).shares

    def _cautious(self, estimates: Sequence[_SpeedEstimate]) -> tuple[Speed, ...]:
        """Each replica's measured speed, or the remembered one if that is slower and may still be right.

        See [Note: times of replicas that wait].
        """
        seconds = [self._seconds(estimate.speed, replica) for replica, estimate in enumerate(estimates)]
        slowest = max(seconds)
        cautious = []
        for replica, (estimate, present) in enumerate(zip(estimates, seconds, strict=True)):
            remembered = self._reliable[replica]
            if present >= (1.0 - SLOWEST) * slowest:
                remembered = estimate.speed
                self._is_from_profile[replica] = False
            elif remembered is not None:
                would_be = self._seconds(remembered, replica)
                margin = max(REFUTED, CERTAIN * estimate.error)
                is_refuted = would_be <= present or would_be > (1.0 + margin) * slowest
                is_refuted |= self._is_from_profile[replica] and would_be <= (1.0 + PROFILE_ERROR) * present
                if self._faster[replica] or is_refuted or self._held_back[replica] >= PATIENCE:
                    remembered = None
            if remembered is None or remembered == estimate.speed:
                self._held_back[replica] = 0
            if self._faster[replica]:
                self._distrusted[replica] = 0
            self._reliable[replica] = remembered
            cautious.append(estimate.speed if remembered is None else remembered)
        return tuple(cautious)


def _between(measured: Sequence[Speed], cautious: Sequence[Speed], share: float) -> tuple[Speed, ...]:
    return tuple(one.towards(other, share) for one, other in zip(measured, cautious, strict=True))


def _changes(before: Sequence[Sequence[GlobalBatchTime]], after: Sequence[Sequence[GlobalBatchTime]]) -> list[float]:
    """By replica, the logarithm of how much longer it takes after a change than before."""
    return [math.log(_whole(new) / _whole(old)) for old, new in zip(before, after, strict=True)]


def _change_point(times: Sequence[Sequence[GlobalBatchTime]], replica: int) -> int:
    """The first global batch after the change of a replica's speed: where the sum of differences from the mean is most
    extreme."""
    ratios = [_against_others([each.ratio for each in iteration])[replica] for iteration in zip(*times, strict=True)]
    mean = fmean(ratios)
    sums = list(accumulate(ratio - mean for ratio in ratios))[:-1]
    return 1 + max(range(len(sums)), key=lambda index: abs(sums[index]))


def _against_others(changes: Sequence[float]) -> list[float]:
    """Each replica's change less the mean change of the others, which is common to all replicas."""
    if len(changes) == 1:
        return [0.0]
    total = math.fsum(changes)
    return [change - (total - change) / (len(changes) - 1) for change in changes]


def _are_enough(times: Sequence[Sequence[GlobalBatchTime]]) -> bool:
    longest = max(math.fsum(each.work_seconds + each.data_seconds for each in of_replica) for of_replica in times)
    return len(times[0]) >= MIN_ITERATIONS and longest >= MIN_SECONDS


def _kept(times: Sequence[GlobalBatchTime]) -> Sequence[GlobalBatchTime]:
    """The times without the longest ones, if there are many."""
    longest = sorted(range(len(times)), key=lambda index: times[index].ratio)[len(times) - _left_out(len(times)) :]
    return [time for index, time in enumerate(times) if index not in longest]


def _left_out(count: int) -> int:
    return max(1, math.floor(LEFT_OUT * count)) if count >= MANY else 0


def _whole(times: Sequence[GlobalBatchTime]) -> float:
    """Measured / expected time. It is a ratio of sums, since a throttled device is slow in some iterations only."""
    kept = _kept(times)
    measured = math.fsum(each.work_seconds + each.data_seconds for each in kept)
    return measured / math.fsum(each.expected_seconds for each in kept)


def _estimates(times: Sequence[Sequence[GlobalBatchTime]]) -> list[_SpeedEstimate]:
    """The speed of each replica. What an iteration takes longer on all replicas is no noise."""
    means = [_whole(of_replica) for of_replica in times]
    common = [
        fmean(each.ratio / mean for each, mean in zip(iteration, means, strict=True))
        for iteration in zip(*times, strict=True)
    ]
    found = []
    for of_replica, mean in zip(times, means, strict=True):
        kept = _kept(of_replica)
        work = math.fsum(each.work_seconds for each in kept) / math.fsum(each.expected_seconds for each in kept)
        data = math.fsum(each.data_seconds for each in kept) / sum(each.samples for each in kept)
        ratios = sorted(each.ratio / (mean * factor) for each, factor in zip(of_replica, common, strict=True))
        deviation = stdev(ratios[: len(ratios) - _left_out(len(ratios))])
        if len(ratios) < FEW:
            # A few values rarely show how much they scatter, in particular without the longest one.
            deviation = max((1.0 + UNCERTAINTY / len(ratios)) * deviation, ASSUMED_NOISE)
        found.append(_SpeedEstimate(Speed(work, data), deviation / math.sqrt(len(kept))))
    return found
