"""The data loader of uneven batches: it knows which micro-batch the training loop holds, and can go on mid-epoch."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .sampler import Division, GlobalBatchSampler, MicroBatch

__all__ = ["HeteroDataLoader", "make_loader"]


class HeteroDataLoader(DataLoader[Any]):
    """A ``DataLoader`` whose batches are this rank's micro-batches of the global batches.

    ``loader.sampler`` and ``loader.batch_sampler`` are both the :class:`GlobalBatchSampler`, so ``set_epoch`` works on
    either, and on the loader. What it hands out is in the order drawn, with any number of workers.

    Args:
        dataset: with a length.
        batch_sampler: made for it.
        kwargs: of ``DataLoader``.

    Raises:
        TypeError: the dataset is iterable only.
        ValueError: batches are asked for out of order.
    """

    def __init__(self, dataset: Dataset[Any], batch_sampler: GlobalBatchSampler, **kwargs: Any) -> None:
        _check_dataset(dataset)
        if not kwargs.get("in_order", True):
            raise ValueError("in_order=False loses track of which samples train together; leave it out")
        super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)
        # DataLoader puts a sampler there that it does not use, and refuses to have it set.
        object.__setattr__(self, "sampler", batch_sampler)
        self._draws = batch_sampler
        self._iteration = 0

        self.current: MicroBatch | None = None
        """The micro-batch handed out last; None from ``iter()`` until the first, also after an epoch was left early."""

        self.micro_step: int = -1
        """Its index in its global batch, on this rank. 0 after an unfinished global batch means that this was left, and
        that what was accumulated of its gradients is void; -1 where :attr:`current` is None."""

    @property
    def global_batches(self) -> int:
        """Global batches of an epoch: optimizer steps."""
        return self._draws.global_batches

    @property
    def drawn_global_batch(self) -> int:
        """See :attr:`GlobalBatchSampler.drawn_global_batch`."""
        return self._draws.drawn_global_batch

    def divide_by(self, division: Division, *, from_global_batch: int = 0) -> None:
        """See :meth:`GlobalBatchSampler.divide_by`."""
        self._draws.divide_by(division, from_global_batch=from_global_batch)

    def redivide(self, division: Division, drawn_global_batch: int) -> None:
        """Divide anew from the first global batch that no rank has drawn.

        Args:
            division: see :data:`Division`.
            drawn_global_batch: the maximum of :attr:`drawn_global_batch` over all ranks, gathered where all are at the
                same global batch, such as after the optimizer's step; nothing may be fetched in between.
        """
        self._draws.divide_by(division, from_global_batch=drawn_global_batch + 1)

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`GlobalBatchSampler.set_epoch`."""
        self._draws.set_epoch(epoch)

    def finish_global_batch(self) -> None:
        """The optimizer has stepped: the global batch handed out last is done, and a state saved from now on resumes
        with the next. Once is enough, twice does no harm.

        Raises:
            RuntimeError: this rank has not been given the last micro-batch of the global batch.
        """
        if self.current is None or not self.current.is_last:
            raise RuntimeError(
                "the global batch cannot be finished before its last micro-batch was handed out; "
                f"the latest is {self.current}"
            )
        self._draws.finish_global_batch(self.current.global_batch)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands: what was finished, not what was drawn or handed out. The same on all ranks; it also
        fits another number of ranks and any division. It does not hold random states of transformations."""
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on where the state was saved; a script may call ``set_epoch`` with the epoch of
        the state in between. An iteration that goes on becomes void.

        Raises:
            ValueError: see :meth:`GlobalBatchSampler.load_state_dict`.
        """
        self._draws.load_state_dict(state)
        self._reset()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin an epoch; an older iteration over this loader that still goes on fails when it is asked for more.

        Raises:
            RuntimeError: no division of the global batch is known yet.
        """
        if not self._draws.is_divided:
            raise RuntimeError(
                "the batches of the ranks are not decided yet; give the loader to booster.boost(), then iterate over it"
            )
        self._reset()
        self._draws.begin_epoch()
        record: deque[MicroBatch] = deque()
        self._draws.record = record
        return _Batches(self, super().__iter__(), record, self._iteration)

    def _reset(self) -> None:
        self.current, self.micro_step = None, -1
        self._iteration += 1

    def _hand_out(self, micro_batch: MicroBatch) -> None:
        follows = self.current is not None and not self.current.is_last
        self.current, self.micro_step = micro_batch, self.micro_step + 1 if follows else 0


class _Batches:
    """One iteration over a loader, which keeps what was handed out apart from what was drawn ahead."""

    def __init__(
        self, loader: HeteroDataLoader, batches: Iterator[Any], record: deque[MicroBatch], iteration: int
    ) -> None:
        self._loader = loader
        self._batches = batches
        self._record = record
        self._iteration = iteration

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self._iteration != loader._iteration:
            raise RuntimeError(
                "this iteration over the data loader is void: another one began, a state was loaded or a batch failed; "
                "begin a new one, and make a loader of its own for what is read on the side"
            )
        try:
            batch = next(self._batches)
        except StopIteration:
            loader._draws.end_epoch()
            raise
        except Exception:
            # To go on with the next batch would put this rank a step ahead of the others.
            loader._reset()
            raise
        loader._hand_out(self._record.popleft())
        return batch

    def __len__(self) -> int:
        return len(self._loader)


def make_loader(
    dataset: Dataset[Any],
    global_batch_size: int,
    rank: int,
    world_size: int,
    *,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **kwargs: Any,
) -> HeteroDataLoader:
    """A loader of this rank's part of ``dataset``, to be divided by :meth:`HeteroDataLoader.divide_by`.

    Args:
        dataset: with a length, the same on all ranks.
        global_batch_size: samples of a global batch over all ranks.
        rank, world_size: among the data-parallel ranks.
        shuffle: whether each epoch has a new order.
        seed: of the order, and of random, numpy and torch in the workers, as Colossal-AI's ``prepare_dataloader`` seeds
            them, unless there is a ``worker_init_fn``.
        drop_last: leave out the last global batch if it is smaller.
        pin_memory, num_workers, kwargs: of ``DataLoader``.

    Raises:
        TypeError: the dataset has no length, or an argument that says who draws what.
        ValueError: see :class:`GlobalBatchSampler`.
    """
    for name in ("batch_size", "sampler", "batch_sampler"):
        if kwargs.get(name) is not None:
            raise TypeError(
                f"{name} cannot be given: the samples of each rank are drawn by its speed, global_batch_size of them "
                "over all ranks; leave it out"
            )
        kwargs.pop(name, None)
    _check_dataset(dataset)
    sampler = GlobalBatchSampler(
        len(dataset),  # type: ignore[arg-type]
        global_batch_size,
        rank,
        world_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    if kwargs.get("worker_init_fn") is None:
        kwargs["worker_init_fn"] = functools.partial(_seed_worker, seed)
    return HeteroDataLoader(dataset, sampler, pin_memory=pin_memory, num_workers=num_workers, **kwargs)


def _seed_worker(seed: int, worker: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _check_dataset(dataset: Dataset[Any]) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} is an IterableDataset, whose samples cannot be dealt out by number; "
            "give a dataset with __len__ and __getitem__"
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{name} has no length, so it cannot be divided among the ranks; give it a __len__")
