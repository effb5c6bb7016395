"""Draw each rank's samples if every rank has micro-batches of its own sizes.

[Note: global batches] An epoch is a permutation of the dataset that depends only on seed and epoch. Global batch k is
its slice ``[k·G, (k+1)·G)``. A *division* cuts each global batch into consecutive slices, one per rank, and these into
micro-batches. So no division or number of ranks changes which samples form a global batch, nor their order.
"""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from .progress import MicroBatch


class DrawnSample(NamedTuple):
    """Request of a sampler to :class:`SeededSamples`."""

    number: int  # in the data set
    seed: int  # of its augmentation, in [0, 2⁶²)


class SeededSamples(Dataset[Any]):
    """``dataset`` with its attributes, also by :class:`DrawnSample`. Random augmentation does not depend on the rank or
    worker that loads a sample: torch, NumPy and Python draw from a seed that depends on its place in the order of the
    epoch."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0] if isinstance(index, DrawnSample) else self.dataset[index]

    def __getitems__(self, drawn: Sequence[DrawnSample]) -> list[Any]:
        samples = []
        python, numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            try:
                for number, seed in drawn:
                    # torch.manual_seed takes long, for devices that data does not need
                    torch.default_generator.manual_seed(seed)
                    np.random.seed(seed % 2**32)
                    random.seed(seed)
                    samples.append(self.dataset[number])
            finally:
                random.setstate(python)
                np.random.set_state(numpy)
        return samples

    def __getattr__(self, name: str) -> Any:
        # Unpickling and copying ask for special methods before the data set is there.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


Division = Callable[[int], Sequence[Sequence[int]]]
"""Micro-batch sizes of each rank from the number of samples of a global batch, their sum; the same on all ranks. For a
size of 0, the rank runs placeholder samples of weight zero in that micro-step."""


class _RankSlice(NamedTuple):
    offset: int  # samples of the global batch before it
    sizes: tuple[int, ...]


_Division = tuple[int, dict[int, _RankSlice]]  # first global batch, and this rank's slice by samples of a global batch


class GlobalBatchSampler(Sampler[list[int] | list[DrawnSample]]):
    """Indices of this rank's micro-batches, for ``DataLoader(batch_sampler=...)``. See [Note: global batches].

    Over all ranks, every sample is drawn exactly once per epoch; the last global batch may be smaller. With ``shuffle``
    the order is that of torch's ``DistributedSampler`` with the same seed and epoch. Each iteration is the epoch after
    the previous one, unless :meth:`set_epoch` sets another; one without a finished global batch does not count.
    """

    def __init__(
        self,
        dataset_size: int,
        global_batch_size: int,
        rank: int,
        world_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
        seeds_samples: bool = False,
    ) -> None:
        super().__init__()
        if dataset_size < global_batch_size:
            raise ValueError(
                f"the dataset has {dataset_size} samples, fewer than global_batch_size={global_batch_size}; "
                + (f"lower it to {dataset_size} or less" if dataset_size > 0 else "pass a dataset with samples")
            )
        self.dataset_size, self.global_batch_size = dataset_size, global_batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._seeds_samples = seeds_samples
        full, rest = divmod(dataset_size, global_batch_size)
        self.rest = 0 if drop_last else rest
        self.global_batches: int = full + (self.rest > 0)
        self.placeholders = 1
        """Number of samples of weight zero in a micro-batch without samples: the fewest that the model trains with."""
        self.record: deque[MicroBatch] | None = None
        """A loader's list of drawn micro-batches, possibly ahead of returned ones; it calls :meth:`end_epoch`."""
        # Divisions of this epoch, ascending.
        self._parts: list[_Division] = []
        self.epoch = 0  # epoch of the latest iteration; before the first one, and after loading a state, of the next
        self.start = 0  # first global batch of that iteration
        self.drawn_global_batch = -1
        """Index of the latest global batch from which this rank has drawn, prefetching included; if none, one less than
        the iteration's first. It stays until the next iteration, so that it means the same on all ranks."""
        self.is_over = False
        self._done = 0  # global batches of the epoch
        self._order: torch.Tensor | None = None
        self._next_epoch: int | None = None
        self._resumed = self._begun = False

    @property
    def is_divided(self) -> bool:
        return bool(self._parts)

    def join(self, rank: int, world_size: int) -> None:
        """Draw for another rank, of another number of them; a division and a state must follow."""
        self.rank, self.world_size = rank, world_size
        self._parts = []
        self.drawn_global_batch = self.start - 1

    def divide_by(self, division: Division, *, from_global_batch: int = 0) -> None:
        """Use ``division`` from global batch ``from_global_batch`` of the current epoch on, and in later epochs. The
        first division holds from the start. A later one must begin after all that any rank has drawn
        (:attr:`drawn_global_batch`); after the end of the epoch, it takes effect in the next iteration."""
        assert self.drawn_global_batch < self.start or from_global_batch > self.drawn_global_batch
        assert self._parts or from_global_batch <= self.start
        sizes = {self.global_batch_size, self.rest} - {0}
        parts = {samples: self._part_of(division, samples) for samples in sorted(sizes, reverse=True)}
        kept = [entry for entry in self._parts if entry[0] < from_global_batch]
        self._parts = [*kept, (from_global_batch if kept else 0, parts)]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which starts at its beginning or at the position of its state."""
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must be at least 0")
        self._next_epoch = epoch

    def begin_epoch(self) -> None:
        """Begin an iteration for the next ``iter()``, which otherwise begins one."""
        epoch, start = self._next_start()
        self._parts = self._next_parts()
        self._go_to(epoch, start)
        self._resumed, self._begun = False, True
        self._order = None
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = torch.randperm(self.dataset_size, generator=generator)

    def _go_to(self, epoch: int, start: int) -> None:
        self.epoch, self.start, self._done, self.drawn_global_batch = epoch, start, start, start - 1
        self.is_over, self._next_epoch = False, None

    def end_epoch(self) -> None:
        self.is_over = True
        self._done = self.global_batches

    def finish_global_batch(self, global_batch: int) -> None:
        """Mark this global batch and those before it as done, after the optimizer's step."""
        assert self.start <= global_batch <= self.drawn_global_batch
        self._done = max(self._done, global_batch + 1)

    def micro_batches(self) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Begin an iteration and draw from it: each micro-batch, and indices of its samples."""
        if not self._begun:
            self.begin_epoch()
        self._begun = False
        for global_batch in range(self.start, self.global_batches):
            self.drawn_global_batch = global_batch
            first = global_batch * self.global_batch_size
            part, samples = self._part_at(self._parts, global_batch)
            indices = self._indices(first + part.offset, sum(part.sizes))
            done = 0
            for step, size in enumerate(part.sizes):
                is_last = step == len(part.sizes) - 1
                micro_batch = MicroBatch(size, samples, global_batch, step, is_last, first=part.offset + done)
                if self.record is not None:
                    self.record.append(micro_batch)
                yield micro_batch, indices[done : done + size] if size else self._indices(first, self.placeholders)
                done += size
        if self.record is None:
            self.end_epoch()

    def __iter__(self) -> Iterator[list[int] | list[DrawnSample]]:  # type: ignore[override]
        # A generator, because a DataLoader with workers calls iter() twice, and a generator begins when it first draws.
        for micro_batch, indices in self.micro_batches():
            if not self._seeds_samples:
                yield indices
                continue
            first = micro_batch.global_batch * self.global_batch_size + micro_batch.first
            # Python's hash of integers is the same in all processes.
            seeds = (hash((self.seed, self.epoch, first + place)) % 2**62 for place in range(len(indices)))
            yield list(map(DrawnSample, indices, seeds))

    def __len__(self) -> int:
        """Number of this rank's micro-batches in a whole epoch; without a division, of its global batches, because
        learning-rate schedules are created with it."""
        if not self._parts:
            return self.global_batches
        is_running = self.drawn_global_batch >= self.start and not self.is_over and self._next_epoch is None
        entries = self._parts if is_running else self._next_parts()
        return sum(len(self._part_at(entries, number)[0].sizes) for number in range(self.global_batches))

    def state_dict(self) -> dict[str, Any]:
        """Position in the epoch, in finished global batches, for any number of ranks and any division; the same on all
        ranks."""
        epoch, done = (self.epoch, self._done) if self._next_epoch is None else self._next_start()
        return {"epoch": epoch, "global_batches_done": done, **self.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration resume after the finished global batches of ``state``; a running one ends."""
        check_state(state, self.identity())
        epoch, done = int(state["epoch"]), int(state["global_batches_done"])
        if epoch < 0 or not 0 <= done <= self.global_batches:
            raise ValueError(
                f"epoch={epoch}, global_batches_done={done} is not possible: epochs count from 0 and have "
                f"{self.global_batches} global batches; load another checkpoint, or restart an epoch with set_epoch()"
            )
        self._parts = self._latest_parts()
        self._go_to(epoch, done)
        self.is_over = done == self.global_batches
        self._resumed, self._begun = True, False

    def identity(self) -> dict[str, Any]:
        """Settings that determine which samples form a global batch."""
        names = ("dataset_size", "global_batch_size", "shuffle", "seed", "drop_last")
        return {name: getattr(self, name) for name in names}

    def _counts(self) -> bool:
        return self.is_over or self._done > self.start

    def _next_start(self) -> tuple[int, int]:
        if self._next_epoch is None:
            return (self.epoch + 1, 0) if self._counts() else (self.epoch, self.start)
        if self._next_epoch == self.epoch and (self._resumed or not self._counts()):
            return self.epoch, self.start
        return self._next_epoch, 0

    def _next_parts(self) -> list[_Division]:
        repeats = not self._counts() and self._next_start() == (self.epoch, self.start)
        return self._parts if repeats else self._latest_parts()

    def _latest_parts(self) -> list[_Division]:
        return [(0, parts) for _, parts in self._parts[-1:]]

    def _part_at(self, entries: Sequence[_Division], global_batch: int) -> tuple[_RankSlice, int]:
        """This rank's part of a global batch, and how many samples that has."""
        is_rest = self.rest and global_batch == self.global_batches - 1
        samples = self.rest if is_rest else self.global_batch_size
        return next(parts for start, parts in reversed(entries) if start <= global_batch)[samples], samples

    def _indices(self, first: int, count: int) -> list[int]:
        if self._order is None:
            return list(range(first, first + count))
        return self._order[first : first + count].tolist()

    def _part_of(self, division: Division, samples: int) -> _RankSlice:
        shares = [tuple(map(operator.index, sizes)) for sizes in division(samples)]
        # Every rank has a micro-batch, if only of 0 samples, because it takes part in the collectives.
        assert len(shares) == self.world_size and all(sizes and min(sizes) >= 0 for sizes in shares), shares
        totals = [sum(sizes) for sizes in shares]
        assert sum(totals) == samples, (shares, samples)
        return _RankSlice(sum(totals[: self.rank]), shares[self.rank])


def check_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``state`` is no position in an epoch, or one of data with another ``identity``."""
    missing = [key for key in ("epoch", "global_batches_done", "global_batch_size", *identity) if key not in state]
    if missing:
        raise ValueError(f"not a data-loader state: missing {', '.join(dict.fromkeys(missing))}")
    others = [f"{key} was {state[key]}, now it is {value}" for key, value in identity.items() if state[key] != value]
    if others:
        raise ValueError(
            f"the saved state of the data loader belongs to other data: {'; '.join(others)}; "
            "create the loader with the same arguments, or restart an epoch with set_epoch()"
        )
