"""What a user can say about batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ..planner.batches.allocation import ACCUMULATIONS
from ..profiling.training_step import TrainingStep, default_training_step

__all__ = ["METHODS", "BatchConfig"]

METHODS = ("exact", "uniform", "flops")
"""Ways to divide a global batch that can be trained with; planning knows more."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a global batch is divided over data-parallel ranks."""

    global_batch_size: int
    """Samples that one optimizer step is computed from, over all ranks and accumulation steps."""

    method: str = "exact"
    """``exact``: the least predicted time per global batch. For comparison ``uniform``, the same for all (DeepSpeed),
    and ``flops``, in proportion to the FLOP/s that the profile states (Whale)."""

    accumulation: str = "shared"
    """``shared``: all ranks run equally many micro-batches per global batch, so that the training loop has the same
    length on all of them and its own collectives and its schedule of the learning rate stay right. ``own``: each rank
    as many as is best for it (Poplar, Algorithm 2); only in stages 0 and 1."""

    profile: str | Path | None = None
    """A profile file. If it is there it is used instead of measuring; if not it is written after measuring."""

    max_micro_batch: int | None = None
    """No rank runs, or tries, a larger micro-batch than that. None: memory alone sets the limit."""

    reallocate_above: float = 0.1
    """Batches are divided anew when a rank's speed has moved by more than that share (0.1 = 10 %); ``inf``: never."""

    check_every: int | None = None
    """Global batches between two looks at the ranks' speed. None: at the end of each epoch."""

    training_step: TrainingStep = default_training_step
    """``(model, criterion, batch) -> mean loss``, for measuring: what the training loop does with a batch."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "max_micro_batch", "check_every"):
            number = getattr(self, name)
            if number is None and name != "global_batch_size":
                continue
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name}={number!r} must be a whole number")
            if number < 1:
                raise ValueError(f"{name}={number} must be at least 1")
        for name, value, known in (
            ("method", self.method, METHODS),
            ("accumulation", self.accumulation, ACCUMULATIONS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
        if not self.reallocate_above > 0 or math.isnan(self.reallocate_above):
            raise ValueError(f"reallocate_above={self.reallocate_above} must be above 0; inf never divides anew")
