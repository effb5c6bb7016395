"""The settings of uneven batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..common.methods import with_checked_names
from ..planner.batches.allocation import ACCUMULATIONS
from ..planner.batches.batch_profile import BatchProfile
from ..profiling.training_step import TrainingStep, default_training_step

WEIGHTS = ("samples", "tokens", "next_tokens")  # kinds of mean of a loss, by name
METHODS = ("exact", "uniform", "flops", "adapt")  # methods to divide a global batch in training; the planner has more


@with_checked_names
@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Division of a global batch over data-parallel ranks."""

    global_batch_size: int
    """Samples per optimizer step, over all ranks and accumulation steps."""
    method: str = "exact"
    """``exact`` minimizes the predicted time per global batch. For comparison, ``uniform`` gives every rank the same
    number of samples (DeepSpeed), and ``flops`` divides in proportion to the FLOP/s in the profile (Whale). ``adapt``
    divides in proportion to measured throughput. If ``profile`` exists, with links or a ``cluster``,
    ``HeteroZeroPlugin`` also leaves out devices that slow down the others, and numbers the ranks in the order of the
    best ring (ADAPT, chapter 5)."""
    accumulation: str = "shared"
    """``shared``: all ranks run the same number of micro-batches per global batch, so training loops have equally many
    iterations, as their collectives and schedules require. ``per_rank``: each rank runs the number that is best for it
    (Poplar, Algorithm 2); only in stages 0 and 1."""
    profile: str | Path | None = None
    """Path of a profile file, which is used if it exists; otherwise it is written after measuring. None: every run
    measures."""
    cluster: str | Path | None = None
    """Path of a cluster file of the same ranks, whose links method ``adapt`` uses if ``profile`` has none."""
    max_micro_batch: int | None = None
    """Largest micro-batch, in samples, that a rank runs or tries. None: only memory sets the limit."""
    multiple_of: int | None = None
    """Number that all batch sizes are multiples of, such as 2 for timm's Mixup or for pairs. None: found before
    training, up to 4, if ``training_step`` or ``collate_fn`` fails with other sizes."""
    reallocate_above: float = 0.02
    """Predicted gain from which on global batches are divided again (0.02 = 2 %), if it is also above the noise of the
    measured times; ``inf``: never."""
    check_every: int | None = None
    """Global batches between two checks of the ranks' speed. None: at the end of each epoch. Below five, a check may
    have to wait for the next one: two global batches of a division do not count, and a speed needs three."""
    training_step: TrainingStep = default_training_step
    """``(model, criterion, batch) -> mean loss``: the forward pass of the training loop, used for measuring."""
    weight_by: str | Callable[[Any], Any] | None = None
    """Kind of mean of the loss, for the weights of unequal micro-batches: ``samples``; ``tokens``, the labels that are
    not -100; ``next_tokens``, these without the first of each sequence, as in causal language models; or a function of
    a batch, such as ``lambda batch: batch["mask"].sum()``. None: samples, if comparing losses before training confirms
    it; otherwise an error asks for it."""

    @property
    def largest_micro_batch(self) -> int:
        """Largest micro-batch, in samples, unless memory sets a lower limit."""
        return min(self.global_batch_size, self.max_micro_batch or self.global_batch_size)

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
        if self.cluster is not None and (self.method != "adapt" or self.profile is None):
            raise ValueError(
                f"cluster={str(self.cluster)!r} has an effect only with method='adapt' and an earlier run's profile"
            )
        if not (self.weight_by is None or callable(self.weight_by) or self.weight_by in WEIGHTS):
            raise ValueError(
                f"weight_by={self.weight_by!r} is not one of {', '.join(WEIGHTS)}, nor a function of a batch"
            )
        if not self.reallocate_above > 0 or math.isnan(self.reallocate_above):
            raise ValueError(f"reallocate_above={self.reallocate_above} must be above 0; inf switches it off")


@dataclass(frozen=True)
class BatchSetup:
    """What uneven batches need to know of the plugin that trains with them."""

    config: BatchConfig
    stage: int
    precision: str
    replica_of: Sequence[int]
    """Index of the model replica of each rank, by rank."""
    synchronize: Callable[[bool], None]
    """Called before a forward pass; True: its gradients are to be summed over replicas."""
    leaves: Sequence[Tensor] = ()
    """The tensors that backward passes add gradients to; (): the model's parameters."""
    max_norm: float = 0.0
    """Norm that gradients are clipped to before the step; 0: no clipping, or the optimizer does it."""
    profile: BatchProfile | None = None
    """Profile of these ranks; None: the one that ``config`` names, or a new one."""
