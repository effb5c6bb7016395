"""The part of a plugin that gives every replica of the model batches that fit its speed and memory."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..data_parallel.accumulation import GradientAccumulation
from ..data_parallel.attach import BatchSetup, attach_batches, profile_for, trial_run
from ..data_parallel.batch_balancer import BatchBalancer
from ..data_parallel.config import BatchConfig
from ..data_parallel.loader import HeteroDataLoader, check_same_order, make_loader
from ..data_parallel.resumable_loader import make_even_loader
from ..data_parallel.training_loop.sync_batch_norm import synchronize_batch_norm
from ..profiling.batches.rank_profiler import describe
from .part import PluginPart, TrainingObjects

__all__ = ["ReplicaPlugin", "UnevenBatches"]


class ReplicaPlugin(Protocol):
    """What a plugin must provide for uneven batches."""

    def replica(self) -> tuple[int, int]:
        """Index of this rank's replica of the model, and the number of replicas."""

    def batch_setup(self, objects: TrainingObjects) -> BatchSetup:
        """How the configured objects train. Called by all ranks."""


class UnevenBatches(PluginPart):
    """Makes data loaders in which every replica has its own batches, measures the replicas, and divides the batches.

    Args:
        config: how to divide global batches.
    """

    def __init__(self, config: BatchConfig) -> None:
        self.balancer: BatchBalancer | None = None
        """Divides the batches of the objects that were configured last; None before that."""
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

        With a ``batch_size`` every rank has that many samples per batch, for example to evaluate. If that loader is
        boosted, one with uneven batches takes its place, because the batch sizes in training follow from the global
        batch size.

        Args:
            prepare: Colossal-AI's ``prepare_dataloader``, which takes all arguments that follow.
            seed: of the order; see :func:`.loader.make_loader` and :func:`.resumable_loader.make_even_loader`.

        Raises:
            TypeError: the data set has no length.
            ValueError: the data set is smaller than a global batch, or an argument cannot be combined.
        """
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
        """The same objects with a data loader of uneven batches; see ``PluginPart.before_configure``.

        Raises:
            ValueError: the plugin did not make the data loader, or batch normalization cannot be synchronized.
        """
        if objects.optimizer is None:
            return objects
        _check_step(objects.optimizer)
        loader = self._loader_to_train_with(plugin, objects.dataloader)
        check_same_order(loader)
        self._description = describe(objects.model)
        return objects._replace(dataloader=loader, model=self._synchronized(plugin, objects.model, loader))

    def measure(self, plugin: ReplicaPlugin, objects: TrainingObjects) -> None:
        """Measure the replicas, or read the profile that the user named; see ``PluginPart.measure``."""
        self._setup = plugin.batch_setup(objects)
        self._trial = trial_run(self._setup, objects.model, objects.optimizer, objects.criterion, objects.dataloader)
        self._profile, self._profile_path = profile_for(self._setup, self._description, self._trial)

    def attach(self, plugin: ReplicaPlugin, objects: TrainingObjects) -> None:
        """Divide the batches and accumulate their gradients; see ``PluginPart.attach``."""
        self.balancer, self._accumulations[objects.optimizer] = attach_batches(
            self._setup, self._profile, self._trial, objects.lr_scheduler, self._profile_path
        )
        del self._trial

    def no_sync(self, optimizer: Any) -> AbstractContextManager[None]:
        """In the block, gradients of this boosted optimizer are not summed over ranks."""
        if optimizer not in self._accumulations:
            raise RuntimeError("no_sync is for training: call booster.boost with an optimizer before it")
        return self._accumulations[optimizer].no_sync()

    def _synchronized(self, plugin: ReplicaPlugin, model: nn.Module, loader: HeteroDataLoader) -> nn.Module:
        """``model``, with synchronized batch normalization if the user wants it."""
        if not self._config.sync_batchnorm:
            return model
        if plugin.replica()[1] != dist.get_world_size():
            raise ValueError(
                f"sync_batchnorm=True needs replicas of one rank, but {dist.get_world_size()} ranks hold "
                f"{plugin.replica()[1]} replicas; use tp_size=1"
            )
        return synchronize_batch_norm(model, lambda: None if loader.current is None else loader.current.samples)

    def _loader_to_train_with(self, plugin: ReplicaPlugin, dataloader: DataLoader | None) -> HeteroDataLoader:
        """``dataloader`` if it has uneven batches, otherwise a loader of the same data that has."""
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
    """Raise ``ValueError`` if a step of the optimizer needs a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs a closure, which would run forward and backward passes inside the "
            "step, but the step comes after the passes of all micro-batches of a global batch; use another optimizer"
        )
