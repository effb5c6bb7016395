"""Which samples a rank draws, when every rank has its own micro-batches.

[Note: global batches] An epoch is a permutation of the dataset that depends on seed and epoch alone, and global batch k
is its slice ``[k·G, (k+1)·G)``, whatever the ranks are and however fast. A *division* cuts each global batch into
consecutive slices, one per rank in rank order, and these into micro-batches. So dividing anew, even in the middle of an
epoch or on another number of ranks, never changes which samples are trained on together, nor their order.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

__all__ = ["Division", "GlobalBatchSampler", "MicroBatch"]

Division = Callable[[int], Sequence[Sequence[int]]]
"""From the samples of a global batch to the sizes of the micro-batches of each rank. They sum to the samples; a size of
0 is a micro-step in which the rank runs a placeholder of weight zero. Must give the same on every rank."""


@dataclass(frozen=True)
class MicroBatch:
    """What has to be known of a micro-batch that the training loop is given."""

    samples: int
    """Samples that count; 0 means that the batch is one placeholder sample of weight zero."""

    global_samples: int
    """Samples of the whole global batch that it belongs to, over all ranks."""

    global_batch: int
    """Index of that global batch in the epoch."""

    is_last: bool
    """Whether it is this rank's last micro-batch of that global batch."""


@dataclass(frozen=True)
class _Part:
    """This rank's part of a global batch: samples before it, and the sizes of its micro-batches."""

    offset: int
    sizes: tuple[int, ...]


class GlobalBatchSampler(Sampler[list[int]]):
    """Indices of this rank's micro-batches; for ``DataLoader(batch_sampler=...)``. See [Note: global batches].

    Every sample is drawn exactly once per epoch over all ranks; the last global batch may be smaller. With ``shuffle``
    the order is the one of torch's ``DistributedSampler`` with the same seed and epoch, so that a global batch holds
    the samples that it would hold there.

    Epochs go on by themselves: each iteration is the epoch after the last one, unless :meth:`set_epoch` says which. An
    iteration that was left before a global batch was done does not count, so looking at a first batch changes nothing.

    Args:
        dataset_size: samples in the dataset.
        global_batch_size: samples of a global batch over all ranks, G, at most ``dataset_size``.
        rank, world_size: among the data-parallel ranks.
        shuffle: whether each epoch has a new order, else the dataset's.
        seed: the same on all ranks.
        drop_last: leave out the last global batch if it is smaller than the others.

    Raises:
        ValueError: a size below 1, a dataset smaller than one global batch, a rank that is not in the world.
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
    ) -> None:
        super().__init__()
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size={global_batch_size} must be at least 1 sample")
        if dataset_size < global_batch_size:
            raise ValueError(
                f"the dataset has {dataset_size} samples, fewer than global_batch_size={global_batch_size}; "
                + (f"lower that to {dataset_size} or less" if dataset_size > 0 else "give one that has samples")
            )
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not one of the world_size={world_size} ranks, which count from 0")
        self.dataset_size = dataset_size
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        full, self._rest = divmod(dataset_size, global_batch_size)
        if drop_last:
            self._rest = 0
        self.global_batches: int = full + (self._rest > 0)
        """Global batches of an epoch: optimizer steps."""

        self.record: deque[MicroBatch] | None = None
        """Where a loader notes what is drawn, as that runs ahead of what it hands out; it then calls
        :meth:`end_epoch` itself."""

        # Divisions in force, each from a global batch of the epoch on, by the number of samples; in ascending order.
        self._parts: list[tuple[int, dict[int, _Part]]] = []
        # The epoch of the iteration begun last (or that is to begin, at first and after loading a state), the global
        # batch at which that starts, and of its global batches how many are done and which was drawn last.
        self._epoch = 0
        self._start = 0
        self._done = 0
        self._drawn = -1
        self._over = False
        self._order: torch.Tensor | None = None
        self._asked: int | None = None
        self._resumed = False
        self._begun = False
        self._iterations = 0

    @property
    def epoch(self) -> int:
        """Of the iteration begun last, else of the one to come."""
        return self._epoch

    @property
    def drawn_global_batch(self) -> int:
        """The highest index of a global batch of which this rank has drawn something, what is prefetched included, in
        the iteration begun last; one less than where it starts if nothing was drawn. Counts until the next iteration
        begins, also when this one is over, so that ranks agree on what it is relative to."""
        return self._drawn

    @property
    def is_divided(self) -> bool:
        """Whether a division is known."""
        return bool(self._parts)

    def divide_by(self, division: Division, *, from_global_batch: int = 0) -> None:
        """Divide by ``division`` from that global batch of the current epoch on, and in later epochs.

        The first division holds from the beginning. A later one must come from a global batch of which no rank has
        drawn anything: the maximum of :attr:`drawn_global_batch` over the ranks, plus one. Where that lies beyond the
        epoch's end, or the epoch is not gone on with, the division takes effect with the next iteration.

        Raises:
            ValueError: the division gives another number of ranks, a rank without micro-steps, sizes below 0 or ones
                that do not sum to the samples; or the global batch was drawn already.
        """
        if from_global_batch < 0:
            raise ValueError(f"from_global_batch={from_global_batch} must be at least 0")
        if self._drawn >= self._start and from_global_batch <= self._drawn:
            raise ValueError(
                f"global batch {from_global_batch} cannot be divided anew: global batch {self._drawn} was drawn "
                f"already; divide from {self._drawn + 1} on, or from the highest such index over all ranks"
            )
        if not self._parts and from_global_batch > self._start:
            raise ValueError(
                f"nothing divides the global batches {self._start} to {from_global_batch - 1}; "
                f"the first division must hold from {self._start} on"
            )
        sizes = [self.global_batch_size, *([self._rest] if self._rest else [])]
        parts = {samples: self._part_of(division, samples) for samples in sizes}
        kept = [entry for entry in self._parts if entry[0] < from_global_batch]
        self._parts = [*kept, (from_global_batch if kept else 0, parts)]

    def set_epoch(self, epoch: int) -> None:
        """The next iteration goes through that epoch, from its beginning, or, after :meth:`load_state_dict` with a
        state of that epoch, from where the state was saved."""
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must be at least 0")
        self._asked = epoch

    def begin_epoch(self) -> None:
        """Begin an iteration, which the next ``iter()`` draws; that does so by itself if it was not done. An older
        iteration that still goes on fails when it draws."""
        epoch, start = self._coming()
        self._parts = self._coming_parts()
        self._epoch, self._start, self._done, self._drawn = epoch, start, start, start - 1
        self._over, self._asked, self._resumed = False, None, False
        self._order = None
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self._epoch)
            self._order = torch.randperm(self.dataset_size, generator=generator)
        self._begun = True
        self._iterations += 1

    def end_epoch(self) -> None:
        """All of the epoch was handed out."""
        self._over = True
        self._done = self.global_batches

    def finish_global_batch(self, global_batch: int) -> None:
        """The optimizer has stepped: that global batch and those before it are done."""
        assert self._start <= global_batch <= self._drawn, (self._start, global_batch, self._drawn)
        self._done = max(self._done, global_batch + 1)

    def micro_batches(self) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Begin an iteration and draw it: each micro-batch with its indices.

        Raises:
            RuntimeError: no division is known, or another iteration began meanwhile.
        """
        if not self._parts:
            raise RuntimeError("no division of the global batch is known yet; call divide_by() first")
        if not self._begun:
            self.begin_epoch()
        self._begun = False
        iteration = self._iterations
        for global_batch in range(self._start, self.global_batches):
            self._drawn = global_batch
            first = global_batch * self.global_batch_size
            samples = self._samples(global_batch)
            part = next(parts for start, parts in reversed(self._parts) if start <= global_batch)[samples]
            own = self._indices(first + part.offset, sum(part.sizes))
            done = 0
            for step, size in enumerate(part.sizes):
                micro_batch = MicroBatch(size, samples, global_batch, is_last=step == len(part.sizes) - 1)
                if self.record is not None:
                    self.record.append(micro_batch)
                yield micro_batch, own[done : done + size] if size else self._indices(first, 1)
                if iteration != self._iterations:
                    raise RuntimeError("another iteration over this sampler has begun; give each its own sampler")
                done += size
        if self.record is None:
            self.end_epoch()

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, which begins when it first draws: a DataLoader with workers calls iter() twice.
        for _, indices in self.micro_batches():
            yield indices

    def __len__(self) -> int:
        """This rank's micro-batches in the whole epoch, also where an iteration starts within it; the number of global
        batches as long as no division is known, which schedules of the learning rate are made with."""
        if not self._parts:
            return self.global_batches
        entries = self._parts if self._is_underway() else self._coming_parts()
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
        """Where the epoch stands, counting global batches that are done; the same on all ranks. It holds nothing of the
        ranks or the division, so others can go on with it."""
        epoch, done = (self._epoch, self._done) if self._asked is None else self._coming()
        return {"epoch": epoch, "global_batches_done": done, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on after the global batches that were done; an iteration that goes on is void.

        Raises:
            ValueError: the state lacks something, or is one of another dataset size, seed, ...
        """
        missing = [key for key in ("epoch", "global_batches_done", *self._identity()) if key not in state]
        if missing:
            raise ValueError(f"this is no state of a data loader: it lacks {', '.join(missing)}")
        others = [f"{key} was {state[key]}, is {own}" for key, own in self._identity().items() if state[key] != own]
        if others:
            raise ValueError(
                f"the saved state of the data loader belongs to other data: {'; '.join(others)}; "
                "make the loader as it was, or begin an epoch anew with set_epoch()"
            )
        epoch, done = int(state["epoch"]), int(state["global_batches_done"])
        if epoch < 0 or not 0 <= done <= self.global_batches:
            raise ValueError(
                f"epoch={epoch}, global_batches_done={done} cannot be: an epoch has {self.global_batches} of them, "
                "and epochs count from 0; take another checkpoint, or begin an epoch anew with set_epoch()"
            )
        self._parts = self._latest_parts()
        self._epoch, self._start, self._done, self._drawn = epoch, done, done, done - 1
        self._over = done == self.global_batches
        self._asked, self._resumed, self._begun = None, True, False
        self._iterations += 1

    def _identity(self) -> dict[str, Any]:
        """What determines the global batches."""
        names = ("dataset_size", "global_batch_size", "shuffle", "seed", "drop_last")
        return {name: getattr(self, name) for name in names}

    def _counts(self) -> bool:
        """Whether the iteration begun last went through some of its epoch."""
        return self._over or self._done > self._start

    def _is_underway(self) -> bool:
        return self._drawn >= self._start and not self._over and self._asked is None

    def _coming(self) -> tuple[int, int]:
        """Epoch of the next iteration, and the global batch at which that starts."""
        if self._asked is None:
            return (self._epoch + 1, 0) if self._counts() else (self._epoch, self._start)
        if self._asked == self._epoch and (self._resumed or not self._counts()):
            return self._epoch, self._start
        return self._asked, 0

    def _coming_parts(self) -> list[tuple[int, dict[int, _Part]]]:
        """Divisions of the next iteration: the latest, unless an iteration that does not count is repeated."""
        repeats = not self._counts() and self._coming() == (self._epoch, self._start)
        return self._parts if repeats else self._latest_parts()

    def _latest_parts(self) -> list[tuple[int, dict[int, _Part]]]:
        return [(0, parts) for _, parts in self._parts[-1:]]

    def _samples(self, global_batch: int) -> int:
        is_rest = self._rest and global_batch == self.global_batches - 1
        return self._rest if is_rest else self.global_batch_size

    def _indices(self, first: int, count: int) -> list[int]:
        if self._order is None:
            return list(range(first, first + count))
        return self._order[first : first + count].tolist()

    def _part_of(self, division: Division, samples: int) -> _Part:
        shares = [tuple(map(operator.index, sizes)) for sizes in division(samples)]
        if len(shares) != self.world_size:
            raise ValueError(f"the division is one for {len(shares)} ranks, but there are {self.world_size}")
        for rank, sizes in enumerate(shares):
            if not sizes:
                raise ValueError(
                    f"the division leaves rank {rank} without a micro-step, and collectives without a peer; "
                    "give it a micro-batch of 0 samples"
                )
            if min(sizes) < 0:
                raise ValueError(f"the division gives rank {rank} a micro-batch of {min(sizes)} samples")
        totals = [sum(sizes) for sizes in shares]
        if sum(totals) != samples:
            raise ValueError(f"the division deals {sum(totals)} samples of a global batch of {samples}")
        return _Part(sum(totals[: self.rank]), shares[self.rank])
