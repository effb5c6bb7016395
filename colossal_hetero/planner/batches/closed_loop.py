"""Decide when global batches are divided again: a closed loop on the times that replicas take for their present parts.

[Note: the closed loop] After each interval of training, replicas' times until they begin to wait for others, relative
to their time curves, are their speeds. The best division for these speeds replaces the present one if the gain is more
than noise (docs/algorithms.md, 2.5). The next interval, measured in the new division, corrects errors.

[Note: times of replicas that wait] A device whose time is limited (a CPU quota, a limit of power or temperature) may
save up time while it waits, so the time of a replica that waits is optimistic, and that of a replica for which the
others wait is reliable. The last reliable speed is remembered, and replaced by a better, optimistic one only if

- the replica has become faster in the same division, or much faster with about as many samples as before: only a real
  change explains that; or
- it would be the slowest replica now, if the remembered speed were still right; or
- it looked faster for :data:`PATIENCE` checks, in which no step was possible.

Until then, a division is only chosen if the iteration is at most :data:`MAX_RISK` longer if the remembered speed is
right. That is enough for a small step in the right direction, whose result decides. If the step was wrong, optimistic
speeds of that replica are not used for so many checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .allocation import Allocation
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
REFINEMENTS = 6
AS_PROFILED = Speed()


@dataclass
class _Replica:
    """Memory of one replica's earlier speeds; see [Note: times of replicas that wait]."""

    reliable: Speed | None = AS_PROFILED
    """The last reliable speed. Passes that were timed for the curves did not wait either."""
    is_from_profile: bool = True
    before: tuple[Speed, int] | None = None
    """Speed and samples before the last step or change of speed."""
    faster: bool = False
    held_back: int = 0
    """Checks in which no step by its optimistic speed was possible."""
    distrusted: int = 0
    """Checks for which its optimistic speed is not used."""
    limit_seconds: float = math.inf
    """Time above which the optimistic speed by which it got more samples was wrong."""


class Redivision:
    """Decides from the times of global batches when, and by which speeds, they are divided again."""

    def __init__(self, divider: BatchDivider, global_batch_size: int, min_gain: float) -> None:
        self._divider = divider
        self._samples = global_batch_size
        self._min_gain = min_gain
        self.speeds: tuple[Speed, ...] = (AS_PROFILED,) * len(divider.curves)
        """The speeds by which global batches are divided, by replica; at first those of the curves."""
        self.allocation: Allocation = divider.divide(self.speeds, global_batch_size)
        self._replicas = [_Replica() for _ in divider.curves]
        self._window: list[list[GlobalBatchTime]] = [[] for _ in divider.curves]
        self._pending: list[list[GlobalBatchTime]] = [[] for _ in divider.curves]
        self._skip = 0

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
        for state in self._replicas:
            state.faster = False
        if speeds is None:
            return False
        former, self.speeds = self.allocation, speeds
        self.allocation = self._divider.divide(speeds, self._samples)
        self._remember(estimates, former)
        for replica, (state, estimate) in enumerate(zip(self._replicas, estimates, strict=True)):
            has_more = self.allocation.shares[replica].samples > former.shares[replica].samples
            if has_more and state.reliable is not None and state.reliable != estimate.speed:
                pair = (self._seconds(speed, replica) for speed in (estimate.speed, state.reliable))
                state.limit_seconds = math.sqrt(math.prod(pair))
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
        place = change_point(self._window, max(range(len(relative)), key=lambda replica: abs(relative[replica])))
        before = [of_replica[:place] for of_replica in self._window]
        self._window = [of_replica[place:] for of_replica in self._window]
        if len(before[0]) >= MIN_ITERATIONS:
            self._remember(estimated_speeds(before), self.allocation)
        changes = changes_between(before, self._window)
        for state, change, limit in zip(self._replicas, changes, limits, strict=True):
            state.faster |= change < -max(limit, MIN_GROWTH)

    def _remember(self, estimates: Sequence[SpeedEstimate], allocation: Allocation) -> None:
        for state, estimate, share in zip(self._replicas, estimates, allocation.shares, strict=True):
            state.before = estimate.speed, share.samples

    def _seconds(self, speed: Speed, replica: int) -> float:
        sizes = self.allocation.shares[replica].sizes
        return speed.seconds(self._divider.expected_seconds(replica, sizes), sum(max(size, 1) for size in sizes))

    def _judge_last_step(self, estimates: Sequence[SpeedEstimate]) -> None:
        """Learn whether the replicas that got more samples in the last step were as fast as they looked."""
        for replica, (state, estimate) in enumerate(zip(self._replicas, estimates, strict=True)):
            state.distrusted = max(0, state.distrusted - 1)
            if self._seconds(estimate.speed, replica) > state.limit_seconds:
                state.distrusted = PATIENCE
            state.limit_seconds = math.inf

    def _decide(self, estimates: Sequence[SpeedEstimate]) -> tuple[Speed, ...] | None:
        """The speeds to divide by from now on; None to keep the division."""
        cautious = self._cautious(estimates)
        present = tuple(estimate.speed for estimate in estimates)
        measured = tuple(
            other if state.distrusted else speed
            for state, speed, other in zip(self._replicas, present, cautious, strict=True)
        )

        def seconds(speeds: tuple[Speed, ...], divided_by: tuple[Speed, ...]) -> float:
            """Seconds of an iteration at ``speeds`` in the division by other ones."""
            shares = self._divider.divide(divided_by, self._samples).shares
            return self._divider.evaluate(speeds, shares).wall_seconds

        now = self._divider.evaluate(present, self.allocation.shares).wall_seconds
        noise = CERTAIN * max(estimate.error for estimate in estimates)
        if now / seconds(measured, measured) - 1.0 <= max(self._min_gain, noise):
            return None
        chosen, limit = measured, (1.0 + MAX_RISK) * now
        if seconds(cautious, measured) > limit:
            low, high = 0.0, 1.0
            for _ in range(REFINEMENTS):
                middle = (low + high) / 2.0
                is_safe = seconds(cautious, _between(measured, cautious, middle)) <= limit
                low, high = (low, middle) if is_safe else (middle, high)
            chosen = _between(measured, cautious, high)
        if now / seconds(measured, chosen) - 1.0 > 0.0:
            return chosen
        for state, one, other in zip(self._replicas, measured, cautious, strict=True):
            state.held_back += one != other
        return None

    def _cautious(self, estimates: Sequence[SpeedEstimate]) -> tuple[Speed, ...]:
        """Each replica's measured speed, or the remembered one; see [Note: times of replicas that wait]."""
        seconds = [self._seconds(estimate.speed, replica) for replica, estimate in enumerate(estimates)]
        slowest = max(seconds)
        for replica, (state, estimate, present) in enumerate(zip(self._replicas, estimates, seconds, strict=True)):
            samples = self.allocation.shares[replica].samples
            if state.before is not None and samples >= SIMILAR_LOAD * state.before[1]:
                state.faster |= present < (1.0 - MIN_LEAP) * self._seconds(state.before[0], replica)
            if present >= (1.0 - SLOWEST) * slowest:
                state.reliable, state.is_from_profile = estimate.speed, False
            elif state.reliable is not None:
                would_be = self._seconds(state.reliable, replica)
                is_refuted = would_be <= present or would_be > (1.0 + max(REFUTED, CERTAIN * estimate.error)) * slowest
                is_refuted |= state.is_from_profile and would_be <= (1.0 + PROFILE_ERROR) * present
                if state.faster or is_refuted or state.held_back >= PATIENCE:
                    state.reliable = None
            if state.reliable is None or state.reliable == estimate.speed:
                state.held_back = 0
            if state.faster:
                state.distrusted = 0
        return tuple(
            estimate.speed if state.reliable is None else state.reliable
            for state, estimate in zip(self._replicas, estimates, strict=True)
        )


def _between(measured: Sequence[Speed], cautious: Sequence[Speed], share: float) -> tuple[Speed, ...]:
    return tuple(one.towards(other, share) for one, other in zip(measured, cautious, strict=True))
