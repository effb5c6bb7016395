"""The data loader of uneven batches: it knows the training loop's current micro-batch, and can resume in an epoch."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .sampler import Division, GlobalBatchSampler, MicroBatch

__all__ = ["HeteroDataLoader", "make_loader"]


class LoadTimer(Protocol):
    """Is told when the training loop waits for data."""

    def before_batch(self) -> None: ...

    def after_batch(self, samples: int | None) -> None:
        """``samples`` is None if there is no other micro-batch, or if loading it failed."""


class HeteroDataLoader(DataLoader[Any]):
    """A ``DataLoader`` whose batches are this rank's micro-batches of the global batches.

    ``loader.sampler`` and ``loader.batch_sampler`` are both the :class:`GlobalBatchSampler`, so ``set_epoch`` works on
    either of them and on the loader. With any number of workers, batches are returned in the order of drawing.

    Args:
        dataset: a dataset with a length.
        batch_sampler: the sampler of that dataset.
        kwargs: other arguments of ``DataLoader``.

    Raises:
        TypeError: the dataset is an ``IterableDataset`` or has no length.
        ValueError: ``in_order=False`` is passed.
    """

    def __init__(self, dataset: Dataset[Any], batch_sampler: GlobalBatchSampler, **kwargs: Any) -> None:
        _check_dataset(dataset)
        if not kwargs.get("in_order", True):
            raise ValueError("in_order=False is not possible, because it mixes samples of global batches; leave it out")
        super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)
        # DataLoader sets a sampler of its own here that it does not use, and forbids to change it.
        object.__setattr__(self, "sampler", batch_sampler)
        self._global_sampler = batch_sampler
        self._iteration = 0

        self.load_timer: LoadTimer | None = None
        """Is told when the loop waits for the next micro-batch."""

        self.current: MicroBatch | None = None
        """The micro-batch returned last; None between ``iter()`` and the first micro-batch."""

        self.micro_step: int = -1
        """Index of :attr:`current` in its global batch, on this rank; -1 if there is none. If it is 0 after an
        unfinished global batch, that global batch was left, and its accumulated gradients must be dropped."""

    @property
    def global_batches(self) -> int:
        """Number of global batches, i.e. optimizer steps, in an epoch."""
        return self._global_sampler.global_batches

    @property
    def drawn_global_batch(self) -> int:
        """See :attr:`GlobalBatchSampler.drawn_global_batch`."""
        return self._global_sampler.drawn_global_batch

    def divide_by(self, division: Division, *, from_global_batch: int = 0) -> None:
        """See :meth:`GlobalBatchSampler.divide_by`."""
        self._global_sampler.divide_by(division, from_global_batch=from_global_batch)

    def redivide(self, division: Division, drawn_global_batch: int) -> None:
        """Use another division from the first global batch that no rank has drawn.

        Args:
            division: see :data:`.sampler.Division`.
            drawn_global_batch: maximum of :attr:`drawn_global_batch` over all ranks. It must be gathered at the same
                global batch on all ranks, such as after an optimizer step, and no batch may be drawn in between.
        """
        self._global_sampler.divide_by(division, from_global_batch=drawn_global_batch + 1)

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`GlobalBatchSampler.set_epoch`."""
        self._global_sampler.set_epoch(epoch)

    def finish_global_batch(self) -> None:
        """Mark the current global batch as done after the optimizer's step; a state saved from now on resumes after it.

        A second call for the same global batch has no effect.

        Raises:
            RuntimeError: the current micro-batch is not the last one of its global batch.
        """
        if self.current is None or not self.current.is_last:
            raise RuntimeError(
                "the global batch cannot be finished before its last micro-batch was drawn; "
                f"the latest micro-batch is {self.current}"
            )
        self._global_sampler.finish_global_batch(self.current.global_batch)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, counted in finished global batches. It is the same on all ranks, and can be loaded
        with another number of ranks and any division. It does not include the random state of transformations."""
        return self._global_sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` resume at the position of ``state``; a running iteration becomes invalid.

        Before that ``iter()``, a script may call ``set_epoch`` with the epoch of the state.

        Raises:
            ValueError: see :meth:`GlobalBatchSampler.load_state_dict`.
        """
        self._global_sampler.load_state_dict(state)
        self._reset()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin an epoch. An older iteration over this loader becomes invalid.

        Raises:
            RuntimeError: there is no division yet.
        """
        if not self._global_sampler.is_divided:
            raise RuntimeError(
                "the global batches are not divided over the ranks yet; pass the loader to booster.boost() before "
                "iterating over it"
            )
        self._reset()
        self._global_sampler.begin_epoch()
        record: deque[MicroBatch] = deque()
        self._global_sampler.record = record
        return _Iteration(self, super().__iter__(), record, self._iteration)

    def _reset(self) -> None:
        self.current, self.micro_step = None, -1
        self._iteration += 1

    def _set_current(self, micro_batch: MicroBatch) -> None:
        follows = self.current is not None and not self.current.is_last
        self.current, self.micro_step = micro_batch, self.micro_step + 1 if follows else 0


class _Iteration:
    """One iteration over a loader; ``record`` holds the micro-batches that were drawn but not returned yet."""

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
                "this iteration over the data loader is no longer valid: another one began, a state was loaded or a "
                "batch failed; begin a new iteration, and use a second loader to read the data for another purpose"
            )
        timer = loader.load_timer
        if timer is not None:
            timer.before_batch()
        micro_batch: MicroBatch | None = None
        try:
            batch = next(self._batches)
            micro_batch = self._record.popleft()
        except StopIteration:
            loader._global_sampler.end_epoch()
            raise
        except Exception:
            # Continuing with the next batch would put this rank one micro-step ahead of the others.
            loader._reset()
            raise
        finally:
            if timer is not None:
                timer.after_batch(None if micro_batch is None else micro_batch.samples)
        loader._set_current(micro_batch)
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
    """A loader of this rank's part of ``dataset``; :meth:`HeteroDataLoader.divide_by` sets the division.

    Args:
        dataset: a dataset with a length, the same on all ranks.
        global_batch_size: samples of a global batch over all ranks.
        rank: this rank among the data-parallel ranks.
        world_size: number of data-parallel ranks.
        shuffle: whether each epoch has a new order.
        seed: seed of the order and, without a ``worker_init_fn``, of Python, NumPy and torch in the workers, as in
            Colossal-AI's ``prepare_dataloader``.
        drop_last: leave out the last global batch if it is smaller than the others.
        pin_memory, num_workers, kwargs: arguments of ``DataLoader``.

    Raises:
        TypeError: the dataset has no length, or ``batch_size``, ``sampler`` or ``batch_sampler`` is passed.
        ValueError: see :class:`.sampler.GlobalBatchSampler`.
    """
    for name in ("batch_size", "sampler", "batch_sampler"):
        if kwargs.get(name) is not None:
            raise TypeError(
                f"{name} cannot be given, because the plugin divides every {global_batch_size} samples "
                f"(global_batch_size) over the ranks by their speed; leave {name} out"
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
            f"{name} is an IterableDataset, whose samples have no indices; pass a dataset with __len__ and __getitem__"
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{name} has no length, so it cannot be divided over the ranks; add a __len__ method")
