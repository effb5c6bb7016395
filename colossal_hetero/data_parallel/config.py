"""The settings of uneven batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..planner.batches.allocation import ACCUMULATIONS
from ..profiling.training_step import TrainingStep, default_training_step

__all__ = ["METHODS", "WEIGHTS", "BatchConfig"]

WEIGHTS = ("samples", "tokens", "next_tokens")
"""What a loss can be a mean over, by name."""
METHODS = ("exact", "uniform", "flops")
"""Methods to divide a global batch that training supports; the planner has more."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a global batch is divided over data-parallel ranks."""

    global_batch_size: int
    """Samples per optimizer step, over all ranks and accumulation steps."""

    method: str = "exact"
    """``exact`` minimizes the predicted time per global batch. For comparison, ``uniform`` gives every rank the same
    number of samples (DeepSpeed), and ``flops`` divides in proportion to the FLOP/s in the profile (Whale)."""

    accumulation: str = "shared"
    """With ``shared`` all ranks run the same number of micro-batches per global batch. The training loop then has the
    same number of iterations on all ranks, as its own collectives and its learning-rate schedule require. With
    ``per_rank`` each rank runs the number that is best for it (Poplar, Algorithm 2); only in stages 0 and 1."""

    profile: str | Path | None = None
    """Path of a profile file. If the file exists, it is used instead of measuring; otherwise it is written after
    measuring."""

    profile_cache: str | Path | None = None
    """The folder in which profiles are kept for the next run with the same model, data and devices; not used with
    ``profile``. None means ``$XDG_CACHE_HOME/colossal_hetero`` or ``~/.cache/colossal_hetero``; "" means not to keep
    them."""

    max_micro_batch: int | None = None
    """Largest micro-batch, in samples, that a rank runs or tries. None: only memory sets the limit."""

    multiple_of: int | None = None
    """All batch sizes are multiples of so many samples, such as 2 for timm's Mixup or for pairs. None: found before
    training, up to 4, if ``training_step`` or ``collate_fn`` fails with other sizes."""

    sync_batchnorm: bool = False
    """True if batch normalization uses the samples of all ranks in the same micro-step, each with the same weight. It
    needs ``accumulation="shared"`` and replicas of one rank."""

    reallocate_above: float = 0.02
    """Global batches are divided again if that is predicted to make them faster by more than this share (0.02 = 2 %),
    and by more than the noise of the measured times; ``inf``: never."""

    check_every: int | None = None
    """Number of global batches between two checks of the ranks' speed. None: at the end of each epoch. With fewer than
    five, a check may have to wait for the next one, because the first two global batches of a division do not count and
    a speed is computed from three."""

    training_step: TrainingStep = default_training_step
    """``(model, criterion, batch) -> mean loss``: the forward pass of the training loop, used for measuring."""

    weight_by: str | Callable[[Any], Any] | None = None
    """What the loss is a mean over, so that the losses of unequal micro-batches get the right weights. ``samples``;
    ``tokens``: the labels that are not -100; ``next_tokens``: these without the first of each sequence, which causal
    language models do not predict; or a function ``batch -> number`` of a batch of the loader, such as
    ``lambda batch: batch["mask"].sum()``. None: found before training by comparing losses, or asked for."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "max_micro_batch", "check_every", "multiple_of"):
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
        if not (self.weight_by is None or callable(self.weight_by) or self.weight_by in WEIGHTS):
            raise ValueError(
                f"weight_by={self.weight_by!r} is not one of {', '.join(WEIGHTS)}, nor a function of a batch"
            )
        if self.sync_batchnorm and self.accumulation == "per_rank":
            raise ValueError(
                'sync_batchnorm=True waits for all ranks in each micro-batch, but with accumulation="per_rank" they '
                'run different numbers of them; use accumulation="shared"'
            )
        if not self.reallocate_above > 0 or math.isnan(self.reallocate_above):
            raise ValueError(f"reallocate_above={self.reallocate_above} must be above 0; inf switches it off")
