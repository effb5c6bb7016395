"""How long one device takes for one micro-batch of any size: a curve through the sizes that were measured.

ALGORITHMS 2.2 (Poplar): a cubic spline with natural boundary through time over batch. Time never falls with the batch
here, which the exact search in :mod:`.allocation` relies on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_DIP", "Curve"]

MAX_DIP = 0.1
"""By how much of its time a larger batch may be faster than a smaller one before it is no longer taken for noise."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds that one device takes for one micro-batch, by its number of samples."""

    seconds: NDArray[np.float64]
    """``[max_batch + 1]``, positive and non-decreasing. ``seconds[0] == seconds[1]``: a rank without samples still runs
    one sample of weight zero, so that no collective lacks a peer. Length 1 is a device that cannot hold a sample."""

    def __post_init__(self) -> None:
        seconds = np.array(self.seconds, dtype=np.float64)
        if seconds.ndim != 1 or len(seconds) == 0:
            raise ValueError(f"seconds has shape {seconds.shape}; give one time per batch, beginning with batch 0")
        if not (np.isfinite(seconds).all() and (seconds > 0).all()):
            raise ValueError(f"seconds must be finite and positive, not {_first(seconds, ~(seconds > 0))}")
        if (np.diff(seconds) < 0).any():
            batch = int(np.argmax(np.diff(seconds) < 0))
            raise ValueError(
                f"seconds falls from {seconds[batch]:g} at batch {batch} to {seconds[batch + 1]:g} at the next; "
                "make it non-decreasing, or use Curve.through, which smooths noise"
            )
        if len(seconds) > 1 and seconds[0] != seconds[1]:
            raise ValueError(
                f"seconds[0]={seconds[0]:g} differs from seconds[1]={seconds[1]:g}: a rank without samples runs one of "
                "weight zero; Curve.from_seconds takes the times from batch 1 on"
            )
        seconds.setflags(write=False)
        object.__setattr__(self, "seconds", seconds)

    @classmethod
    def from_seconds(cls, seconds: Sequence[float] | NDArray[np.float64]) -> Curve:
        """The curve of known times of batches 1, 2, 3, …, all of them."""
        times = np.asarray(seconds, dtype=np.float64)
        return cls(np.concatenate([times[:1], times]))

    @classmethod
    def through(cls, points: Mapping[int, float], max_batch: int) -> Curve:
        """The curve through measured seconds by batch, up to ``max_batch``.

        A natural cubic spline between the points, kept within the times of the two points on either side, since a
        spline may overshoot. Beyond the last point it goes on straight, with the spline's slope there but at least the
        mean slope; below the first likewise, but never faster per sample than that point. A larger batch that is faster
        than a smaller one, by at most ``MAX_DIP``, is noise: both get a time between (isotonic regression).

        Raises:
            ValueError: no point, or one point (except batch 1 of ``max_batch=1``); a batch below 1, a time that is not
                finite and positive; a larger batch faster by more than ``MAX_DIP``; ``max_batch`` below 1.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch={max_batch}: the device cannot hold one sample, so there is no curve")
        # Most of the time that this module takes to import, and only needed here.
        from scipy.interpolate import CubicSpline
        from scipy.optimize import isotonic_regression

        _check_points(points, max_batch)
        batches = np.array(sorted(points), dtype=np.float64)
        times = np.array([points[int(batch)] for batch in batches], dtype=np.float64)
        if len(batches) == 1:
            return cls.from_seconds(times)
        highest = np.maximum.accumulate(times)
        if (times < (1.0 - MAX_DIP) * highest).any():
            late = int(np.argmax(times < (1.0 - MAX_DIP) * highest))
            early = int(np.argmax(times[:late]))
            raise ValueError(
                f"batch {batches[late]:.0f} takes {times[late]:g} s, less than batch {batches[early]:.0f} with "
                f"{times[early]:g} s: more than {MAX_DIP:.0%} is not noise; measure these two again while nothing else "
                "runs on the device, or remove the wrong one"
            )
        times = isotonic_regression(times).x
        spline = CubicSpline(batches, times, bc_type="natural")
        sizes = np.arange(1.0, max_batch + 1.0)
        after = np.clip(np.searchsorted(batches, sizes), 1, len(batches) - 1)
        seconds = np.clip(spline(sizes), times[after - 1], times[after])
        slope = max(float(spline(batches[-1], 1)), (times[-1] - times[0]) / (batches[-1] - batches[0]))
        seconds = np.where(sizes > batches[-1], times[-1] + slope * (sizes - batches[-1]), seconds)
        slope = max(float(spline(batches[0], 1)), 0.0)
        below = np.maximum(times[0] + slope * (sizes - batches[0]), times[0] * sizes / batches[0])
        seconds = np.where(sizes < batches[0], below, seconds)
        return cls.from_seconds(np.maximum.accumulate(seconds))

    @property
    def max_batch(self) -> int:
        """The largest micro-batch that the device holds; 0 if it cannot hold one sample."""
        return len(self.seconds) - 1

    def scaled(self, factor: float) -> Curve:
        """The curve of a device that takes ``factor`` times as long."""
        if not (factor > 0 and math.isfinite(factor)):
            raise ValueError(f"factor={factor} must be a positive number: 2 stands for twice as slow")
        return Curve(self.seconds * factor)

    def limited(self, max_batch: int) -> Curve:
        """The curve up to ``max_batch``, or as far as it goes."""
        if max_batch < 0:
            raise ValueError(f"max_batch={max_batch} must be at least 0")
        return self if max_batch >= self.max_batch else Curve(self.seconds[: max_batch + 1])

    def speed(self, batch: int) -> float:
        """Samples per second in micro-batches of ``batch``."""
        if not 0 <= batch <= self.max_batch:
            raise ValueError(f"batch={batch} is outside 0..{self.max_batch}, which the device holds")
        return float(batch / self.seconds[batch])

    @property
    def peak_batch(self) -> int:
        """The smallest micro-batch with the most samples per second; 0 if the device cannot hold a sample."""
        return int(np.argmax(np.arange(len(self.seconds)) / self.seconds))

    @property
    def peak_speed(self) -> float:
        """Samples per second in the best micro-batch (Poplar: ``speed_i = max_b speed_i(b)``)."""
        return self.speed(self.peak_batch)


def _check_points(points: Mapping[int, float], max_batch: int) -> None:
    for batch, seconds in points.items():
        if batch < 1 or batch != int(batch):
            raise ValueError(f"batch {batch} (with {seconds} s) must be a whole number of samples, at least 1")
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"batch {batch} takes {seconds} s: a time must be finite and positive; measure it again")
    if not points:
        raise ValueError("no measured point; measure at least two batch sizes")
    if len(points) == 1 and not (max_batch == 1 and 1 in points):
        ((batch, seconds),) = points.items()
        raise ValueError(
            f"a single measured point (batch {batch}: {seconds:g} s) has no slope; measure a second batch size"
        )


def _first(values: NDArray[np.float64], wrong: NDArray[np.bool_]) -> str:
    index = int(np.argmax(wrong | ~np.isfinite(values)))
    return f"{values[index]} at batch {index}"
