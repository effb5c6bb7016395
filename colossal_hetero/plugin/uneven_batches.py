"""The part of a plugin that gives every replica of the model batches that fit its speed and memory: micro-batches of a
training loop (:class:`UnevenBatches`), or numbers of micro-batches of a schedule (:class:`PipelineBatches`)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from colossalai.pipeline.schedule._utils import get_batch_size
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..common.methods import wrap_method
from ..data_parallel.attach import MeasuredBatches
from ..data_parallel.batch_balancer import BatchBalancer, BatchReport, BatchShare
from ..data_parallel.config import BatchConfig
from ..data_parallel.loader import HeteroDataLoader, check_same_order, make_loader
from ..data_parallel.resumable_loader import make_even_loader
from ..planner.cost.gradient_times import divide_micro_batches
from ..planner.cost.plan import Plan
from ..profiling.rank_profiler import describe
from .training_objects import TrainingObjects


class UnevenBatches:
    """Makes data loaders in which every replica has its own batches, measures the replicas, and divides the batches. A
    ``plugin`` has ``replica()``, the index of this rank's replica and their number, and ``batch_setup(objects)``."""

    def __init__(self, config: BatchConfig) -> None:
        self.balancer: BatchBalancer | None = None  # of the objects that were configured last
        self._config = config
        self._even_loaders: dict[int, tuple[DataLoader, dict[str, Any]]] = {}
        """Colossal-AI's loaders that were made here, by ``id``, each with the arguments it was made with."""

    def prepare_dataloader(
        self,
        plugin: Any,
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
        """A loader in which every rank has its own batches once it is boosted: then sizes follow from the global batch.
        With a ``batch_size``, every rank has that many samples per batch until then, for example to evaluate."""
        arguments: dict[str, Any] = dict(
            shuffle=shuffle, seed=seed, drop_last=drop_last, pin_memory=pin_memory, num_workers=num_workers, **kwargs
        )
        if batch_size is None:
            if distributed_sampler_cls is not None:
                raise ValueError(
                    f"distributed_sampler_cls={distributed_sampler_cls.__name__} divides evenly; leave it out of a "
                    "loader to train with, or give a batch_size for a loader that is not trained with"
                )
            return self._make_loader(plugin, dataset, arguments)
        arguments_of_loader = arguments | dict(distributed_sampler_cls=distributed_sampler_cls)
        loader = make_even_loader(self._preparing(plugin, prepare), dataset, batch_size, **arguments_of_loader)
        self._even_loaders[id(loader)] = loader, arguments
        return loader

    def before_configure(self, plugin: Any, objects: TrainingObjects) -> TrainingObjects:
        _check_step(objects.optimizer)
        loader = self._loader_to_train_with(plugin, objects.dataloader)
        check_same_order(loader)
        self._description = describe(objects.model)
        return objects._replace(dataloader=loader)

    def measure(self, plugin: Any, objects: TrainingObjects) -> None:
        self._measured = MeasuredBatches(plugin.batch_setup(objects), self._description, *objects[:4])

    def attach(self, plugin: Any, objects: TrainingObjects) -> None:
        self.balancer = self._measured.attach(objects.lr_scheduler)
        del self._measured

    def report(self) -> BatchReport | None:
        """How global batches are divided now; None before ``booster.boost``."""
        return None if self.balancer is None else self.balancer.report()

    def _loader_to_train_with(self, plugin: Any, dataloader: DataLoader | None) -> HeteroDataLoader:
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

    def _preparing(self, plugin: Any, prepare: Callable[..., DataLoader]) -> Callable[..., DataLoader]:
        return prepare

    def _make_loader(self, plugin: Any, dataset: Dataset, arguments: dict[str, Any]) -> HeteroDataLoader:
        rank, size = plugin.replica()
        return make_loader(dataset, self._config.global_batch_size, rank, size, **arguments)


def _check_step(optimizer: Any) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs a closure, which would run forward and backward passes inside the "
            "step, but the step comes after the passes of all micro-batches of a global batch; use another optimizer"
        )


class PipelineBatches(UnevenBatches):
    """Divides global batches over replicas in micro-batches of one size, as ``plan`` says. The loader gives a replica
    its part at once, and the schedule cuts it.

    Gradients are exact: the loss of a micro-batch is weighted such that the sum over replicas is the mean over the
    samples of the global batch. See [Note: weights of micro-batches] in ``data_parallel``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(BatchConfig(global_batch_size=plan.global_batch))
        self.micro_batches = tuple(replica.micro_batches for replica in plan.replicas)
        self._micro_batch = plan.micro_batch
        self._loader: HeteroDataLoader | None = None
        self._stages = [len(replica.stages) for replica in plan.replicas]
        self._seconds = [max(stage.micro_batch_seconds for stage in replica.stages) for replica in plan.replicas]
        self._weight = 1.0  # of the losses of the batch that runs

    def _preparing(self, plugin: Any, prepare: Callable[..., DataLoader]) -> Callable[..., DataLoader]:
        index, replicas = plugin.replica()

        def of_replica(*args: Any, distributed_sampler_cls: Any = None, **kwargs: Any) -> DataLoader:
            # Colossal-AI's plugin knows one replica, and gives its number of replicas.
            def sampler(data: Dataset, shuffle: bool, **_: int) -> Any:
                kind = distributed_sampler_cls or DistributedSampler
                return kind(data, num_replicas=replicas, rank=index, shuffle=shuffle)

            return prepare(*args, distributed_sampler_cls=sampler, **kwargs)

        return of_replica

    def _make_loader(self, plugin: Any, dataset: Dataset, arguments: dict[str, Any]) -> HeteroDataLoader:
        loader = super()._make_loader(plugin, dataset, arguments)
        sampler: Any = loader.batch_sampler
        rest = 0 if sampler.drop_last else sampler.dataset_size % sampler.global_batch_size
        if rest:
            self._divide(rest)  # raises an error if that is not possible
        loader.divide_by(self._division)
        return loader

    def before_configure(self, plugin: Any, objects: TrainingObjects) -> TrainingObjects:
        self._index, _ = plugin.replica()
        self._loader = objects.dataloader if isinstance(objects.dataloader, HeteroDataLoader) else None
        size = getattr(objects.dataloader, "batch_size", None)
        if self._loader is None and size is not None:
            self._planned_share(size)
        return objects

    def measure(self, plugin: Any, objects: TrainingObjects) -> None:
        """Measure nothing: times are those of the plan."""

    def attach(self, plugin: Any, objects: TrainingObjects) -> None:
        wrap_method(objects.optimizer, "step", self._step)

    def report(self) -> BatchReport | None:
        """The same, by replica, with the times of the plan."""

        def work(counts: Sequence[int]) -> list[float]:
            each = zip(counts, self._seconds, self._stages, strict=True)
            return [seconds * (count + stages - 1) for count, seconds, stages in each]

        size, total, replicas = self._micro_batch, sum(self.micro_batches), len(self.micro_batches)
        times, fastest = work(self.micro_batches), min(self._seconds)
        fits_equal = total % replicas == 0 and total // replicas >= max(self._stages)
        shares = []
        for index, count in enumerate(self.micro_batches):
            slowdown, seconds = self._seconds[index] / fastest, times[index]
            waits = max(times) - seconds
            shares.append(BatchShare(index, "", count * size, (size,) * count, slowdown, seconds, 0.0, waits))
        return BatchReport(
            of="replica",
            global_batch_size=total * size,
            shares=tuple(shares),
            iteration_seconds=max(times),
            equal_seconds=max(work([total // replicas] * replicas)) if fits_equal else None,
            changes=0,
            is_measured=False,
        )

    def first_sample(self, micro_batch: int) -> int:
        """Number of samples of the current global batch before this replica's ``micro_batch``, counted from 0."""
        current = None if self._loader is None else self._loader.current
        first = sum(self.micro_batches[: self._index]) * self._micro_batch if current is None else current.first
        return first + micro_batch * self._micro_batch

    def continue_loader(self, plugin: Any, loader: HeteroDataLoader) -> None:
        """Let a loader that another plan has used draw this replica's batches from now on."""
        rank, size = plugin.replica()
        loader.continue_as(rank, size, self._division)

    def run(
        self,
        schedule: Any,
        execute: Callable[[Iterator[Any], Callable[[Any, Any], Tensor]], dict],
        batches: Iterator[Any],
        criterion: Callable,
    ) -> dict:
        """Train on this replica's part of the next global batch; ``loss`` is the mean over its samples."""
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
        return result

    def _weight_of(self, samples: int) -> float:
        current = None if self._loader is None else self._loader.current
        if current is not None and current.samples == samples:
            return current.samples / current.global_samples
        return self._planned_share(samples)

    def _planned_share(self, samples: int) -> float:
        shares = [count * self._micro_batch for count in self.micro_batches]
        if samples != shares[self._index]:
            raise ValueError(
                f"a batch of {samples} samples does not fit the plan: its replicas take "
                f"{', '.join(map(str, shares))} samples of each global batch, and this is replica {self._index}; make "
                "the loader with plugin.prepare_dataloader(dataset) without a batch_size"
            )
        return samples / sum(shares)

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if self._loader is not None and self._loader.current is not None:
            self._loader.finish_global_batch()
        return result

    def _division(self, samples: int) -> Sequence[Sequence[int]]:
        is_full = samples == self._config.global_batch_size
        return [[count * self._micro_batch] for count in (self.micro_batches if is_full else self._divide(samples))]

    def _divide(self, samples: int) -> tuple[int, ...]:
        fewest = sum(self._stages) * self._micro_batch
        if samples % self._micro_batch or samples < fewest:
            raise ValueError(
                f"the last global batch of an epoch has {samples} samples, which must be a multiple of the micro-batch "
                f"of {self._micro_batch} and at least {fewest} (a micro-batch for each stage of all replicas); use "
                "drop_last=True"
            )
        # A pipeline of P stages takes (k + P − 1)·c seconds for k micro-batches of c seconds (docs/algorithms.md, 2.3).
        fill = [stages * each for stages, each in zip(self._stages, self._seconds, strict=True)]
        return tuple(divide_micro_batches(fill, self._seconds, samples // self._micro_batch, self._stages))
