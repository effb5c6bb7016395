"""Divide global batches among replicas whose speed differs from their time curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..batches.allocation import Allocation, Share, allocate, evaluate
from ..batches.time_curve import Curve

__all__ = ["BatchDivider", "Speed"]


class Speed(NamedTuple):
    """How the time of a replica's micro-batches differs from its time curve."""

    factor: float = 1.0
    """Measured / expected time of forward and backward passes."""
    data_seconds: float = 0.0
    """Seconds per sample in which training waits for data."""

    def seconds(self, expected_seconds: float, samples: int) -> float:
        """Time of ``samples``, for which the curve says ``expected_seconds``."""
        return self.factor * expected_seconds + self.data_seconds * samples

    def of_units(self, unit: int) -> Speed:
        """The speed if ``unit`` samples count as one."""
        return Speed(self.factor, self.data_seconds * unit)

    def curve(self, curve: Curve) -> Curve:
        """The time curve at this speed."""
        samples = np.arange(1, curve.max_batch + 1)
        return Curve.from_seconds(self.factor * curve.seconds[1:] + self.data_seconds * samples, curve.min_batch)

    def towards(self, other: Speed, share: float) -> Speed:
        """The speed between this one (``share`` 0) and ``other`` (1)."""
        factor = (1.0 - share) * self.factor + share * other.factor
        return Speed(factor, (1.0 - share) * self.data_seconds + share * other.data_seconds)


@dataclass(frozen=True)
class BatchDivider:
    """What a division of global batches depends on, apart from the replicas' speeds; see :func:`.allocation.allocate`.

    All numbers must be the same on all ranks, so that all of them compute the same division.
    """

    curves: Sequence[Curve]
    """One per replica. Replicas of one kind of device share an object."""
    stage: int
    """Stage of ZeRO."""
    method: str = "exact"
    accumulation: str = "shared"
    communication_seconds: float = 0.0
    flops: Sequence[float] | None = None
    step_seconds: Sequence[float] | None = None
    """Time of the optimizer's step by replica, at the speed of the curves."""
    multiple_of: int = 1
    """All micro-batches are multiples of so many samples."""

    def divide(self, speeds: Sequence[Speed], samples: int) -> Allocation:
        """The division of ``samples``, a multiple of ``multiple_of``, among replicas with these ``speeds``."""
        if self.multiple_of > 1:
            return self._divide_in_units(speeds, samples)
        return allocate(
            self._curves(speeds),
            samples,
            self.stage,
            method=self.method,
            accumulation=self.accumulation,
            communication_seconds=self.communication_seconds,
            flops=self.flops,
            step_seconds=self._step_seconds(speeds),
        )

    def _divide_in_units(self, speeds: Sequence[Speed], samples: int) -> Allocation:
        """The division if ``multiple_of`` samples are one unit, in samples again."""
        unit = self.multiple_of
        if samples % unit:
            raise ValueError(f"a global batch of {samples} samples is not a multiple of {unit} samples")
        known: dict[int, Curve] = {}
        for curve in self.curves:
            known.setdefault(id(curve), curve.in_units(unit))
        whole = replace(self, curves=[known[id(curve)] for curve in self.curves], multiple_of=1)
        units = whole.divide([speed.of_units(unit) for speed in speeds], samples // unit)
        shares = [Share(tuple((size * unit, count) for size, count in share.runs)) for share in units.shares]
        return self.evaluate(speeds, shares)

    def evaluate(self, speeds: Sequence[Speed], shares: Sequence[Share]) -> Allocation:
        """The times of a given division at these ``speeds``."""
        return evaluate(
            self._curves(speeds),
            shares,
            self.stage,
            method=self.method,
            accumulation=self.accumulation,
            communication_seconds=self.communication_seconds,
            step_seconds=self._step_seconds(speeds),
        )

    def expected_seconds(self, replica: int, sizes: Sequence[int]) -> float:
        """What the time curve says for a global batch with these micro-batches, until the replica waits for others.

        In stage 0 the optimizer's step is a part of it. A division of the user's may have micro-batches that are larger
        than those that the curve has; they take as long per sample as its largest one.
        """
        seconds, most = self.curves[replica].seconds, max(self.curves[replica].max_batch, 1)
        compute = math.fsum(float(seconds[min(size, most)]) * max(size / most, 1.0) for size in sizes)
        has_step = self.stage == 0 and self.step_seconds is not None and len(sizes) > 0
        return compute + self.step_seconds[replica] if has_step and self.step_seconds is not None else compute

    def _step_seconds(self, speeds: Sequence[Speed]) -> list[float] | None:
        if self.step_seconds is None:
            return None
        return [speed.factor * seconds for speed, seconds in zip(speeds, self.step_seconds, strict=True)]

    def _curves(self, speeds: Sequence[Speed]) -> list[Curve]:
        known: dict[tuple[int, Speed], Curve] = {}
        for curve, speed in zip(self.curves, speeds, strict=True):
            if (id(curve), speed) not in known:
                known[id(curve), speed] = curve if speed == Speed() else speed.curve(curve)
        return [known[id(curve), speed] for curve, speed in zip(self.curves, speeds, strict=True)]
