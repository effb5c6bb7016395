"""The part of a plugin that gives every pipeline as many micro-batches as fit its speed.

Replicas are pipelines of equal depth. The loader gives each replica its part of a global batch at once, a multiple of
the micro-batch, and the schedule cuts it. The times of the passes are measured while the model trains, without trials.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ..accelerator import get_accelerator
from ..data_parallel.config import BatchConfig
from ..data_parallel.loader import HeteroDataLoader
from ..planner.batches.pipeline_replicas import divide_micro_batches, micro_batch_seconds
from .part import TrainingObjects
from .uneven_batches import UnevenBatches

__all__ = ["PipelineBatches", "check_pipeline_batches"]

FIRST_CHECK = 4
"""Optimizer steps before the first check. The first step is not measured, because libraries prepare themselves in it.
"""
KEPT_TIMES = 16
"""Number of iterations whose times are kept between two checks."""


def check_pipeline_batches(batches: BatchConfig, arguments: Mapping[str, Any], planned: bool) -> None:
    """Raise ValueError if a global batch cannot be divided over pipelines with these arguments of the plugin."""
    style = arguments.get("pp_style", "1f1b")
    size = arguments.get("microbatch_size")
    reasons = (
        (planned, "a plan fixes the micro-batches of each pipeline; leave batches out"),
        (style != "1f1b", f"pp_style={style!r} runs a fixed number of micro-batches; use 1f1b"),
        (size is None, "give microbatch_size, the samples of a micro-batch in every pipeline"),
        (size is not None and size < 1, f"microbatch_size={size} must be at least 1"),
        (arguments.get("num_microbatches") is not None, "num_microbatches differs among pipelines; leave it out"),
        (batches.profile is not None, "speeds are measured in training; leave profile out"),
        (batches.max_micro_batch is not None, "microbatch_size sets the micro-batch; leave max_micro_batch out"),
        (batches.method == "flops", 'method="flops" is not available; use exact or uniform'),
        (batches.accumulation != "shared", 'accumulation="per_rank" is not available; leave it out'),
        (
            batches.weight_by not in (None, "samples"),
            "the schedule takes the mean over micro-batches, so losses are weighted by samples; leave weight_by out",
        ),
        (
            (size or 0) % (batches.multiple_of or 1) != 0,
            f"microbatch_size={size} is not a multiple of multiple_of={batches.multiple_of}",
        ),
    )
    for applies, reason in reasons:
        if applies:
            raise ValueError(f"batches with a pipeline (pp_size={arguments['pp_size']}): {reason}")
    assert size is not None
    if batches.global_batch_size % size:
        raise ValueError(
            f"global_batch_size={batches.global_batch_size} is not a multiple of microbatch_size={size}, the samples "
            "of a micro-batch in every pipeline"
        )


class PipelineBatches(UnevenBatches):
    """Divides global batches over pipelines by their measured speed.

    Gradients are exact: the loss of a micro-batch is weighted such that the mean over replicas is the mean over the
    samples of the global batch ([Note: weights of micro-batches] in ``data_parallel/accumulation.py``).

    Args:
        config: how to divide global batches.
        micro_batch: samples of a micro-batch.
    """

    def __init__(self, config: BatchConfig, micro_batch: int) -> None:
        super().__init__(config)
        self.micro_batches: tuple[int, ...] = ()
        """Micro-batches of a full global batch, by replica; () before ``booster.boost``."""
        self._micro_batch = micro_batch
        self._seconds: tuple[float, ...] = ()
        self._times: deque[float] = deque(maxlen=KEPT_TIMES)
        self._unread: deque[tuple[Any, Any, int]] = deque(maxlen=KEPT_TIMES)
        """Events before and after the passes of an iteration, and its micro-batches."""
        self._steps = 0
        self._since_check = 0
        self._due = False

    def before_configure(self, plugin: Any, objects: TrainingObjects) -> TrainingObjects:
        """Check the data loader; see :meth:`.UnevenBatches.before_configure`.

        Raises:
            ValueError: a global batch has too few micro-batches for the pipelines, or the last one of an epoch, which
                may be smaller, cannot be divided.
        """
        objects = super().before_configure(plugin, objects)
        if objects.optimizer is None:
            return objects
        replicas = plugin.replica()[1]
        divide_micro_batches([1.0] * replicas, self._config.global_batch_size // self._micro_batch, plugin.pp_size)
        sampler = objects.dataloader.batch_sampler
        rest = 0 if sampler.drop_last else sampler.dataset_size % sampler.global_batch_size
        fewest = plugin.pp_size * replicas * self._micro_batch
        if rest and (rest % self._micro_batch or rest < fewest):
            raise ValueError(
                f"the last global batch of an epoch has {rest} samples, which must be a multiple of "
                f"microbatch_size={self._micro_batch} and at least {fewest} (a micro-batch for each stage of all "
                "pipelines); use drop_last=True"
            )
        return objects

    def measure(self, plugin: Any, objects: TrainingObjects) -> None:
        """Measure nothing: times are those of training."""

    def attach(self, plugin: Any, objects: TrainingObjects) -> None:
        """Time the passes, and divide again after optimizer steps; see ``PluginPart.attach``."""
        self._loader: HeteroDataLoader = objects.dataloader
        self._schedule = plugin.scheduler
        self._stages: int = plugin.pp_size
        self._replica, replicas = plugin.replica()
        self._replica_of: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self._replica_of, self._replica)
        self._seconds = (1.0,) * replicas
        self._divide(-1)
        objects.optimizer.step = self._stepping(objects.optimizer.step)
        if not hasattr(self._schedule.forward_backward_step, "times_batches"):
            self._schedule.forward_backward_step = self._timed(self._schedule.forward_backward_step)

    def run(self, execute: Callable[[Callable[[Any, Any], Tensor]], dict], criterion: Callable) -> dict:
        """Train on this replica's part of the next global batch.

        Args:
            execute: runs the schedule on it, with the criterion that it is given.
            criterion: the user's: ``(outputs, inputs) -> mean loss``.

        Returns:
            What the schedule returns; ``loss`` is the mean over the samples of this replica.

        Raises:
            RuntimeError: the optimizer has not stepped since the last call, or the batch is not from the loader.
        """
        if self._due:
            raise RuntimeError(
                "the optimizer has not stepped since the last execute_pipeline, which ran a whole global batch; call "
                "optimizer.step() and optimizer.zero_grad() after each, and set global_batch_size to accumulate more"
            )
        schedule = self._schedule
        # The schedule takes both from the batch, whose size it expects to stay.
        schedule.num_microbatches = schedule.last_batch_size = None

        def weighted(outputs: Any, inputs: Any) -> Tensor:
            return criterion(outputs, inputs) * self._weight()

        result = execute(weighted)
        if result["loss"] is not None:
            result["loss"] = result["loss"] / self._weight()
        self._due = True
        return result

    def _weight(self) -> float:
        """The factor of the loss of the batch that the schedule runs."""
        current = self._loader.current
        if current is not None and 0 < self._schedule.batch_size < current.samples:
            raise RuntimeError(
                f"the batch has {self._schedule.batch_size} of the {current.samples} samples that were drawn for it; a "
                "collate_fn that leaves samples out does not fit the micro-batches of a pipeline: take these samples "
                "out of the dataset"
            )
        if current is None or current.samples != self._schedule.batch_size:
            raise RuntimeError(
                "this batch is not from the loader that plugin.prepare_dataloader made and that was passed to "
                "booster.boost; train with iter(loader), one batch per execute_pipeline"
            )
        return current.samples * len(self._seconds) / current.global_samples

    def _timed(self, passes: Callable[..., Any]) -> Callable[..., Any]:
        def event() -> Any:
            made = get_accelerator().Event(enable_timing=True)
            made.record()
            return made

        @wraps(passes)
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = event()
            result = passes(*args, **kwargs)
            if not self._schedule.forward_only:
                self._unread.append((begin, event(), self._schedule.num_microbatches))
            # Read when a GPU has passed them, because waiting for it here would leave it without work.
            while self._unread and self._unread[0][1].query():
                first, last, micro_batches = self._unread.popleft()
                elapsed = first.elapsed_time(last) * 1e-3
                self._times.append(micro_batch_seconds(elapsed, micro_batches, self._stages))
            return result

        run.times_batches = True  # type: ignore[attr-defined]
        return run

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._due = False
            self._loader.finish_global_batch()
            self._count_step()
            return result

        return run

    def _count_step(self) -> None:
        self._steps += 1
        self._since_check += 1
        if self._steps == 1:
            self._times.clear()
            self._unread.clear()
        every = self._config.check_every or self._loader.global_batches
        if self._config.method == "uniform" or not math.isfinite(self._config.reallocate_above):
            return
        if self._steps == FIRST_CHECK or self._since_check >= max(every, 2):
            self._since_check = 0
            self._check()

    def _check(self) -> None:
        """Divide again if the speed of a replica has changed; all ranks do the same, from the same numbers."""
        everyone: list[Any] = [None] * dist.get_world_size()
        measured = statistics.median(self._times) if self._times else None
        dist.all_gather_object(everyone, (measured, self._loader.drawn_global_batch))
        self._times.clear()
        if any(each is None for each, _ in everyone):
            return
        now = [
            max(each for (each, _), replica in zip(everyone, self._replica_of, strict=True) if replica == index)
            for index in range(len(self._seconds))
        ]
        moves = [new / old for new, old in zip(now, self._seconds, strict=True)]
        if max(moves) / min(moves) - 1 <= self._config.reallocate_above:
            return
        before, self._seconds = self.micro_batches, tuple(now)
        self._divide(max(drawn for _, drawn in everyone))
        if before != self.micro_batches and dist.get_rank() == 0:
            changes = "; ".join(
                f"replica {index}: {old} → {new} micro-batches ({seconds * 1e3:.3g} ms each)"
                for index, (old, new, seconds) in enumerate(zip(before, self.micro_batches, now, strict=True))
            )
            Console(stderr=True).print(f"global batches are divided again: {changes}", soft_wrap=True, highlight=False)

    def _divide(self, drawn_global_batch: int) -> None:
        seconds, stages, size = self._seconds, self._stages, self._micro_batch

        def division(samples: int) -> Sequence[Sequence[int]]:
            return [[count * size] for count in divide_micro_batches(seconds, samples // size, stages)]

        self.micro_batches = divide_micro_batches(seconds, self._config.global_batch_size // size, stages)
        self._loader.redivide(division, drawn_global_batch)
