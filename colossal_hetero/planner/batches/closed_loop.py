"""Decide when global batches are divided again: a closed loop on the times that replicas take for their present parts.

[Note: the closed loop] After each interval of training, replicas' times until they begin to wait for others, relative
to their time curves, are their speeds. The best division for these speeds replaces the present one if the gain is more
than noise (docs/algorithms.md, 2.5). The next interval, measured in the new division, corrects errors.

[Note: times of replicas that wait] A device whose time is limited (a CPU quota, a limit of power or temperature) may
save up time while it waits, so the time of a replica that waits is optimistic, and that of a replica for which the
others wait is reliable. The last reliable speed is remembered, and replaced by a better, optimistic one only if

- the replica has become faster in the same division, or with about as many samples as when it was the slowest, or much
  faster with about as many as before: only a real change explains that; or
- it would be the slowest replica now, if the remembered speed were still right; or
- it looked faster for :data:`PATIENCE` checks, in which no step was possible.

Until then, a division is only chosen if the iteration is at most :data:`MAX_RISK` longer if the remembered speed is
right. That is enough for a small step in the right direction, whose result decides. If the step was wrong, optimistic
speeds of that replica are not used for some checks, twice as many each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .allocation import Allocation, Share
from .replica_times import (
    MIN_ITERATIONS,
    BatchDivider,
    GlobalBatchTime,
    Speed,
    SpeedEstimate,
    against_others,
    are_enough,
    change_point,
    changes_between,
    estimated_speeds,
)

__all__ = ["Redivision"]

WINDOW = 256
"""Largest number of global batches from which speeds are computed."""
CERTAIN = 3.0
"""Standard errors that a gain must have."""
CHANGED = 2.5
"""Standard errors by which a time must differ from earlier ones in the same division to be a change of speed."""
MIN_CHANGE = 0.05
MIN_GROWTH = 0.25
"""Least relative difference by which a replica became so much faster that its former speed is forgotten."""
SIMILAR_LOAD = 0.75
"""Share of its former samples with which a replica waits little more than before."""
MIN_LEAP = 0.35
"""The same as :data:`MIN_GROWTH`, for a replica with a similar load."""
MIN_STEP = 0.005
"""Least relative gain of a step that is a part of the best one."""
SLOWEST = 0.02
"""Largest share of its time that a replica may wait to be measured reliably."""
REFUTED = 0.03
"""Share by which a replica must be slower than the slowest one, at its remembered speed, to refute that speed."""
PROFILE_ERROR = 0.5
"""Share by which a replica's time may be longer in its profile than in training, without being optimistic there."""
MAX_RISK = 0.01
"""Share by which an iteration may become longer if a remembered speed is right and the optimistic one is wrong."""
PATIENCE = 4
"""Number of checks after which an optimistic speed is believed, and for which it is not after a wrong step."""
MAX_DOUBLINGS = 6
REFINEMENTS = 6


class Redivision:
    """Decides from the times of global batches when, and by which speeds, they are divided again."""

    def __init__(self, divider: BatchDivider, global_batch_size: int, min_gain: float) -> None:
        count = len(divider.curves)
        self._divider = divider
        self._samples = global_batch_size
        self._min_gain = min_gain
        self.speeds: tuple[Speed, ...] = (Speed(),) * count
        """The speeds by which global batches are divided, by replica; at first those of the curves."""
        self.allocation: Allocation = divider.divide(self.speeds, global_batch_size)
        self._window: list[list[GlobalBatchTime]] = [[] for _ in range(count)]
        self._pending: list[list[GlobalBatchTime]] = [[] for _ in range(count)]
        self._skip = 0
        # The last reliable speeds. Passes that were timed for the curves did not wait either.
        self._reliable: list[Speed | None] = [Speed()] * count
        self._is_from_profile = [True] * count
        self._reliable_samples = [math.inf] * count
        # What was measured before the last step or change of a speed, and with how many samples.
        self._before: list[tuple[Speed, int] | None] = [None] * count
        self._faster = [False] * count
        self._held_back = [0] * count
        self._wrong_steps = [0] * count
        self._distrusted = [0] * count
        self._limits: dict[int, float] = {}

    def skip(self, global_batches: int) -> None:
        """Leave out the next so many global batches: they have the former division, or are the first of a new one."""
        self._skip = global_batches

    def observe(self, times: Sequence[Sequence[GlobalBatchTime]]) -> bool:
        """Take in ``times[replica][global_batch]``; True if :attr:`speeds` and :attr:`allocation` are new ones."""
        for pending, new in zip(self._pending, times, strict=True):
            pending.extend(new[self._skip :])
        self._skip = max(0, self._skip - len(times[0]))
        if not are_enough(self._pending):
            return False
        self._take_in()
        if not are_enough(self._window):
            return False
        estimates = estimated_speeds(self._window)
        self._judge_last_step(estimates)
        speeds = self._decide(estimates)
        self._faster = [False] * len(self._faster)
        if speeds is None:
            return False
        allocation = self._divider.divide(speeds, self._samples)
        self._expect(allocation, estimates)
        self._remember(estimates)
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
            max(MIN_CHANGE, CHANGED * math.sqrt(before.error**2 + after.error**2))
            for before, after in zip(estimated_speeds(earlier), estimated_speeds(new), strict=True)
        ]
        relative = against_others(changes_between(earlier, new))
        if all(abs(change) <= limit for change, limit in zip(relative, limits, strict=True)):
            return
        most = max(range(len(relative)), key=lambda replica: abs(relative[replica]))
        place = change_point(self._window, most)
        before = [of_replica[:place] for of_replica in self._window]
        self._window = [of_replica[place:] for of_replica in self._window]
        if len(before[0]) >= MIN_ITERATIONS:
            self._remember(estimated_speeds(before))
        for replica, (change, limit) in enumerate(zip(changes_between(before, self._window), limits, strict=True)):
            self._faster[replica] |= change < -max(limit, MIN_GROWTH)

    def _seconds(self, speed: Speed, replica: int, share: Share | None = None) -> float:
        sizes = (share or self.allocation.shares[replica]).sizes
        return speed.seconds(self._divider.expected_seconds(replica, sizes), sum(max(size, 1) for size in sizes))

    def _expect(self, allocation: Allocation, estimates: Sequence[SpeedEstimate]) -> None:
        """Note the time above which the optimistic speed of a replica that gets more samples is wrong."""
        self._limits = {}
        for replica, (estimate, old, new) in enumerate(
            zip(estimates, self.allocation.shares, allocation.shares, strict=True)
        ):
            remembered = self._reliable[replica]
            if remembered is not None and remembered != estimate.speed and new.samples > old.samples:
                times = (self._seconds(speed, replica, new) for speed in (estimate.speed, remembered))
                self._limits[replica] = math.sqrt(math.prod(times))

    def _judge_last_step(self, estimates: Sequence[SpeedEstimate]) -> None:
        """Learn whether the replicas that got more samples in the last step were as fast as they looked."""
        self._distrusted = [max(0, checks - 1) for checks in self._distrusted]
        for replica, limit in self._limits.items():
            if self._seconds(estimates[replica].speed, replica) > limit:
                self._distrusted[replica] = PATIENCE << min(self._wrong_steps[replica], MAX_DOUBLINGS)
                self._wrong_steps[replica] += 1
            else:
                self._wrong_steps[replica] = 0
        self._limits = {}

    def _decide(self, estimates: Sequence[SpeedEstimate]) -> tuple[Speed, ...] | None:
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
        if gains <= (0.0 if chosen == measured else MIN_STEP):
            for replica, (one, other) in enumerate(zip(measured, cautious, strict=True)):
                self._held_back[replica] += one != other
            return None
        return chosen

    def _shares(self, speeds: Sequence[Speed]) -> Sequence[Share]:
        return self._divider.divide(speeds, self._samples).shares

    def _cautious(self, estimates: Sequence[SpeedEstimate]) -> tuple[Speed, ...]:
        """Each replica's measured speed, or the remembered one; see [Note: times of replicas that wait]."""
        seconds = [self._seconds(estimate.speed, replica) for replica, estimate in enumerate(estimates)]
        slowest = max(seconds)
        self._note_leaps(seconds)
        cautious = []
        for replica, (estimate, present) in enumerate(zip(estimates, seconds, strict=True)):
            remembered = self._reliable[replica]
            if present >= (1.0 - SLOWEST) * slowest:
                remembered = estimate.speed
                self._is_from_profile[replica] = False
                self._reliable_samples[replica] = self.allocation.shares[replica].samples
            elif remembered is not None:
                would_be = self._seconds(remembered, replica)
                margin = max(REFUTED, CERTAIN * estimate.error)
                is_refuted = would_be <= present or would_be > (1.0 + margin) * slowest
                is_refuted |= self._is_from_profile[replica] and would_be <= (1.0 + PROFILE_ERROR) * present
                has_load = self.allocation.shares[replica].samples >= SIMILAR_LOAD * self._reliable_samples[replica]
                is_refuted |= has_load and present < (1.0 - MIN_GROWTH) * would_be
                if self._faster[replica] or is_refuted or self._held_back[replica] >= PATIENCE:
                    remembered = None
            if remembered is None or remembered == estimate.speed:
                self._held_back[replica] = 0
            if self._faster[replica]:
                self._distrusted[replica] = 0
            self._reliable[replica] = remembered
            cautious.append(estimate.speed if remembered is None else remembered)
        return tuple(cautious)

    def _remember(self, estimates: Sequence[SpeedEstimate]) -> None:
        shares = self.allocation.shares
        self._before = [(each.speed, share.samples) for each, share in zip(estimates, shares, strict=True)]

    def _note_leaps(self, seconds: Sequence[float]) -> None:
        for replica, (present, share) in enumerate(zip(seconds, self.allocation.shares, strict=True)):
            before = self._before[replica]
            if before is not None and share.samples >= SIMILAR_LOAD * before[1]:
                self._faster[replica] |= present < (1.0 - MIN_LEAP) * self._seconds(before[0], replica)


def _between(measured: Sequence[Speed], cautious: Sequence[Speed], share: float) -> tuple[Speed, ...]:
    return tuple(one.towards(other, share) for one, other in zip(measured, cautious, strict=True))
