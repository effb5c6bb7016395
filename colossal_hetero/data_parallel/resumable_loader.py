"""Loaders that Colossal-AI's plugins make, able to continue within an epoch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from .loader import WORKER_SEED
from .sampler import check_state


class ResumableDataLoader(DataLoader[Any]):
    """A ``DataLoader`` with a ``DistributedSampler`` whose position in an epoch can be saved. Replica r of R has the
    samples r, r + R, r + 2 R and so on of an epoch's order, so all replicas together have drawn its first ones, and any
    number can continue after them. A batch counts once it is returned: save the position after its step."""

    _batches_done = 0
    _first_batch = 0
    _resumed_epoch: int | None = None
    _divisions = 0

    @property
    def _sampler(self) -> DistributedSampler[Any]:
        return self.sampler  # type: ignore[return-value]

    @property
    def _samples_at_once(self) -> int:
        assert self.batch_size is not None
        return self.batch_size * self._sampler.num_replicas

    def _identity(self) -> dict[str, Any]:
        size: int = len(self.dataset)  # type: ignore[arg-type]
        return {"dataset_size": size, "shuffle": self._sampler.shuffle, "seed": self._sampler.seed}

    @property
    def seed(self) -> int:
        return self._sampler.seed

    @property
    def is_last(self) -> bool:
        """True after the first batch: the optimizer steps after each one."""
        return self._batches_done > self._first_batch

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Position in the latest epoch, as of a ``HeteroDataLoader``, in batches of all replicas; same on all ranks."""
        done = {"epoch": self._sampler.epoch, "global_batches_done": self._batches_done}
        return {**done, "global_batch_size": self._samples_at_once, "drop_last": self.drop_last, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of ``state`` in the next iteration, if it is over the same epoch (``set_epoch``)."""
        check_state(state, self._identity())
        samples = int(state["global_batches_done"]) * int(state["global_batch_size"])
        first, rest = divmod(samples, self._samples_at_once)
        if rest:
            raise ValueError(
                f"{samples} samples of the epoch were trained on, which is not a multiple of the "
                f"{self._samples_at_once} samples that all replicas draw at once; use the global batch size of the run "
                "that saved, or leave the loader out and begin the epoch again"
            )
        self._first_batch, self._resumed_epoch = first, int(state["epoch"])
        self._sampler.set_epoch(self._resumed_epoch)
        self._batches_done = first

    def continue_as(self, replica: int, replicas: int) -> None:
        """Draw the samples of another replica, of another number of them, in the iterations that begin later."""
        sampler = self._sampler
        if (sampler.rank, sampler.num_replicas) != (replica, replicas):
            self._divisions += 1
            again: DistributedSampler[Any] = DistributedSampler(
                self.dataset, replicas, replica, sampler.shuffle, sampler.seed, sampler.drop_last
            )
            for name in ("rank", "num_replicas", "num_samples", "total_size"):
                setattr(sampler, name, getattr(again, name))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first = self._first_batch if self._resumed_epoch == self._sampler.epoch else 0
        self._resumed_epoch = None
        self._batches_done = first
        assert isinstance(self.batch_sampler, _LaterBatches)
        self.batch_sampler.first = first
        with torch.random.fork_rng(devices=[], enabled=first > 0):
            batches = super().__iter__()

        def counted(divisions: int = self._divisions) -> Iterator[Any]:
            for batch in batches:
                if divisions != self._divisions:
                    raise ValueError(
                        "replicas have changed since this iteration over a loader began, and divide the samples "
                        "otherwise now; begin another one, with iter(loader)"
                    )
                self._batches_done += 1
                yield batch

        return counted()


class _LaterBatches(BatchSampler):
    first = 0  # batch of the next iteration

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, because a loader with workers calls iter() twice, and a generator begins when it first draws.
        yield from itertools.islice(super().__iter__(), self.first, None)


def make_even_loader(
    prepare: Callable[..., DataLoader[Any]],
    dataset: Any,
    batch_size: int | None,
    shuffle: bool = False,
    seed: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> DataLoader[Any]:
    """The loader of Colossal-AI's ``prepare_dataloader``, able to continue within an epoch."""
    if seed is not None and kwargs.get("distributed_sampler_cls") is None and len(args) < 4:
        kwargs["distributed_sampler_cls"] = functools.partial(DistributedSampler, seed=seed)
    return make_resumable(prepare(dataset, batch_size, shuffle, WORKER_SEED if seed is None else seed, *args, **kwargs))


def make_resumable(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader, able to continue within an epoch if its sampler is a ``DistributedSampler``."""
    if type(loader) is DataLoader and isinstance(loader.sampler, DistributedSampler) and loader.batch_size is not None:
        loader.__class__ = ResumableDataLoader
        # DataLoader forbids to replace it. Workers that persist keep the first one that they see.
        sampler = _LaterBatches(loader.sampler, loader.batch_size, loader.drop_last)
        object.__setattr__(loader, "batch_sampler", sampler)
    return loader
