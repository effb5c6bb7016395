"""Decide when global batches are divided again, from the times that replicas take for their parts (docs/algorithms.md,
2.5). Only operations are used that all processors round equally, so that all ranks compute the same.

[Note: times of replicas that wait] A device whose time is limited (a CPU quota, a limit of power or temperature) may
save up time while it waits, so the time of a replica that waits is optimistic, and that of a replica for which the
others wait is reliable: the last reliable speed is remembered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from .allocation import LEAST_GAIN, Allocation, Share, allocate, evaluate
from .time_curve import Curve

# Replica speeds ------------------------------------------------------------------------------------------------------


class Speed(NamedTuple):
    """The difference between the time of a replica's micro-batches and its time curve."""

    factor: float = 1.0  # measured / expected time of forward and backward passes
    data_seconds: float = 0.0  # seconds per sample in which training waits for data

    def seconds(self, expected_seconds: float, samples: int) -> float:
        return self.factor * expected_seconds + self.data_seconds * samples

    def curve(self, curve: Curve) -> Curve:
        samples = np.arange(1, curve.max_batch + 1)
        return Curve.from_seconds(self.factor * curve.seconds[1:] + self.data_seconds * samples, curve.min_batch)


@dataclass(frozen=True)
class BatchDivider:
    """Inputs of :func:`.allocation.allocate` except for the replicas' speeds; the same on all ranks."""

    curves: Sequence[Curve]
    """By replica. Replicas of one kind of device share an object."""
    stage: int
    method: str = "exact"
    accumulation: str = "shared"
    communication_seconds: float = 0.0
    flops: Sequence[float] | None = None
    step_seconds: Sequence[float] | None = None
    multiple_of: int = 1

    def divide(self, speeds: Sequence[Speed], samples: int) -> Allocation:
        unit, curves = self.multiple_of, self._curves(speeds)
        if samples % unit:
            raise ValueError(f"a global batch of {samples} samples is not a multiple of {unit} samples")
        in_units = {key: curve.in_units(unit) for key, curve in {id(curve): curve for curve in curves}.items()}
        units_of = [in_units[id(curve)] for curve in curves]
        options = self._options(speeds)
        units = allocate(units_of, samples // unit, self.stage, flops=self.flops, least_gain=LEAST_GAIN, **options)
        shares = [Share(tuple((size * unit, count) for size, count in share.runs)) for share in units.shares]
        return self.evaluate(speeds, shares)

    def evaluate(self, speeds: Sequence[Speed], shares: Sequence[Share]) -> Allocation:
        return evaluate(self._curves(speeds), shares, self.stage, **self._options(speeds))

    def expected_seconds(self, replica: int, sizes: Sequence[int]) -> float:
        """Seconds of a global batch by the time curve until the replica waits for others, in stage 0 with the
        optimizer's step. Micro-batches of a user's own division that are larger than the curve take as long per sample
        as its largest one."""
        seconds, most = self.curves[replica].seconds, max(self.curves[replica].max_batch, 1)
        compute = math.fsum(float(seconds[min(size, most)]) * max(size / most, 1.0) for size in sizes)
        if self.stage > 0 or self.step_seconds is None or len(sizes) == 0:
            return compute
        return compute + self.step_seconds[replica]

    def _options(self, speeds: Sequence[Speed]) -> dict[str, Any]:
        steps = self.step_seconds
        return {
            "method": self.method,
            "accumulation": self.accumulation,
            "communication_seconds": self.communication_seconds,
            "step_seconds": steps and [speed.factor * each for speed, each in zip(speeds, steps, strict=True)],
        }

    def _curves(self, speeds: Sequence[Speed]) -> list[Curve]:
        known: dict[tuple[int, Speed], Curve] = {}
        for curve, speed in zip(self.curves, speeds, strict=True):
            if (id(curve), speed) not in known:
                known[id(curve), speed] = curve if speed == Speed() else speed.curve(curve)
        return [known[id(curve), speed] for curve, speed in zip(self.curves, speeds, strict=True)]


MIN_ITERATIONS = 3  # smallest number of global batches from which speeds are computed
MIN_SECONDS = 0.5
"""Smallest total time of these. It holds several periods of a CPU quota, which are 0.1 s long."""
MANY = 4  # number of global batches from which the longest are left out: a single delay is not a change of speed
LEFT_OUT = 0.1  # share of the global batches that is left out, but at least one
ASSUMED_NOISE = 0.03
"""Least relative standard deviation of a replica's time while fewer than :data:`FEW` global batches are known."""
FEW = 8
UNCERTAINTY = 1.5  # increase of the standard deviation of n < :data:`FEW` values, times n


class GlobalBatchTime(NamedTuple):
    """A replica's time for its part of one global batch, without waiting for other replicas."""

    expected_seconds: float
    samples: int
    work_seconds: float  # forward and backward passes, and everything else outside of loading data
    data_seconds: float

    @property
    def seconds(self) -> float:
        return self.work_seconds + self.data_seconds

    @property
    def ratio(self) -> float:
        return self.seconds / self.expected_seconds


class SpeedEstimate(NamedTuple):
    speed: Speed
    error: float


def _are_enough(times: Sequence[Sequence[GlobalBatchTime]]) -> bool:
    longest = max(math.fsum(each.seconds for each in of_replica) for of_replica in times)
    return len(times[0]) >= MIN_ITERATIONS and longest >= MIN_SECONDS


def _kept(times: Sequence[GlobalBatchTime]) -> Sequence[GlobalBatchTime]:
    left_out = max(1, math.floor(LEFT_OUT * len(times))) if len(times) >= MANY else 0
    return sorted(times, key=lambda time: time.ratio)[: len(times) - left_out]


def _whole(times: Sequence[GlobalBatchTime]) -> float:
    """Measured / expected time, a ratio of sums, because a throttled device is slow in some iterations only."""
    kept = _kept(times)
    return math.fsum(each.seconds for each in kept) / math.fsum(each.expected_seconds for each in kept)


def _estimated_speeds(times: Sequence[Sequence[GlobalBatchTime]]) -> list[SpeedEstimate]:
    """The speed of each replica. Delays that all replicas share are no noise."""
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
        deviation = stdev(ratios[: len(kept)])
        if len(ratios) < FEW:
            # A few values rarely show how much they scatter, in particular without the longest one.
            deviation = max((1.0 + UNCERTAINTY / len(ratios)) * deviation, ASSUMED_NOISE)
        found.append(SpeedEstimate(Speed(work, data), deviation / math.sqrt(len(kept))))
    return found


def _changes_between(
    before: Sequence[Sequence[GlobalBatchTime]], after: Sequence[Sequence[GlobalBatchTime]]
) -> list[float]:
    """Change of each replica's time, relative to the mean of before and after."""
    pairs = [(_whole(old), _whole(new)) for old, new in zip(before, after, strict=True)]
    return [2.0 * (new - old) / (new + old) for old, new in pairs]


def _against_others(changes: Sequence[float]) -> list[float]:
    """Each replica's change less the mean change of the others, which is common to all replicas."""
    if len(changes) == 1:
        return [0.0]
    total = math.fsum(changes)
    return [change - (total - change) / (len(changes) - 1) for change in changes]


# Closed loop ----------------------------------------------------------------------------------------------------------

WINDOW = 256  # largest number of global batches from which speeds are computed
CERTAIN = 3.0  # standard errors that a gain must have
CHANGED = 2.5
"""Standard errors by which a time must differ from earlier ones in the same division to be a change of speed."""
MIN_CHANGE = 0.05
MIN_GROWTH = 0.25
"""Least relative difference by which a replica became so much faster that its former speed is forgotten."""
SIMILAR_LOAD = 0.75  # share of its former samples with which a replica waits little more than before
MIN_LEAP = 0.35  # the same as :data:`MIN_GROWTH`, for a replica with a similar load
SLOWEST = 0.02  # largest share of its time that a replica may wait to be measured reliably
REFUTED = 0.03
"""Share by which a replica must be slower than the slowest one, at its remembered speed, to refute that speed."""
PROFILE_ERROR = 0.5
"""Share by which a replica's time may be longer in its profile than in training, without being optimistic there."""
MAX_RISK = 0.01
"""Share by which an iteration may become longer if a remembered speed is right and the optimistic one is wrong."""
PATIENCE = 4  # number of checks after which an optimistic speed is believed, and for which it is not after a wrong step
REFINEMENTS = 6
AS_PROFILED = Speed()


@dataclass
class _Replica:
    """Memory of one replica's earlier speeds; see [Note: times of replicas that wait]."""

    reliable: Speed | None = AS_PROFILED
    """The last reliable speed. Passes that were timed for the curves did not wait either."""
    is_from_profile: bool = True
    before: tuple[Speed, int] | None = None
    faster: bool = False
    held_back: int = 0  # checks in which no step by its optimistic speed was possible
    distrusted: int = 0
    limit_seconds: float = math.inf  # time above which the optimistic speed by which it got more samples was wrong


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
        if not _are_enough(self._pending):
            return False
        self._take_in()
        if not _are_enough(self._window):
            return False
        estimates = _estimated_speeds(self._window)
        # Learn whether the replicas that got more samples in the last step were as fast as they looked.
        for replica, (state, estimate) in enumerate(zip(self._replicas, estimates, strict=True)):
            state.distrusted = max(0, state.distrusted - 1)
            if self._seconds(estimate.speed, replica) > state.limit_seconds:
                state.distrusted = PATIENCE
            state.limit_seconds = math.inf
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
            for before, after in zip(_estimated_speeds(earlier), _estimated_speeds(new), strict=True)
        ]
        relative = _against_others(_changes_between(earlier, new))
        if all(abs(change) <= limit for change, limit in zip(relative, limits, strict=True)):
            return
        # The first global batch after the change of speed: the extreme sum of differences from the mean.
        changed = max(range(len(relative)), key=lambda replica: abs(relative[replica]))
        ratios = [_against_others([each.ratio for each in step])[changed] for step in zip(*self._window, strict=True)]
        mean = fmean(ratios)
        sums = list(accumulate(ratio - mean for ratio in ratios))[:-1]
        place = 1 + max(range(len(sums)), key=lambda index: abs(sums[index]))
        before = [of_replica[:place] for of_replica in self._window]
        self._window = [of_replica[place:] for of_replica in self._window]
        if len(before[0]) >= MIN_ITERATIONS:
            self._remember(_estimated_speeds(before), self.allocation)
        changes = _changes_between(before, self._window)
        for state, change, limit in zip(self._replicas, changes, limits, strict=True):
            state.faster |= change < -max(limit, MIN_GROWTH)

    def _remember(self, estimates: Sequence[SpeedEstimate], allocation: Allocation) -> None:
        for state, estimate, share in zip(self._replicas, estimates, allocation.shares, strict=True):
            state.before = estimate.speed, share.samples

    def _seconds(self, speed: Speed, replica: int) -> float:
        sizes = self.allocation.shares[replica].sizes
        return speed.seconds(self._divider.expected_seconds(replica, sizes), sum(max(size, 1) for size in sizes))

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
    """Speeds between the measured (``share`` 0) and the cautious ones (1)."""
    pairs = zip(measured, cautious, strict=True)
    return tuple(
        Speed(*((1.0 - share) * a + share * b for a, b in zip(one, other, strict=True))) for one, other in pairs
    )
