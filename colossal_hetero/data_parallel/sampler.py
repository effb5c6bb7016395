"""Draw each rank's samples if every rank has micro-batches of its own sizes.

[Note: global batches] An epoch is a permutation of the dataset that depends only on seed and epoch. Global batch k is
its slice ``[k·G, (k+1)·G)``. A *division* cuts each global batch into consecutive slices, one per rank in rank order,
and these into micro-batches. So another division or number of ranks, even in the middle of an epoch, never changes
which samples form a global batch, nor their order.
"""

from __future__ import annotations

import copy
import hashlib
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from .progress import MicroBatch

# Seeded samples ------------------------------------------------------------------------------------------------------
# Random augmentation does not depend on the rank or worker that loads a sample: torch, NumPy and Python draw from a
# seed that depends on its place in the order of the epoch.


class DrawnSample(NamedTuple):
    """Request of a sampler to :class:`SeededSamples`."""

    number: int
    """In the data set."""
    seed: int
    """Of its augmentation, in [0, 2⁶²)."""


def drawn_sample(index: int, seed: int, epoch: int, place: int) -> DrawnSample:
    """The sample at ``place`` in the order of ``epoch``, of a loader with this ``seed``."""
    # Python's hash of integers is the same in all processes.
    return DrawnSample(index, hash((seed, epoch, place)) % 2**62)


class SeededSamples(Dataset[Any]):
    """``dataset`` with its attributes, also by :class:`DrawnSample`."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0] if isinstance(index, DrawnSample) else self.dataset[index]

    def __getitems__(self, drawn: Sequence[DrawnSample]) -> list[Any]:
        samples = []
        with _random_states_kept():
            for number, seed in drawn:
                _seed(seed)
                samples.append(self.dataset[number])
        return samples

    def __getattr__(self, name: str) -> Any:
        # Unpickling and copying ask for special methods before the data set is there.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


@contextmanager
def seeded(seed: int, generator: Any = None) -> Iterator[None]:
    """In the block, torch, NumPy, Python and a ``torch.Generator`` draw random numbers from ``seed``."""
    with _random_states_kept():
        _seed(seed)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        yield


@contextmanager
def _random_states_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes long, for devices that data does not need
    np.random.seed(seed % 2**32)
    random.seed(seed)


Division = Callable[[int], Sequence[Sequence[int]]]
"""Micro-batch sizes of each rank from the number of samples of a global batch, their sum; the same on all ranks. For a
size of 0, the rank runs placeholder samples of weight zero in that micro-step."""


@dataclass(frozen=True)
class _RankSlice:
    offset: int
    """Number of samples of the global batch before it."""
    sizes: tuple[int, ...]


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
        order: Sampler[int] | None = None,
        seeds_samples: bool = False,
    ) -> None:
        super().__init__()
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size={global_batch_size} must be at least 1 sample")
        if dataset_size < global_batch_size:
            raise ValueError(
                f"the dataset has {dataset_size} samples, fewer than global_batch_size={global_batch_size}; "
                + (f"lower it to {dataset_size} or less" if dataset_size > 0 else "pass a dataset with samples")
            )
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be at least 0 and below world_size={world_size}")
        self.dataset_size = dataset_size
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self._sampler: Any = order
        self._seen_epoch = getattr(order, "epoch", None)
        self._drawn_order: tuple[int, torch.Tensor] | None = None
        """Latest epoch of which the sampler has drawn an order, and that order."""
        self._sampler_state: Any = None
        """``state_dict`` before it drew that order."""
        self._expected_order: tuple[int, str] | None = None
        """Epoch, and digest of its order, in the run that is resumed."""
        self._seeds_samples = seeds_samples
        full, self._rest = divmod(dataset_size, global_batch_size)
        if drop_last:
            self._rest = 0
        self.global_batches: int = full + (self._rest > 0)
        self.placeholders = 1
        """Number of samples of weight zero in a micro-batch without samples: the fewest that the model trains with."""
        self.record: deque[MicroBatch] | None = None
        """A loader's list of drawn micro-batches, possibly ahead of returned ones; it calls :meth:`end_epoch`."""
        # Divisions of this epoch, ascending: first global batch, and this rank's slice by samples of a global batch.
        self._parts: list[tuple[int, dict[int, _RankSlice]]] = []
        # Epoch of the latest iteration (at first and after loading a state, of the next one), its first global batch,
        # number of done ones, and the one drawn last.
        self._epoch = 0
        self._start = 0
        self._done = 0
        self._drawn = -1
        self._over = False
        self._order: torch.Tensor | None = None
        self._next_epoch: int | None = None
        self._resumed = False
        self._begun = False
        self._iterations = 0

    @property
    def epoch(self) -> int:
        """Epoch of the latest iteration; before the first one, of the next."""
        return self._epoch

    @property
    def drawn_global_batch(self) -> int:
        """Index of the latest global batch from which this rank has drawn, prefetching included; if none, one less than
        the iteration's first. It stays until the next iteration, so that it means the same on all ranks."""
        return self._drawn

    @property
    def is_divided(self) -> bool:
        return bool(self._parts)

    @property
    def is_resumed(self) -> bool:
        return self._start > 0

    @property
    def is_over(self) -> bool:
        return self._over

    def join(self, rank: int, world_size: int) -> None:
        """Draw for another rank, of another number of them; a division and a state must follow."""
        self.rank, self.world_size = rank, world_size
        self._parts = []
        self._drawn = self._start - 1

    def divide_by(self, division: Division, *, from_global_batch: int = 0) -> None:
        """Use ``division`` from global batch ``from_global_batch`` of the current epoch on, and in later epochs. The
        first division holds from the start. A later one must begin after all that any rank has drawn
        (:attr:`drawn_global_batch`); after the end of the epoch, it takes effect in the next iteration."""
        if from_global_batch < 0:
            raise ValueError(f"from_global_batch={from_global_batch} must be at least 0")
        if self._drawn >= self._start and from_global_batch <= self._drawn:
            raise ValueError(
                f"global batch {from_global_batch} cannot be divided again, because global batch {self._drawn} was "
                f"already drawn; divide from {self._drawn + 1} on, or from the largest such index over all ranks"
            )
        if not self._parts and from_global_batch > self._start:
            raise ValueError(
                f"the global batches {self._start} to {from_global_batch - 1} would have no division; "
                f"the first division must hold from {self._start} on"
            )
        sizes = [self.global_batch_size, *([self._rest] if self._rest else [])]
        parts = {samples: self._part_of(division, samples) for samples in sizes}
        kept = [entry for entry in self._parts if entry[0] < from_global_batch]
        self._parts = [*kept, (from_global_batch if kept else 0, parts)]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which starts at its beginning or at the position of its state."""
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must be at least 0")
        self._next_epoch = epoch

    def begin_epoch(self) -> None:
        """Begin an iteration for the next ``iter()``, which otherwise begins one. An older one raises when it draws."""
        self._notice_epoch()
        epoch, start = self._next_start()
        order = self.order_of(epoch)
        self._parts = self._next_parts()
        self._epoch, self._start, self._done, self._drawn = epoch, start, start, start - 1
        self._over, self._next_epoch, self._resumed = False, None, False
        self._order = order
        self._begun = True
        self._iterations += 1

    def order_of(self, epoch: int) -> torch.Tensor | None:
        """Indices of the dataset in the order of that epoch, ``[dataset_size]``; None: that of the dataset."""
        if self._sampler is not None:
            if self._drawn_order is None or self._drawn_order[0] != epoch:
                self._drawn_order = epoch, self._draw_order(epoch)
            return self._drawn_order[1]
        if not self.shuffle:
            return None
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        return torch.randperm(self.dataset_size, generator=generator)

    def _draw_order(self, epoch: int) -> torch.Tensor:
        sampler = self._sampler
        name = type(sampler).__name__
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if hasattr(sampler, "state_dict"):
            self._sampler_state = copy.deepcopy(sampler.state_dict())
        with seeded(self.seed + epoch, getattr(sampler, "generator", None)):
            order = torch.tensor(list(sampler), dtype=torch.int64)
        self._seen_epoch = getattr(sampler, "epoch", None)
        if len(order) != self.dataset_size:
            raise ValueError(
                f"{name} gave {len(order)} indices for epoch {epoch}, but its length is {self.dataset_size}; it must "
                "give as many in every epoch"
            )
        expected, self._expected_order = self._expected_order, None
        if expected is not None and expected[0] == epoch and expected[1] != _digest(order):
            raise ValueError(
                f"{name} gives another order of epoch {epoch} than in the run that saved, so the samples that are left "
                "are unknown. It must draw random numbers from torch, NumPy, Python or its generator, or have "
                "set_epoch, or state_dict and load_state_dict; or begin the epoch again with set_epoch() and "
                "without the state of the loader"
            )
        return order

    def _notice_epoch(self) -> None:
        """Use the epoch that the user has set on the sampler, if any, for the next iteration."""
        epoch = getattr(self._sampler, "epoch", None)
        if epoch != self._seen_epoch and isinstance(epoch, int):
            self.set_epoch(epoch)
        self._seen_epoch = epoch

    def some(self, count: int, seed: int) -> list[int]:
        """``count`` indices of the next epoch at random, fewer if it has fewer."""
        places = random.Random(seed).sample(range(self.dataset_size), min(count, self.dataset_size))
        order = self.order_of(self._next_start()[0]) if self._sampler is not None else None
        return places if order is None else order[places].tolist()

    def end_epoch(self) -> None:
        self._over = True
        self._done = self.global_batches

    def finish_global_batch(self, global_batch: int) -> None:
        """Mark this global batch and those before it as done, after the optimizer's step."""
        assert self._start <= global_batch <= self._drawn, (self._start, global_batch, self._drawn)
        self._done = max(self._done, global_batch + 1)

    def micro_batches(self) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Begin an iteration and draw from it: each micro-batch, and indices of its samples."""
        if not self._parts:
            raise RuntimeError("the global batches are not divided over the ranks yet; call divide_by() first")
        if not self._begun:
            self.begin_epoch()
        self._begun = False
        iteration = self._iterations
        for global_batch in range(self._start, self.global_batches):
            self._drawn = global_batch
            first = global_batch * self.global_batch_size
            samples = self._samples(global_batch)
            part = next(parts for start, parts in reversed(self._parts) if start <= global_batch)[samples]
            indices = self._indices(first + part.offset, sum(part.sizes))
            done = 0
            for step, size in enumerate(part.sizes):
                is_last = step == len(part.sizes) - 1
                micro_batch = MicroBatch(size, samples, global_batch, step, is_last, first=part.offset + done)
                if self.record is not None:
                    self.record.append(micro_batch)
                yield micro_batch, indices[done : done + size] if size else self._indices(first, self.placeholders)
                if iteration != self._iterations:
                    raise RuntimeError(
                        "another iteration over this sampler has begun; use a sampler for each of two simultaneous "
                        "iterations"
                    )
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
            yield [drawn_sample(index, self.seed, self._epoch, place) for place, index in enumerate(indices, first)]

    def __len__(self) -> int:
        """Number of this rank's micro-batches in a whole epoch; without a division, of its global batches, because
        learning-rate schedules are created with it."""
        if not self._parts:
            return self.global_batches
        entries = self._parts if self._is_running() else self._next_parts()
        ends = [start for start, _ in entries[1:]] + [self.global_batches]
        total = 0
        for (start, parts), end in zip(entries, ends, strict=True):
            end = min(end, self.global_batches)
            if start < end:
                total += (end - start) * len(parts[self.global_batch_size].sizes)
                if end == self.global_batches and self._rest:
                    total += len(parts[self._rest].sizes) - len(parts[self.global_batch_size].sizes)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Position in the epoch, in finished global batches, for any number of ranks and any division; the same on all
        ranks. A sampler of the user's adds a digest of the epoch's order and its state before the epoch."""
        self._notice_epoch()
        epoch, done = (self._epoch, self._done) if self._next_epoch is None else self._next_start()
        state = {"epoch": epoch, "global_batches_done": done, **self.identity()}
        if self._drawn_order is not None and self._drawn_order[0] == epoch:
            state |= {"order": _digest(self._drawn_order[1]), "sampler": self._sampler_state}
        return state

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
        self._epoch, self._start, self._done, self._drawn = epoch, done, done, done - 1
        self._over = done == self.global_batches
        self._next_epoch, self._resumed, self._begun = None, True, False
        self._iterations += 1
        if self._sampler is not None and state.get("order") is not None:
            if state.get("sampler") is not None and hasattr(self._sampler, "load_state_dict"):
                self._sampler.load_state_dict(copy.deepcopy(state["sampler"]))
                # Its state is that before the epoch, so the epoch has to be drawn again.
                self._drawn_order = None
            if self._drawn_order is None or (epoch, state["order"]) != (
                self._drawn_order[0],
                _digest(self._drawn_order[1]),
            ):
                self._drawn_order, self._expected_order = None, (epoch, state["order"])
            self._seen_epoch = getattr(self._sampler, "epoch", None)

    def identity(self) -> dict[str, Any]:
        """Settings that determine which samples form a global batch, without the order of the user's sampler."""
        names = ("dataset_size", "global_batch_size", "shuffle", "seed", "drop_last")
        return {name: getattr(self, name) for name in names}

    def digest(self) -> str | None:
        """Digest of the order of the next epoch, if the user's sampler gives it."""
        self._notice_epoch()
        order = None if self._sampler is None else self.order_of(self._next_start()[0])
        return None if order is None else _digest(order)

    def _counts(self) -> bool:
        return self._over or self._done > self._start

    def _is_running(self) -> bool:
        return self._drawn >= self._start and not self._over and self._next_epoch is None

    def _next_start(self) -> tuple[int, int]:
        if self._next_epoch is None:
            return (self._epoch + 1, 0) if self._counts() else (self._epoch, self._start)
        if self._next_epoch == self._epoch and (self._resumed or not self._counts()):
            return self._epoch, self._start
        return self._next_epoch, 0

    def _next_parts(self) -> list[tuple[int, dict[int, _RankSlice]]]:
        repeats = not self._counts() and self._next_start() == (self._epoch, self._start)
        return self._parts if repeats else self._latest_parts()

    def _latest_parts(self) -> list[tuple[int, dict[int, _RankSlice]]]:
        return [(0, parts) for _, parts in self._parts[-1:]]

    def _samples(self, global_batch: int) -> int:
        is_rest = self._rest and global_batch == self.global_batches - 1
        return self._rest if is_rest else self.global_batch_size

    def _indices(self, first: int, count: int) -> list[int]:
        if self._order is None:
            return list(range(first, first + count))
        return self._order[first : first + count].tolist()

    def _part_of(self, division: Division, samples: int) -> _RankSlice:
        shares = [tuple(map(operator.index, sizes)) for sizes in division(samples)]
        if len(shares) != self.world_size:
            raise ValueError(f"the division is for {len(shares)} ranks, but there are {self.world_size}")
        for rank, sizes in enumerate(shares):
            if not sizes:
                raise ValueError(
                    f"the division gives rank {rank} no micro-step, but every rank must take part in the collectives; "
                    "give it a micro-batch of 0 samples"
                )
            if min(sizes) < 0:
                raise ValueError(f"the division gives rank {rank} a micro-batch of {min(sizes)} samples")
        totals = [sum(sizes) for sizes in shares]
        if sum(totals) != samples:
            raise ValueError(f"the division has {sum(totals)} samples, but the global batch has {samples}")
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


def _digest(order: torch.Tensor) -> str:
    return hashlib.sha256(order.numpy().tobytes()).hexdigest()[:16]
