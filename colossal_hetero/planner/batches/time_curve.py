"""The time of a micro-batch by its size, on one device: a natural cubic spline through the measured sizes (Poplar;
docs/algorithms.md, 2.2) that never decreases, which :mod:`.exact_search` relies on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

MAX_DIP = 0.1  # share of its time by which a larger batch may be faster than a smaller one by noise


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds that one device takes for one micro-batch, by its number of samples."""

    seconds: NDArray[np.float64]
    """``[max_batch + 1]``, positive and non-decreasing; ``[1]`` if the device cannot hold ``min_batch`` samples. Times
    up to ``min_batch`` are equal: a rank without samples runs ``min_batch`` of weight zero, to take part in all
    collectives."""
    min_batch: int = 1  # samples of the smallest micro-batch that the model trains with, except 0

    def __post_init__(self) -> None:
        seconds = np.array(self.seconds, dtype=np.float64)
        if seconds.ndim != 1 or len(seconds) == 0:
            raise ValueError(f"seconds has shape {seconds.shape}; give one time per batch size, beginning with 0")
        wrong = ~(np.isfinite(seconds) & (seconds > 0))
        if wrong.any():
            raise ValueError(f"seconds must be finite and positive, not {seconds[wrong][0]} at batch {wrong.argmax()}")
        if (np.diff(seconds) < 0).any():
            batch = int(np.argmax(np.diff(seconds) < 0))
            raise ValueError(
                f"seconds decreases from {seconds[batch]:g} at batch {batch} to {seconds[batch + 1]:g} at batch "
                f"{batch + 1}; make it non-decreasing, or use Curve.through, which smooths noise"
            )
        if self.min_batch < 1 or 1 < len(seconds) <= self.min_batch:
            raise ValueError(
                f"min_batch={self.min_batch} must be at least 1 and at most the largest batch, {len(seconds) - 1}"
            )
        if len(seconds) > 1 and seconds[0] != seconds[self.min_batch]:
            raise ValueError(
                f"seconds[0]={seconds[0]:g} must equal seconds[{self.min_batch}]={seconds[self.min_batch]:g}, because "
                "a rank without samples runs so many samples of weight zero; use Curve.from_seconds, which takes the "
                "times of batches 1, 2, 3, …"
            )
        seconds.setflags(write=False)
        object.__setattr__(self, "seconds", seconds)

    @classmethod
    def from_seconds(cls, seconds: Sequence[float] | NDArray[np.float64], min_batch: int = 1) -> Curve:
        """The curve with the times ``[max_batch]`` of batches 1, 2, 3, …; batches below ``min_batch`` get its time."""
        times = np.asarray(seconds, dtype=np.float64)
        first = times[min_batch - 1 : min_batch]
        return cls(np.concatenate([np.repeat(first, min_batch), times[min_batch - 1 :]]), min_batch)

    @classmethod
    def through(cls, points: Mapping[int, float], max_batch: int, min_batch: int = 1) -> Curve:
        """The curve through measured ``points``, seconds by batch, up to ``max_batch``.

        Between two points it is a natural cubic spline, limited to their times, because a spline may overshoot. Above
        the last point it is a straight line, with the slope of the spline there but at least the mean slope. Below the
        first point it is a straight line too, but never faster per sample than that point. If a larger batch is faster
        than a smaller one by at most ``MAX_DIP``, both get a time in between (isotonic regression).

        Raises:
            ValueError: there are fewer than two points (one is enough if it is at ``min_batch`` and ``max_batch``); a
                batch is below 1; a time is not finite and positive; a larger batch is faster by more than ``MAX_DIP``;
                or ``max_batch`` is below ``min_batch``.
        """
        if max_batch < min_batch:
            few = "one sample" if min_batch == 1 else f"{min_batch} samples"
            raise ValueError(f"max_batch={max_batch}: the device cannot hold {few}, so there is no curve")
        # These imports take most of the time that importing this module would take.
        from scipy.interpolate import CubicSpline
        from scipy.optimize import isotonic_regression

        _check_points(points, min_batch, max_batch)
        batches = np.array(sorted(points), dtype=np.float64)
        times = np.array([points[int(batch)] for batch in batches], dtype=np.float64)
        if len(batches) == 1:
            return cls.from_seconds(np.repeat(times, min_batch), min_batch)
        highest = np.maximum.accumulate(times)
        if (times < (1.0 - MAX_DIP) * highest).any():
            late = int(np.argmax(times < (1.0 - MAX_DIP) * highest))
            early = int(np.argmax(times[:late]))
            raise ValueError(
                f"batch {batches[late]:.0f} takes {times[late]:g} s, less than batch {batches[early]:.0f} with "
                f"{times[early]:g} s, and the difference is more than noise ({MAX_DIP:.0%}); measure both again while "
                "nothing else runs on the device, or remove the wrong one"
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
        return cls.from_seconds(np.maximum.accumulate(seconds), min_batch)

    @property
    def max_batch(self) -> int:
        """Samples of the largest micro-batch that the device holds; 0 if it cannot hold ``min_batch`` samples."""
        return len(self.seconds) - 1

    def limited(self, max_batch: int) -> Curve:
        """The curve up to ``max_batch``, itself if it is shorter, and without any size below ``min_batch``."""
        if max_batch >= self.max_batch:
            return self
        return Curve(self.seconds[: max_batch + 1 if max_batch >= self.min_batch else 1], self.min_batch)

    def in_units(self, samples: int) -> Curve:
        fewest = -(-self.min_batch // samples)
        if self.max_batch < fewest * samples:
            return Curve(self.seconds[:1], fewest)
        return Curve.from_seconds(self.seconds[samples::samples], fewest)

    @property
    def peak_speed(self) -> float:
        """Highest throughput over all micro-batches, in samples per second (Poplar: ``speed_i = max_b speed_i(b)``)."""
        return float((np.arange(len(self.seconds)) / self.seconds).max())


def _check_points(points: Mapping[int, float], min_batch: int, max_batch: int) -> None:
    for batch, seconds in points.items():
        if batch < 1 or batch != int(batch):
            raise ValueError(f"batch {batch} (with {seconds} s) must be a whole number of samples, at least 1")
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"batch {batch} has time {seconds} s, which must be finite and positive; measure it again")
    if not points:
        raise ValueError("no measured point; measure at least two batch sizes")
    if len(points) == 1 and not (max_batch == min_batch and min_batch in points):
        ((batch, seconds),) = points.items()
        raise ValueError(
            f"a single measured point (batch {batch}: {seconds:g} s) gives no slope; measure a second batch size"
        )


# Devices of one kind get one curve if their measured times differ by no more than measuring explains. Otherwise, one of
# two equal devices would get more samples, and the other would wait for it. A device that is really slower by less is
# found while the model trains, where many more passes are timed.

MAX_SPREAD = 0.1
"""Share by which measured times of equal devices may differ. On a shared machine they differed by up to 12 %."""


def equal_devices(devices: Sequence[str], curves: Sequence[Curve]) -> list[list[int]]:
    """Groups of ranks with one device name and times, summed over common sizes, within :data:`MAX_SPREAD`."""
    groups: list[list[int]] = []
    for name in dict.fromkeys(devices):
        ranks = [rank for rank, device in enumerate(devices) if device == name]
        common = min(len(curves[rank].seconds) for rank in ranks)
        total = {rank: float(curves[rank].seconds[:common].sum()) for rank in ranks}
        fastest = None
        for rank in sorted(ranks, key=lambda rank: total[rank]):
            if fastest is None or total[rank] > (1.0 + MAX_SPREAD) * total[fastest]:
                fastest = rank
                groups.append([])
            groups[-1].append(rank)
    return [sorted(group) for group in groups]


def joint_curves(curves: Sequence[Curve], groups: Sequence[Sequence[int]]) -> list[Curve]:
    """The curves with one for each group, up to each rank's own largest micro-batch.

    It is the mean time of each size over the curves that have it, each brought to the mean level of all.
    """
    joint = list(curves)
    for group in groups:
        own = [curves[rank].seconds for rank in group]
        if len({id(curves[rank]) for rank in group}) == 1:
            continue
        common = min(map(len, own))
        totals = [float(seconds[:common].sum()) for seconds in own]
        table = np.full((len(own), max(map(len, own))), np.nan)
        for row, seconds, total in zip(table, own, totals, strict=True):
            row[: len(seconds)] = seconds * (fmean(totals) / total)
        smallest = max(curves[rank].min_batch for rank in group)
        mean = Curve(np.maximum.accumulate(np.nanmean(table, axis=0)), smallest)
        by_length = {size: mean.limited(size) for size in {curves[rank].max_batch for rank in group}}
        for rank in group:
            joint[rank] = by_length[curves[rank].max_batch]
    return joint


def joint_seconds(seconds: Sequence[float], groups: Sequence[Sequence[int]]) -> list[float]:
    means = {rank: fmean(seconds[each] for each in group) for group in groups for rank in group}
    return [means[rank] for rank in range(len(seconds))]
