"""The part of a plugin that gives every replica of the model batches that fit its speed and memory: micro-batches of a
training loop (:class:`UnevenBatches`), or numbers of micro-batches of a schedule (:class:`PipelineBatches`)."""

from __future__ import annotations

import inspect
import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from colossalai.pipeline.schedule._utils import get_batch_size
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..colossalai_support.accelerator import recorded_event
from ..common.methods import wrap_method
from ..common.ranks import of_every_rank, print_on_rank_0
from ..data_parallel.accumulation import GradientAccumulation
from ..data_parallel.attach import MeasuredBatches
from ..data_parallel.batch_balancer import BatchBalancer, BatchReport, BatchShare
from ..data_parallel.config import BatchConfig, BatchSetup
from ..data_parallel.loader import HeteroDataLoader, check_same_order, make_loader
from ..data_parallel.resumable_loader import make_even_loader
from ..planner.batches.allocation import divide_micro_batches, micro_batch_seconds
from ..planner.cost.plan import Plan
from ..profiling.rank_profiler import describe
from .training_objects import TrainingObjects


class ReplicaPlugin(Protocol):
    """Methods that a plugin must have for uneven batches."""

    def replica(self) -> tuple[int, int]:
        """Index of this rank's replica of the model, and the number of replicas."""

    def batch_setup(self, objects: TrainingObjects) -> BatchSetup:
        """The setup with which the configured objects train. Called by all ranks."""


def check_batches(batches: Any) -> Any:
    if not isinstance(batches, BatchConfig | None):
        raise TypeError(f"batches={batches!r} is not a BatchConfig; write BatchConfig(global_batch_size=...)")
    return batches


class UnevenBatches:
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
            self._preparing(plugin, prepare),
            dataset,
            batch_size,
            distributed_sampler_cls=distributed_sampler_cls,
            **arguments,
        )
        self._even_loaders[id(loader)] = loader, arguments
        return loader

    def before_configure(self, plugin: ReplicaPlugin, objects: TrainingObjects) -> TrainingObjects:
        _check_step(objects.optimizer)
        loader = self._loader_to_train_with(plugin, objects.dataloader)
        check_same_order(loader)
        self._description = describe(objects.model)
        return objects._replace(dataloader=loader)

    def measure(self, plugin: ReplicaPlugin, objects: TrainingObjects) -> None:
        self._measured = MeasuredBatches(plugin.batch_setup(objects), self._description, *objects[:4])

    def attach(self, plugin: ReplicaPlugin, objects: TrainingObjects) -> None:
        self.balancer, self._accumulations[objects.optimizer] = self._measured.attach(objects.lr_scheduler)
        del self._measured

    def report(self) -> BatchReport | None:
        """How global batches are divided now; None before ``booster.boost``."""
        return None if self.balancer is None else self.balancer.report()

    def no_sync(self, optimizer: Any) -> AbstractContextManager[None]:
        if optimizer not in self._accumulations:
            raise RuntimeError("no_sync is for training: call booster.boost with an optimizer before it")
        return self._accumulations[optimizer].no_sync()

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

    def _preparing(self, plugin: ReplicaPlugin, prepare: Callable[..., DataLoader]) -> Callable[..., DataLoader]:
        """``prepare`` of Colossal-AI's plugin, for the replica of this rank."""
        return prepare

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
# The loader gives each replica its part of a global batch at once, a multiple of the micro-batch, and the schedule cuts
# it. A plan says how many micro-batches each replica takes. Without a plan, replicas are pipelines of equal depth, and
# their passes are timed while the model trains, without trials.


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
    """Divides global batches over replicas in micro-batches of one size, as ``plan`` says, or by measured speed.

    Gradients are exact: the loss of a micro-batch is weighted such that the mean over replicas (with a plan, their sum)
    is the mean over the samples of the global batch. See [Note: weights of micro-batches] in ``data_parallel``."""

    def __init__(self, config: BatchConfig, micro_batch: int, plan: Plan | None = None) -> None:
        super().__init__(config)
        self.micro_batches: tuple[int, ...] = ()  # of a full global batch, by replica; () before ``booster.boost``
        self._micro_batch, self._plan = micro_batch, plan
        self._loader: HeteroDataLoader | None = None
        self._seconds: tuple[float, ...] = ()  # of a micro-batch, by replica
        self._stages: list[int] = []  # by replica
        self._weight = 1.0  # of the losses of the batch that runs
        self._times: deque[float] = deque(maxlen=KEPT_TIMES)
        self._unread: deque[tuple[Any, Any, int]] = deque(maxlen=KEPT_TIMES)  # start, end, and micro-batches
        self._steps = 0
        self._since_check = 0
        self._due = False
        self._is_measured = False
        self._changes = 0
        if plan is not None:
            self.micro_batches = tuple(replica.micro_batches for replica in plan.replicas)
            self._stages = [len(replica.stages) for replica in plan.replicas]
            self._seconds = tuple(
                max(stage.micro_batch_seconds for stage in replica.stages) for replica in plan.replicas
            )

    def _preparing(self, plugin: ReplicaPlugin, prepare: Callable[..., DataLoader]) -> Callable[..., DataLoader]:
        if self._plan is None:
            return prepare
        index, replicas = plugin.replica()

        def of_replica(*args: Any, distributed_sampler_cls: Any = None, **kwargs: Any) -> DataLoader:
            # Colossal-AI's plugin knows one replica, and gives its number of replicas.
            def sampler(data: Dataset, num_replicas: int, rank: int, shuffle: bool) -> Any:
                kind = distributed_sampler_cls or DistributedSampler
                return kind(data, num_replicas=replicas, rank=index, shuffle=shuffle)

            return prepare(*args, distributed_sampler_cls=sampler, **kwargs)

        return of_replica

    def _make_loader(self, plugin: Any, dataset: Dataset, arguments: dict[str, Any]) -> HeteroDataLoader:
        loader = super()._make_loader(plugin, dataset, arguments)
        if self._plan is None and not self._seconds:
            self._start_equal(plugin)
        sampler: Any = loader.batch_sampler
        rest = 0 if sampler.drop_last else sampler.dataset_size % sampler.global_batch_size
        for samples in (self._config.global_batch_size, rest):
            if samples:
                self._divide(samples)  # raises an error if that is not possible
        if self._plan is not None:
            loader.divide_by(self._division)
        return loader

    def _start_equal(self, plugin: Any) -> None:
        """Let all replicas count as equally fast until they are measured."""
        replicas = plugin.replica()[1]
        self._stages, self._seconds = [plugin.pp_size] * replicas, (1.0,) * replicas

    def before_configure(self, plugin: Any, objects: TrainingObjects) -> TrainingObjects:
        if self._plan is None:
            objects = super().before_configure(plugin, objects)
        self._index, self._replicas = plugin.replica()
        self._loader = objects.dataloader if isinstance(objects.dataloader, HeteroDataLoader) else None
        size = getattr(objects.dataloader, "batch_size", None)
        if self._loader is None and size is not None:
            self._weight_of(size)
        return objects

    def measure(self, plugin: Any, objects: TrainingObjects) -> None:
        """Measure nothing: times are those of training, or of the plan."""

    def attach(self, plugin: Any, objects: TrainingObjects) -> None:
        wrap_method(objects.optimizer, "step", self._step)
        if self._plan is not None:
            return
        self._replica_of = of_every_rank(self._index)
        self._start_equal(plugin)
        self._redivide(-1)
        if not hasattr(plugin.scheduler.forward_backward_step, "times_batches"):
            passes = partial(self._timed_passes, plugin.scheduler, plugin.pp_size)
            wrap_method(plugin.scheduler, "forward_backward_step", passes)
            plugin.scheduler.forward_backward_step.times_batches = True

    def report(self) -> BatchReport | None:
        """The same, by replica; None until the replicas are measured, where no plan has their times."""
        if self._plan is None and not self._is_measured:
            return None

        def work(counts: Sequence[int]) -> list[float]:
            return [
                seconds * (count + stages - 1)
                for count, seconds, stages in zip(counts, self._seconds, self._stages, strict=True)
            ]

        size, total, replicas = self._micro_batch, sum(self.micro_batches), len(self.micro_batches)
        times = work(self.micro_batches)
        fits_equal = total % replicas == 0 and total // replicas >= max(self._stages)
        slowdowns = [seconds / min(self._seconds) for seconds in self._seconds]
        shares = (
            BatchShare(index, "", count * size, (size,) * count, slowdown, each, 0.0, max(times) - each)
            for index, (count, slowdown, each) in enumerate(zip(self.micro_batches, slowdowns, times, strict=True))
        )
        return BatchReport(
            of="replica",
            global_batch_size=total * size,
            shares=tuple(shares),
            iteration_seconds=max(times),
            equal_seconds=max(work([total // replicas] * replicas)) if fits_equal else None,
            changes=self._changes,
            is_measured=self._is_measured,
        )

    def first_sample(self, micro_batch: int) -> int:
        """Number of samples of the current global batch before this replica's ``micro_batch``, counted from 0."""
        current = None if self._loader is None else self._loader.current
        first = sum(self.micro_batches[: self._index]) * self._micro_batch if current is None else current.first
        return first + micro_batch * self._micro_batch

    def continue_loader(self, plugin: ReplicaPlugin, loader: HeteroDataLoader) -> None:
        """Let a loader that another plan has used draw this replica's batches from now on."""
        loader.continue_as(*plugin.replica(), self._division)

    def run(
        self,
        schedule: Any,
        execute: Callable[[Iterator[Any], Callable[[Any, Any], Tensor]], dict],
        batches: Iterator[Any],
        criterion: Callable,
    ) -> dict:
        """Train on this replica's part of the next global batch; ``loss`` is the mean over its samples."""
        if self._due:
            raise RuntimeError(
                "the optimizer has not stepped since the last execute_pipeline, which ran a whole global batch; call "
                "optimizer.step() and optimizer.zero_grad() after each, and set global_batch_size to accumulate more"
            )
        if hasattr(schedule, "last_batch_size"):
            # The schedule takes both from the batch, whose size it expects to stay.
            schedule.num_microbatches = schedule.last_batch_size = None

        def weighted_batches() -> Iterator[Any]:
            for batch in batches:
                self._weight = self._weight_of(get_batch_size(batch))
                yield batch

        result = execute(weighted_batches(), lambda outputs, inputs: criterion(outputs, inputs) * self._weight)
        if result["loss"] is not None:
            result["loss"] = result["loss"] / self._weight
        self._due = self._plan is None
        return result

    def _weight_of(self, samples: int) -> float:
        """Weight of the mean loss over a batch of this replica."""
        current = None if self._loader is None else self._loader.current
        if current is not None and current.samples == samples:
            share = current.samples / current.global_samples
            return share if self._plan is not None else share * self._replicas
        if self._plan is not None:
            return self._planned_share(samples)
        if current is not None and samples < current.samples:
            raise RuntimeError(
                f"the batch has {samples} of the {current.samples} samples that were drawn for it; a collate_fn that "
                "leaves samples out does not fit the micro-batches of a pipeline: take these samples out of the dataset"
            )
        raise RuntimeError(
            "this batch is not from the loader that plugin.prepare_dataloader made and that was passed to "
            "booster.boost; train with iter(loader), one batch per execute_pipeline"
        )

    def _planned_share(self, samples: int) -> float:
        shares = [count * self._micro_batch for count in self.micro_batches]
        if samples != shares[self._index]:
            raise ValueError(
                f"a batch of {samples} samples does not fit the plan: its replicas take "
                f"{', '.join(map(str, shares))} samples of each global batch, and this is replica {self._index}; make "
                "the loader with plugin.prepare_dataloader(dataset) without a batch_size"
            )
        return samples / sum(shares)

    def _timed_passes(self, schedule: Any, stages: int, passes: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = recorded_event()
        result = passes(*args, **kwargs)
        if not schedule.forward_only:
            self._unread.append((begin, recorded_event(), schedule.num_microbatches))
        # Read when a GPU has passed them, because waiting for it here would leave it without work.
        while self._unread and self._unread[0][1].query():
            first, last, micro_batches = self._unread.popleft()
            elapsed = first.elapsed_time(last) * 1e-3
            self._times.append(micro_batch_seconds(elapsed, micro_batches, stages))
        return result

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        self._due = False
        if self._loader is not None and (self._plan is None or self._loader.current is not None):
            self._loader.finish_global_batch()
        if self._plan is None:
            self._count_step()
        return result

    def _count_step(self) -> None:
        assert self._loader is not None
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
            self._check(self._loader.drawn_global_batch)

    def _check(self, drawn_global_batch: int) -> None:
        """Divide again if the speed of a replica has changed; all ranks do the same, from the same numbers."""
        everyone = of_every_rank((statistics.median(self._times) if self._times else None, drawn_global_batch))
        self._times.clear()
        measured = [each for each, _ in everyone if each is not None]
        if len(measured) < len(everyone):
            return
        now = [
            max(each for each, replica in zip(measured, self._replica_of, strict=True) if replica == index)
            for index in range(len(self._seconds))
        ]
        moves = [new / old for new, old in zip(now, self._seconds, strict=True)]
        self._is_measured = True
        if max(moves) / min(moves) - 1 <= self._config.reallocate_above:
            return
        before, self._seconds = self.micro_batches, tuple(now)
        self._redivide(max(drawn for _, drawn in everyone))
        if before != self.micro_batches:
            self._changes += 1
            changes = "; ".join(
                f"replica {index}: {old} → {new} micro-batches ({seconds * 1e3:.3g} ms each)"
                for index, (old, new, seconds) in enumerate(zip(before, self.micro_batches, now, strict=True))
            )
            print_on_rank_0(f"global batches are divided again: {changes}")

    def _redivide(self, drawn_global_batch: int) -> None:
        assert self._loader is not None
        self.micro_batches = self._divide(self._config.global_batch_size)
        self._loader.divide_by(self._division, drawn_global_batch)

    def _division(self, samples: int) -> Sequence[Sequence[int]]:
        """Samples of each replica in a global batch of so many."""
        is_full = samples == self._config.global_batch_size and self.micro_batches
        return [[count * self._micro_batch] for count in (self.micro_batches if is_full else self._divide(samples))]

    def _divide(self, samples: int) -> tuple[int, ...]:
        """Micro-batches of each replica in a global batch of so many samples; ``ValueError`` if there are none."""
        fewest = sum(self._stages) * self._micro_batch
        if samples != self._config.global_batch_size and (samples % self._micro_batch or samples < fewest):
            raise ValueError(
                f"the last global batch of an epoch has {samples} samples, which must be a multiple of the micro-batch "
                f"of {self._micro_batch} and at least {fewest} (a micro-batch for each stage of all replicas); use "
                "drop_last=True"
            )
        return divide_micro_batches(self._seconds, samples // self._micro_batch, self._stages)
