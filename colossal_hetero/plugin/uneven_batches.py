"""The part of a plugin that gives every replica of the model batches that fit its speed and memory."""

from __future__ import annotations

import inspect
import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..colossalai_support.accelerator import get_accelerator
from ..data_parallel.accumulation import GradientAccumulation
from ..data_parallel.attach import BatchSetup, attach_batches, profile_for, trial_run
from ..data_parallel.batch_balancer import BatchBalancer
from ..data_parallel.config import BatchConfig
from ..data_parallel.loader import HeteroDataLoader, check_same_order, make_loader
from ..data_parallel.resumable_loader import make_even_loader
from ..data_parallel.sync_batch_norm import synchronize_batch_norm
from ..planner.batches.allocation import divide_micro_batches, micro_batch_seconds
from ..profiling.rank_profiler import describe
from .part import PluginPart, TrainingObjects

__all__ = ["PipelineBatches", "ReplicaPlugin", "UnevenBatches", "check_pipeline_batches"]


class ReplicaPlugin(Protocol):
    """Methods that a plugin must have for uneven batches."""

    def replica(self) -> tuple[int, int]:
        """Index of this rank's replica of the model, and the number of replicas."""

    def batch_setup(self, objects: TrainingObjects) -> BatchSetup:
        """The setup with which the configured objects train. Called by all ranks."""


class UnevenBatches(PluginPart):
    """Makes data loaders in which every replica has its own batches, measures the replicas, and divides the batches."""

    def __init__(self, config: BatchConfig) -> None:
        self.balancer: BatchBalancer | None = None  # of the objects that were configured last
        self._accumulations: WeakKeyDictionary[Any, GradientAccumulation] = WeakKeyDictionary()
        self._config = config
        self._even_loaders: dict[int, tuple[DataLoader, dict[str, Any]]] = {}
        """Colossal-AI's loaders that were made here, by ``id``, each with the arguments it was made with."""

    def prepare_dataloader(
        self,
        plugin: ReplicaPlugin,
        prepare: Callable[..., DataLoader],
        dataset: Dataset,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **kwargs: Any,
    ) -> DataLoader:
        """A loader of ``dataset``. Without a ``batch_size`` every rank has its own batches once the loader is boosted.
        With one, every rank has that many samples per batch, for example to evaluate; if that loader is boosted, one
        with uneven batches takes its place, because batch sizes in training follow from the global batch size."""
        arguments = dict(
            shuffle=shuffle, seed=seed, drop_last=drop_last, pin_memory=pin_memory, num_workers=num_workers, **kwargs
        )
        if batch_size is None:
            if distributed_sampler_cls is not None:
                raise ValueError(
                    f"distributed_sampler_cls={distributed_sampler_cls.__name__} divides evenly; leave it out of a "
                    "loader to train with, or give a batch_size for a loader that is not trained with"
                )
            return self._make_loader(plugin, dataset, arguments)
        loader = make_even_loader(
            prepare, dataset, batch_size, distributed_sampler_cls=distributed_sampler_cls, **arguments
        )
        self._even_loaders[id(loader)] = loader, arguments
        return loader

    def before_configure(self, plugin: ReplicaPlugin, objects: TrainingObjects) -> TrainingObjects:
        if objects.optimizer is None:
            return objects
        _check_step(objects.optimizer)
        loader = self._loader_to_train_with(plugin, objects.dataloader)
        check_same_order(loader)
        self._description = describe(objects.model)
        return objects._replace(dataloader=loader, model=self._synchronized(plugin, objects.model, loader))

    def measure(self, plugin: ReplicaPlugin, objects: TrainingObjects) -> None:
        self._setup = plugin.batch_setup(objects)
        self._trial = trial_run(self._setup, objects.model, objects.optimizer, objects.criterion, objects.dataloader)
        self._profile, self._profile_path = profile_for(self._setup, self._description, self._trial)

    def attach(self, plugin: ReplicaPlugin, objects: TrainingObjects) -> None:
        self.balancer, self._accumulations[objects.optimizer] = attach_batches(
            self._setup, self._profile, self._trial, objects.lr_scheduler, self._profile_path
        )
        del self._trial

    def no_sync(self, optimizer: Any) -> AbstractContextManager[None]:
        if optimizer not in self._accumulations:
            raise RuntimeError("no_sync is for training: call booster.boost with an optimizer before it")
        return self._accumulations[optimizer].no_sync()

    def _synchronized(self, plugin: ReplicaPlugin, model: nn.Module, loader: HeteroDataLoader) -> nn.Module:
        if not self._config.sync_batchnorm:
            return model
        if plugin.replica()[1] != dist.get_world_size():
            raise ValueError(
                f"sync_batchnorm=True needs replicas of one rank, but {dist.get_world_size()} ranks hold "
                f"{plugin.replica()[1]} replicas; use tp_size=1"
            )
        return synchronize_batch_norm(model, lambda: None if loader.current is None else loader.current.samples)

    def _loader_to_train_with(self, plugin: ReplicaPlugin, dataloader: DataLoader | None) -> HeteroDataLoader:
        if isinstance(dataloader, HeteroDataLoader):
            return dataloader
        if dataloader is None or id(dataloader) not in self._even_loaders:
            raise ValueError(
                "booster.boost needs a dataloader that plugin.prepare_dataloader made, because each rank has its own "
                "batches"
            )
        warnings.warn(
            f"batch_size={dataloader.batch_size} is not used in training: micro-batches follow from "
            f"global_batch_size={self._config.global_batch_size}. Train with the loader that booster.boost returns",
            stacklevel=5,  # the caller of booster.boost
        )
        return self._make_loader(plugin, dataloader.dataset, self._even_loaders[id(dataloader)][1])

    def _make_loader(self, plugin: ReplicaPlugin, dataset: Dataset, arguments: dict[str, Any]) -> HeteroDataLoader:
        rank, size = plugin.replica()
        return make_loader(dataset, self._config.global_batch_size, rank, size, **arguments)


def _check_step(optimizer: Any) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs a closure, which would run forward and backward passes inside the "
            "step, but the step comes after the passes of all micro-batches of a global batch; use another optimizer"
        )


# Pipeline batches ----------------------------------------------------------------------------------------------------
# Replicas are pipelines of equal depth. The loader gives each replica its part of a global batch at once, a multiple of
# the micro-batch, and the schedule cuts it. Passes are timed while the model trains, without trials.


FIRST_CHECK = 4
"""Optimizer steps before the first check; the first is not measured, because libraries prepare themselves in it."""
KEPT_TIMES = 16  # iterations whose times are kept between two checks


def check_pipeline_batches(batches: BatchConfig, arguments: Mapping[str, Any], planned: bool) -> None:
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
    """Divides global batches over pipelines by their measured speed. Gradients are exact: the loss of a micro-batch is
    weighted such that the mean over replicas is the mean over the samples of the global batch ([Note: weights of
    micro-batches] in ``data_parallel/accumulation.py``)."""

    def __init__(self, config: BatchConfig, micro_batch: int) -> None:
        super().__init__(config)
        self.micro_batches: tuple[int, ...] = ()  # of a full global batch, by replica; () before ``booster.boost``
        self._micro_batch = micro_batch
        self._seconds: tuple[float, ...] = ()
        self._times: deque[float] = deque(maxlen=KEPT_TIMES)
        self._unread: deque[tuple[Any, Any, int]] = deque(maxlen=KEPT_TIMES)  # start, end, and micro-batches
        self._steps = 0
        self._since_check = 0
        self._due = False

    def before_configure(self, plugin: Any, objects: TrainingObjects) -> TrainingObjects:
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
        """Train on this replica's part of the next global batch; ``loss`` is the mean over its samples."""
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
