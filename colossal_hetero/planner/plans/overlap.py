"""How much of the time of data-parallel synchronization the passes of the model hide (Holmes)."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["exposed_seconds"]


def exposed_seconds(
    synchronization_seconds: float, passes: Iterable[tuple[float, float]], *, equal: bool = True
) -> float:
    """What the overlapped optimizer adds to an iteration, of the time in which gradients are summed over replicas.

    One half of that time is a reduce-scatter of gradients, which the backward pass of the last micro-batch hides. The
    other half is an all-gather of parameters, which the forward pass of the first micro-batch of the next iteration
    hides. What is longer than its pass is added. The first and the last bucket, which nothing hides, are not counted,
    nor is that communication slows down computation.

    Args:
        synchronization_seconds: Of an all-reduce of all gradients.
        passes: Seconds of a forward and a backward pass of one micro-batch, for each stage of each replica. The stage
            with the shortest passes decides, as if the gradients of all stages took equally long.
        equal: Whether the replicas are alike. If they are not, no pass hides the all-gather of parameters.
    """
    half = synchronization_seconds / 2
    return max(max(half - forward if equal else half, 0.0) + max(half - backward, 0.0) for forward, backward in passes)
