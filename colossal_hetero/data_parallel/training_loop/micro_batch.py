"""One micro-batch of this rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MicroBatch"]


@dataclass(frozen=True)
class MicroBatch:
    """Position and size of one micro-batch of this rank."""

    samples: int
    """Number of samples; 0 means that the batch has only placeholder samples, of weight zero."""

    global_samples: int
    """Number of samples of its global batch, over all ranks."""

    global_batch: int
    """Index of its global batch in the epoch."""

    step: int
    """Index of this micro-batch among those of this rank in its global batch."""

    is_last: bool
    """Whether it is this rank's last micro-batch of its global batch."""

    first: int = 0
    """Number of samples of its global batch before it, in the order of the global batch."""

    weight: float | None = None
    """What the mean loss of this micro-batch counts in the global batch; None: its number of samples."""

    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of its tensors, if the loss is weighted by samples, so that all of them must be passed forward."""
