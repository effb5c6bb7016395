"""Each replica's share of the data, and the weight of its loss, when the plan gives replicas different batches: n / N
with n of N samples, so that the summed gradients are those of the mean over the global batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ...data_parallel.loader import HeteroDataLoader, make_loader
from ...data_parallel.resumable_loader import make_even_loader
from ...planner.batches.allocation import divide_micro_batches
from ...planner.cost.plan import Plan

__all__ = ["ReplicaBatches"]


class ReplicaBatches:
    """Loaders of a replica's share of every global batch, and checks of the batches that it is given."""

    def __init__(self, plan: Plan, replica: int) -> None:
        self._plan, self._index = plan, replica
        self._loader: HeteroDataLoader | None = None

    @property
    def samples(self) -> int:
        return self._plan.micro_batch * self._plan.replicas[self._index].micro_batches

    def first_sample(self, micro_batch: int) -> int:
        """Number of samples of the current global batch before this replica's ``micro_batch``, counted from 0."""
        current = None if self._loader is None else self._loader.current
        if current is not None:
            first = current.first
        else:
            first = sum(each.micro_batches for each in self._plan.replicas[: self._index]) * self._plan.micro_batch
        return first + micro_batch * self._plan.micro_batch

    def prepare_dataloader(
        self,
        prepare: Callable[..., DataLoader],
        dataset: Dataset,
        batch_size: int | None,
        *args: Any,
        distributed_sampler_cls: Any = None,
        **kwargs: Any,
    ) -> DataLoader:
        """A loader of ``dataset``: of this replica's share of each global batch, or of ``batch_size`` samples, to
        evaluate."""
        replicas = len(self._plan.replicas)
        if batch_size is not None:

            def prepare_here(*args: Any, distributed_sampler_cls: Any = None, **kwargs: Any) -> DataLoader:
                sampler = distributed_sampler_cls or DistributedSampler

                def of_replica(data: Dataset, num_replicas: int, rank: int, shuffle: bool) -> Any:
                    return sampler(data, num_replicas=replicas, rank=self._index, shuffle=shuffle)

                return prepare(*args, distributed_sampler_cls=of_replica, **kwargs)

            kwargs["distributed_sampler_cls"] = distributed_sampler_cls
            return make_even_loader(prepare_here, dataset, batch_size, *args, **kwargs)
        if distributed_sampler_cls is not None:
            raise ValueError(
                f"distributed_sampler_cls={distributed_sampler_cls.__name__} gives all replicas equally many samples, "
                "but the plan does not; leave it out, or give a batch_size for a loader that is not trained with"
            )
        names = ("shuffle", "seed", "drop_last", "pin_memory", "num_workers")
        given = dict(zip(names, args, strict=False)) | kwargs
        loader = make_loader(dataset, self._plan.global_batch, self._index, replicas, **given)
        samples: int = loader.batch_sampler.dataset_size  # type: ignore[union-attr]
        rest = 0 if given.get("drop_last") else samples % self._plan.global_batch
        if rest:
            self._divide_rest(rest)
        loader.divide_by(self.division)
        return loader

    def check_loader(self, loader: Any) -> None:
        self._loader = loader if isinstance(loader, HeteroDataLoader) else None
        size = getattr(loader, "batch_size", None)
        if self._loader is None and size is not None:
            self._check(size)

    def checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            if tensors and self._share(len(tensors[0])) is None:
                self._check(len(tensors[0]))
            yield batch

    def weighted(self, criterion: Callable[[Any, Any], Tensor]) -> tuple[Callable[[Any, Any], Tensor], Callable]:
        """``criterion`` with this replica's weight for the batch that the schedule has drawn when it is first called,
        and a function that takes the weight from a mean loss again."""
        weight: list[float] = []

        def run(outputs: Any, inputs: Any) -> Tensor:
            if not weight:
                weight.append(self._weight())
            return criterion(outputs, inputs) * weight[0]

        def mean(loss: Tensor | None) -> Tensor | None:
            return loss if loss is None or not weight else loss / weight[0]

        return run, mean

    def attach(self, optimizer: Any) -> None:
        step = optimizer.step

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if self._loader is not None and self._loader.current is not None:
                self._loader.finish_global_batch()
            return result

        optimizer.step = run

    def _weight(self) -> float:
        current = None if self._loader is None else self._loader.current
        if current is None:
            return self.samples / self._plan.global_batch
        return current.samples / current.global_samples

    def _share(self, samples: int) -> float | None:
        if samples == self.samples:
            return samples / self._plan.global_batch
        current = None if self._loader is None else self._loader.current
        return None if current is None or current.samples != samples else samples / current.global_samples

    def division(self, samples: int) -> Sequence[Sequence[int]]:
        if samples == self._plan.global_batch:
            return [[replica.micro_batches * self._plan.micro_batch] for replica in self._plan.replicas]
        return self._divide_rest(samples)

    def _divide_rest(self, samples: int) -> Sequence[Sequence[int]]:
        size, replicas = self._plan.micro_batch, self._plan.replicas
        stages = [len(replica.stages) for replica in replicas]
        if samples % size or samples // size < sum(stages):
            raise ValueError(
                f"the last global batch of an epoch has {samples} samples, which must be a multiple of the plan's "
                f"micro-batch of {size} and at least {sum(stages) * size} (a micro-batch for each stage of all "
                "replicas); use drop_last=True"
            )
        seconds = [max(stage.micro_batch_seconds for stage in replica.stages) for replica in replicas]
        return [[number * size] for number in divide_micro_batches(seconds, samples // size, stages)]

    def _check(self, samples: int) -> None:
        if samples != self.samples:
            shares = ", ".join(str(each.micro_batches * self._plan.micro_batch) for each in self._plan.replicas)
            raise ValueError(
                f"a batch of {samples} samples does not fit the plan: its replicas take {shares} samples of each "
                f"global batch, and this is replica {self._index}; make the loader with "
                "plugin.prepare_dataloader(dataset) without a batch_size"
            )
