"""``prepare_dataloader`` for plugins that divide global batches unevenly."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

from colossalai.booster.plugin.plugin_base import Plugin
from torch.utils.data import DataLoader, Dataset

from ..data_parallel.config import BatchConfig
from ..data_parallel.loader import HeteroDataLoader, make_loader

__all__ = ["UnevenLoaders"]


class UnevenLoaders(Plugin):
    """Makes loaders in which every replica has its own batches, and keeps Colossal-AI's for everything else.

    To be inherited from before the plugin whose loaders it replaces.
    """

    batches: BatchConfig | None
    """How global batches are divided; None leaves loaders as they are."""
    _plain: dict[int, tuple[DataLoader, dict[str, Any]]]
    """Loaders of Colossal-AI that were handed out, by ``id``, with the arguments they were made with."""

    @abstractmethod
    def _replica(self) -> tuple[int, int]:
        """Index of this rank's replica of the model, and how many there are."""

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **kwargs: Any,
    ) -> DataLoader:
        """A loader of ``dataset`` in which every rank has its own batches once it has been boosted.

        With a ``batch_size`` it is Colossal-AI's, with that many samples per rank, as for evaluation. Boosting it
        makes it one of ours, because batches in training follow from the global batch size.

        Raises:
            TypeError: the data set has no length.
            ValueError: the data set is smaller than a global batch, or an argument cannot be combined.
        """
        arguments = dict(
            shuffle=shuffle, seed=seed, drop_last=drop_last, pin_memory=pin_memory, num_workers=num_workers, **kwargs
        )
        if self.batches is not None and batch_size is None:
            if distributed_sampler_cls is not None:
                raise ValueError(
                    f"distributed_sampler_cls={distributed_sampler_cls.__name__} divides evenly; leave it out of "
                    "a loader "
                    "to train with, or give a batch_size for a loader that is not trained with"
                )
            return self._make(dataset, arguments)
        loader = super().prepare_dataloader(
            dataset, batch_size, distributed_sampler_cls=distributed_sampler_cls, **arguments
        )
        if self.batches is not None:
            self._plain[id(loader)] = loader, arguments
        return loader

    def loader_to_train_with(self, dataloader: DataLoader | None) -> HeteroDataLoader:
        """``dataloader`` if it is one of ours, else one of ours in place of it.

        Raises ``ValueError`` where this plugin did not make it.
        """
        if isinstance(dataloader, HeteroDataLoader):
            return dataloader
        assert self.batches is not None
        if dataloader is None or id(dataloader) not in self._plain:
            raise ValueError(
                "give booster.boost the dataloader that plugin.prepare_dataloader made: each rank's batches are its own"
            )
        warnings.warn(
            f"batch_size={dataloader.batch_size} is not used in training: micro-batches follow from "
            f"global_batch_size={self.batches.global_batch_size}. Train with the loader that booster.boost returns",
            stacklevel=4,
        )
        return self._make(dataloader.dataset, self._plain[id(dataloader)][1])

    def _make(self, dataset: Dataset, arguments: dict[str, Any]) -> HeteroDataLoader:
        assert self.batches is not None
        rank, size = self._replica()
        return make_loader(dataset, self.batches.global_batch_size, rank, size, **arguments)
