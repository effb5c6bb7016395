"""Give devices of one kind one time curve if their measured times differ by no more than measuring explains.

Otherwise, one of two equal devices would get more samples, and the other would wait for it. A device that is really
slower by less than :data:`MAX_SPREAD` is found while the model trains, where many more passes are timed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from .time_curve import Curve

__all__ = [
    "MAX_SPREAD",
    "divide_micro_batches",
    "equal_devices",
    "joint_curves",
    "joint_seconds",
    "micro_batch_seconds",
    "pipeline_seconds",
]

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
    joint = list(curves)
    for group in groups:
        if len({id(curves[rank]) for rank in group}) == 1:
            continue
        mean = _mean([curves[rank] for rank in group])
        by_length = {size: mean.limited(size) for size in {curves[rank].max_batch for rank in group}}
        for rank in group:
            joint[rank] = by_length[curves[rank].max_batch]
    return joint


def joint_seconds(seconds: Sequence[float], groups: Sequence[Sequence[int]]) -> list[float]:
    joint = list(seconds)
    for group in groups:
        mean = fmean(seconds[rank] for rank in group)
        for rank in group:
            joint[rank] = mean
    return joint


def _mean(curves: Sequence[Curve]) -> Curve:
    """The mean time of each size, over the curves that have it, each brought to the mean level of all."""
    common = min(len(curve.seconds) for curve in curves)
    totals = [float(curve.seconds[:common].sum()) for curve in curves]
    level = fmean(totals)
    sums = np.zeros(max(len(curve.seconds) for curve in curves))
    counts = np.zeros(len(sums))
    for curve, total in zip(curves, totals, strict=True):
        sums[: len(curve.seconds)] += curve.seconds * (level / total)
        counts[: len(curve.seconds)] += 1
    return Curve(np.maximum.accumulate(sums / counts), max(curve.min_batch for curve in curves))


# Pipeline replicas ---------------------------------------------------------------------------------------------------
# A pipeline of P stages takes ``(k + P − 1)·c`` seconds for k micro-batches of c seconds (docs/algorithms.md, 2.3).


def pipeline_seconds(micro_batches: int, seconds: float, stages: int) -> float:
    return (micro_batches + stages - 1) * seconds


def micro_batch_seconds(elapsed_seconds: float, micro_batches: int, stages: int) -> float:
    """Inverse of :func:`pipeline_seconds`."""
    return elapsed_seconds / (micro_batches + stages - 1)


def divide_micro_batches(seconds: Sequence[float], micro_batches: int, stages: int | Sequence[int]) -> tuple[int, ...]:
    """The number of micro-batches of each replica with the least time of the slowest replica.

    Every replica gets at least as many micro-batches as it has stages, because Colossal-AI's 1F1B schedule needs them.
    Each further one goes to the replica that would finish it first, which is exact: see [Note: the order statistic].
    """
    depths = [stages] * len(seconds) if isinstance(stages, int) else list(stages)
    fewest = sum(depths)
    if micro_batches < fewest:
        shown = ", ".join(map(str, sorted(set(depths))))
        raise ValueError(
            f"{micro_batches} micro-batches are too few for {len(seconds)} pipelines of {shown} stages, each of which "
            f"needs at least as many as it has stages; use a larger global batch or a smaller micro-batch, so that "
            f"there are at least {fewest}"
        )
    counts = list(depths)
    heap = [
        (pipeline_seconds(depth + 1, each, depth), replica)
        for replica, (each, depth) in enumerate(zip(seconds, depths, strict=True))
    ]
    heapq.heapify(heap)
    for _ in range(micro_batches - fewest):
        replica = heap[0][1]
        counts[replica] += 1
        heapq.heapreplace(heap, (pipeline_seconds(counts[replica] + 1, seconds[replica], depths[replica]), replica))
    return tuple(counts)
