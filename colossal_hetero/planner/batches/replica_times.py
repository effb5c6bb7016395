"""Speeds of replicas from their times for global batches, how certain they are, and when they changed. Only operations
are used that all processors round equally, so that all ranks compute the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from .allocation import Allocation, Share, allocate, evaluate
from .time_curve import Curve

__all__ = [
    "MIN_ITERATIONS",
    "BatchDivider",
    "GlobalBatchTime",
    "Speed",
    "SpeedEstimate",
    "against_others",
    "are_enough",
    "change_point",
    "changes_between",
    "estimated_speeds",
]


# Replica speeds ------------------------------------------------------------------------------------------------------


class Speed(NamedTuple):
    """The difference between the time of a replica's micro-batches and its time curve."""

    factor: float = 1.0
    """Measured / expected time of forward and backward passes."""
    data_seconds: float = 0.0
    """Seconds per sample in which training waits for data."""

    def seconds(self, expected_seconds: float, samples: int) -> float:
        return self.factor * expected_seconds + self.data_seconds * samples

    def curve(self, curve: Curve) -> Curve:
        samples = np.arange(1, curve.max_batch + 1)
        return Curve.from_seconds(self.factor * curve.seconds[1:] + self.data_seconds * samples, curve.min_batch)

    def towards(self, other: Speed, share: float) -> Speed:
        """The speed between this one (``share`` 0) and ``other`` (1)."""
        factor = (1.0 - share) * self.factor + share * other.factor
        return Speed(factor, (1.0 - share) * self.data_seconds + share * other.data_seconds)


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
    """Time of the optimizer's step by replica, at the speed of the curves."""
    multiple_of: int = 1
    """Samples of which all micro-batches are multiples."""

    def divide(self, speeds: Sequence[Speed], samples: int) -> Allocation:
        unit, curves = self.multiple_of, self._curves(speeds)
        if samples % unit:
            raise ValueError(f"a global batch of {samples} samples is not a multiple of {unit} samples")
        in_units = {key: curve.in_units(unit) for key, curve in {id(curve): curve for curve in curves}.items()}
        units_of = [in_units[id(curve)] for curve in curves]
        units = allocate(units_of, samples // unit, self.stage, flops=self.flops, **self._options(speeds))
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


MIN_ITERATIONS = 3
"""Smallest number of global batches from which speeds are computed."""
MIN_SECONDS = 0.5
"""Smallest total time of these. It holds several periods of a CPU quota, which are 0.1 s long."""
MANY = 4
"""Number of global batches from which the longest are left out: a single delay is not a change of speed."""
LEFT_OUT = 0.1
"""Share of the global batches that is left out, but at least one."""
ASSUMED_NOISE = 0.03
"""Least relative standard deviation of a replica's time while fewer than :data:`FEW` global batches are known."""
FEW = 8
UNCERTAINTY = 1.5
"""Increase of the standard deviation of n < :data:`FEW` values, times n."""


class GlobalBatchTime(NamedTuple):
    """A replica's time for its part of one global batch, without waiting for other replicas."""

    expected_seconds: float
    samples: int
    """Loaded samples, including placeholders."""
    work_seconds: float
    """Forward and backward passes, and everything else outside of loading data."""
    data_seconds: float

    @property
    def seconds(self) -> float:
        return self.work_seconds + self.data_seconds

    @property
    def ratio(self) -> float:
        return self.seconds / self.expected_seconds


class SpeedEstimate(NamedTuple):
    """A replica's speed in the present division."""

    speed: Speed
    error: float
    """Relative standard error."""


def are_enough(times: Sequence[Sequence[GlobalBatchTime]]) -> bool:
    longest = max(math.fsum(each.seconds for each in of_replica) for of_replica in times)
    return len(times[0]) >= MIN_ITERATIONS and longest >= MIN_SECONDS


def _kept(times: Sequence[GlobalBatchTime]) -> Sequence[GlobalBatchTime]:
    return sorted(times, key=lambda time: time.ratio)[: len(times) - _left_out(len(times))]


def _left_out(count: int) -> int:
    return max(1, math.floor(LEFT_OUT * count)) if count >= MANY else 0


def _whole(times: Sequence[GlobalBatchTime]) -> float:
    """Measured / expected time, a ratio of sums, because a throttled device is slow in some iterations only."""
    kept = _kept(times)
    return math.fsum(each.seconds for each in kept) / math.fsum(each.expected_seconds for each in kept)


def estimated_speeds(times: Sequence[Sequence[GlobalBatchTime]]) -> list[SpeedEstimate]:
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
        deviation = stdev(ratios[: len(ratios) - _left_out(len(ratios))])
        if len(ratios) < FEW:
            # A few values rarely show how much they scatter, in particular without the longest one.
            deviation = max((1.0 + UNCERTAINTY / len(ratios)) * deviation, ASSUMED_NOISE)
        found.append(SpeedEstimate(Speed(work, data), deviation / math.sqrt(len(kept))))
    return found


def changes_between(
    before: Sequence[Sequence[GlobalBatchTime]], after: Sequence[Sequence[GlobalBatchTime]]
) -> list[float]:
    """Change of each replica's time, relative to the mean of before and after."""
    pairs = [(_whole(old), _whole(new)) for old, new in zip(before, after, strict=True)]
    return [2.0 * (new - old) / (new + old) for old, new in pairs]


def change_point(times: Sequence[Sequence[GlobalBatchTime]], replica: int) -> int:
    """The first global batch after a replica's change of speed: the extreme sum of differences from the mean."""
    ratios = [against_others([each.ratio for each in iteration])[replica] for iteration in zip(*times, strict=True)]
    mean = fmean(ratios)
    sums = list(accumulate(ratio - mean for ratio in ratios))[:-1]
    return 1 + max(range(len(sums)), key=lambda index: abs(sums[index]))


def against_others(changes: Sequence[float]) -> list[float]:
    """Each replica's change less the mean change of the others, which is common to all replicas."""
    if len(changes) == 1:
        return [0.0]
    total = math.fsum(changes)
    return [change - (total - change) / (len(changes) - 1) for change in changes]
