"""Divide a global batch over replicas that are pipelines: how many micro-batches of one size each of them runs.

A pipeline of P stages takes ``(k + P − 1) · c`` seconds for k micro-batches of c seconds each: docs/algorithms.md, 2.3.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["divide_micro_batches", "micro_batch_seconds", "pipeline_seconds"]


def pipeline_seconds(micro_batches: int, seconds: float, stages: int) -> float:
    """Seconds of a pipeline with this number of ``stages`` for ``micro_batches`` of ``seconds`` each."""
    return (micro_batches + stages - 1) * seconds


def micro_batch_seconds(elapsed_seconds: float, micro_batches: int, stages: int) -> float:
    """The seconds of a micro-batch, if a pipeline took ``elapsed_seconds`` for all."""
    return elapsed_seconds / (micro_batches + stages - 1)


def divide_micro_batches(seconds: Sequence[float], micro_batches: int, stages: int | Sequence[int]) -> tuple[int, ...]:
    """The number of micro-batches of each replica with the least time of the slowest replica.

    Every replica gets at least as many micro-batches as it has stages, because Colossal-AI's 1F1B schedule needs them.
    Each further one goes to the replica that would finish it first. This is exact, because the time of a replica grows
    with its micro-batches (see [Note: the order statistic] in ``exact_search.py``).

    Args:
        seconds: time of a micro-batch on each replica.
        micro_batches: number of micro-batches of the global batch.
        stages: number of stages of each replica; one number if it is the same for all.

    Raises:
        ValueError: there are fewer micro-batches than stages of all replicas.
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
