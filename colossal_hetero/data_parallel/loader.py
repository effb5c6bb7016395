"""Data loader of uneven batches: it knows the training loop's current micro-batch, and can resume in an epoch."""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..colossalai_support.accelerator import get_accelerator
from ..common.ranks import of_every_rank
from .busy_timer import BusyTimer
from .progress import LoopProgress, MicroBatch
from .sampler import Division, GlobalBatchSampler, SeededSamples
from .tagged_tensor import shapes_of, tagged, untagged

ORDER_SEED, WORKER_SEED = 0, 1024
"""Seeds of order and workers in Colossal-AI's ``prepare_dataloader``, whose argument ``seed`` sets only the latter."""


class HeteroDataLoader(DataLoader[Any]):
    """A ``DataLoader`` whose batches are this rank's micro-batches of the global batches, in the order of drawing.
    ``sampler`` and ``batch_sampler`` are both the :class:`GlobalBatchSampler`, so ``set_epoch`` works on all three."""

    def __init__(self, dataset: Dataset[Any], batch_sampler: GlobalBatchSampler, **kwargs: Any) -> None:
        if not kwargs.get("in_order", True):
            raise ValueError("in_order=False is not possible, because it mixes samples of global batches; leave it out")
        super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)
        # DataLoader sets a sampler here that it does not use, and forbids to change it.
        object.__setattr__(self, "sampler", batch_sampler)
        self.global_sampler = batch_sampler
        self._iteration = 0
        self._latest: ref[_Iteration] | None = None
        self._drawn: MicroBatch | None = None
        self._references: list[ReferenceType[LoopProgress]] = []
        self._weight_by: Any = None
        self._weight_of: Callable[[Any], Any] | None = None
        self._by_samples = True
        self._sums: dict[str, list[torch.Tensor]] = {}
        self.check: Callable[[Any], None] = lambda batch: None
        """Called with every batch that is drawn; it raises an error to refuse the batch."""
        self.multiple_of = 1
        self.load_timer: BusyTimer | None = None

    @property
    def current(self) -> MicroBatch | None:
        """Micro-batch returned last or, if the loop takes batches ahead, of the latest forward pass, if any."""
        followers = self._followers
        return followers[-1].current if followers else self._drawn

    @property
    def is_last(self) -> bool:
        """True if :attr:`current` is this rank's last micro-batch of its global batch: the optimizer steps after it."""
        is_last = self._drawn is not None and self._drawn.is_last
        for progress in self._followers:  # each notes that the loop has asked
            is_last = progress.is_last()
        return is_last

    def mean(self, value: Any, name: str = "loss") -> float | None:
        """The mean of a value, such as the loss, over the global batch and all ranks; None before its last micro-batch.
        Call it on every rank for every micro-batch, after its forward pass, with the mean over that micro-batch, and
        with a name for each of several values."""
        current = self.current
        if current is None:
            raise RuntimeError("loader.mean() needs a batch of the loader; call it after the forward pass of a batch")
        weight = float(current.samples if current.weight is None else current.weight)
        if current.step == 0 and name not in self._sums:
            self._sums[name] = []
        found = self._sums.get(name)
        if found is None or len(found) != current.step:
            raise RuntimeError(
                f"loader.mean(…, name={name!r}) was not called once for each micro-batch of the global batch, up to "
                f"micro-batch {current.step}; call it for every batch of the loader, with a name for each value"
            )
        own = torch.as_tensor(untagged(value), device=get_accelerator().get_current_device()).detach().double()
        pair = torch.stack([own.reshape(()), torch.ones_like(own).reshape(())])
        found.append(weight * pair if weight else torch.zeros_like(pair))  # placeholder samples may have a loss of nan
        if not current.is_last:
            return None
        sums = torch.stack(self._sums.pop(name)).sum(0)
        dist.all_reduce(sums)
        total, count = sums.tolist()
        return total / count if count else math.nan

    @property
    def _followers(self) -> list[LoopProgress]:
        return [progress for each in self._references if (progress := each()) is not None]

    def follow(self, progress: LoopProgress, weight_by: Any) -> None:
        """Report every batch that is drawn to ``progress``. Several models may be trained with one loader."""
        self._references = [each for each in self._references if each() is not None]
        if self._references and weight_by != self._weight_by:
            raise ValueError(
                f"losses of a model that was boosted with this loader are weighted by {self._weight_by}, and those of "
                f"another one by {weight_by}; give each model a loader of its own, or both the same weight_by"
            )
        self._references.append(ref(progress))
        self._weight_by = weight_by

    def weigh_by(self, weight_of: Callable[[Any], Any], *, by_samples: bool = False) -> None:
        """Give every micro-batch the weight that ``weight_of`` returns for its batch: a finite number of at least 0."""
        self._weight_of, self._by_samples = weight_of, by_samples

    @property
    def global_batches(self) -> int:
        """Number of global batches, and optimizer steps, in an epoch."""
        return self.global_sampler.global_batches

    @property
    def seed(self) -> int:
        return self.global_sampler.seed

    def set_multiple(self, samples: int) -> None:
        size, last = self.global_sampler.global_batch_size, self.global_sampler.rest
        needed = f"a multiple of {samples}, the samples that the training step needs at once"
        if size % samples:
            raise ValueError(f"global_batch_size={size} is not {needed}")
        if last % samples:
            raise ValueError(
                f"the last global batch of an epoch has {last} samples, which is not {needed}; use drop_last=True"
            )
        self.multiple_of = samples

    def some_samples(self, count: int, seed: int) -> list[int]:
        """``count`` samples of the dataset at random, fewer if it has fewer."""
        size = self.global_sampler.dataset_size
        return random.Random(seed).sample(range(size), min(count, size))

    def __len__(self) -> int:
        """Number of batches of an epoch, which is the number of optimizer steps."""
        micro_batches = len(self.global_sampler)
        if micro_batches != self.global_batches:
            raise TypeError(
                f"len(loader) has two meanings here: an epoch has {self.global_batches} optimizer steps "
                f"(loader.global_batches, for learning-rate schedules) in {micro_batches} batches "
                "(loader.micro_batches, for means over batches), because memory does not hold this rank's part of a "
                "global batch at once"
            )
        return micro_batches

    @property
    def micro_batches(self) -> int:
        """Number of batches in an epoch on this rank, by the latest division."""
        return len(self.global_sampler)

    def divide_by(self, division: Division, drawn_global_batch: int = -1) -> None:
        """Use ``division`` for the global batches after ``drawn_global_batch``, the latest that a rank has drawn."""
        self.global_sampler.divide_by(division, from_global_batch=drawn_global_batch + 1)

    def set_epoch(self, epoch: int) -> None:
        self.global_sampler.set_epoch(epoch)

    def finish_global_batch(self) -> None:
        """Mark the current global batch as done, after the optimizer's step; a state saved now resumes after it."""
        if self.current is None or not self.current.is_last:
            raise RuntimeError(
                "the global batch cannot be finished before its last micro-batch was drawn; "
                f"the latest micro-batch is {self.current}"
            )
        self.global_sampler.finish_global_batch(self.current.global_batch)

    def state_dict(self) -> dict[str, Any]:
        """Position in the epoch, in finished global batches, without random state; for any ranks and division."""
        return self.global_sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` resume at the position of ``state``; a running iteration becomes invalid. Before it,
        a script may call ``set_epoch`` with the epoch of the state."""
        self.global_sampler.load_state_dict(state)
        self._reset()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin an epoch. An older iteration over this loader becomes invalid."""
        if not self.global_sampler.is_divided:
            raise RuntimeError(
                "the global batches are not divided over the ranks yet; pass the loader to booster.boost() before "
                "iterating over it"
            )
        iteration = _Iteration(self, *self._begin(), self._iteration)
        self._latest = ref(iteration)
        return iteration

    def rest_of_epoch(self) -> Iterator[Iterator[Any]]:
        """Begin or continue an epoch, for loops with ``booster.execute_pipeline``. Yields the iteration over this
        loader once for each global batch that is left; the loop draws the micro-batches of one from it."""
        batches = iter(self)
        while self.state_dict()["global_batches_done"] < self.global_batches:
            yield batches

    def by_global_batch(self) -> Iterator[Iterator[Any]]:
        """Begin an epoch, for loops with one turn per optimizer step: yields the micro-batches of each of the
        :attr:`global_batches`, after which the loop calls ``optimizer.step()``."""
        batches = iter(self)

        def of_one() -> Iterator[Any]:
            for batch in batches:
                yield batch
                assert self.current is not None
                if self.current.is_last:
                    return

        for _ in range(self.global_batches - self.state_dict()["global_batches_done"]):
            yield of_one()

    def continue_as(self, rank: int, world_size: int, division: Division) -> None:
        """Continue as another rank, of another number of them, with the first global batch that is not done."""
        state = self.state_dict()
        self.global_sampler.join(rank, world_size)
        self.divide_by(division)
        iteration = None if self._latest is None else self._latest()
        is_valid = iteration is not None and iteration._iteration == self._iteration
        self.load_state_dict(state)
        if iteration is not None and is_valid:
            batches = (iter(()), deque[MicroBatch]()) if self.global_sampler.is_over else self._begin()
            iteration._batches, iteration._record = batches
            iteration._iteration = self._iteration

    def _begin(self) -> tuple[Iterator[Any], deque[MicroBatch]]:
        self._reset()
        self.global_sampler.begin_epoch()
        record: deque[MicroBatch] = deque()
        self.global_sampler.record = record
        # torch draws a random number at the beginning of an iteration. One that continues an epoch has none.
        with torch.random.fork_rng(devices=[], enabled=self.global_sampler.start > 0):
            return super().__iter__(), record

    def _reset(self) -> None:
        self._drawn = None
        self._iteration += 1
        self._sums.clear()
        for progress in self._followers:
            progress.begin()

    def _draw(self, micro_batch: MicroBatch, batch: Any) -> Any:
        self.check(batch)
        if self._weight_of is not None:
            weight = float(self._weight_of(batch)) if micro_batch.samples else 0.0
            if not (weight >= 0 and math.isfinite(weight)):
                raise ValueError(f"weight_by gave {weight} for a batch; it must be a finite number of at least 0")
            micro_batch = replace(micro_batch, weight=weight)
        if self._by_samples and micro_batch.samples:
            micro_batch = replace(micro_batch, shapes=shapes_of(batch))
        self._drawn = micro_batch
        for progress in self._followers:
            progress.draw(micro_batch)
        return tagged(batch, micro_batch) if self._followers else batch


class _Iteration:
    """Iteration over a loader; ``record`` holds the micro-batches that were drawn but not returned yet."""

    def __init__(
        self, loader: HeteroDataLoader, batches: Iterator[Any], record: deque[MicroBatch], iteration: int
    ) -> None:
        self._loader, self._batches, self._record, self._iteration = loader, batches, record, iteration

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
            loader.global_sampler.end_epoch()
            raise
        except Exception:
            # With the next batch, this rank would be one micro-step ahead of the others.
            loader._reset()
            raise
        finally:
            if timer is not None:
                timer.after_batch(None if micro_batch is None else micro_batch.samples)
        assert micro_batch is not None
        return loader._draw(micro_batch, batch)

    def __len__(self) -> int:
        return len(self._loader)


def make_loader(
    dataset: Dataset[Any],
    global_batch_size: int,
    rank: int,
    world_size: int,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    seeds_samples: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **kwargs: Any,
) -> HeteroDataLoader:
    """A loader of this rank's part of ``dataset``; :meth:`HeteroDataLoader.divide_by` sets the division."""
    for name in ("batch_size", "batch_sampler", "sampler"):
        if kwargs.get(name) is not None:
            raise TypeError(
                f"{name} cannot be given, because the plugin divides every {global_batch_size} samples "
                f"(global_batch_size) over the ranks by their speed; leave {name} out. For an order of your own, give "
                "a dataset in that order, such as torch.utils.data.Subset(dataset, indices)"
            )
        kwargs.pop(name, None)
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{kind} is an IterableDataset, whose samples have no indices; pass a dataset with __len__ and __getitem__"
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{kind} has no length, so it cannot be divided over the ranks; add a __len__ method")
    batch_sampler = GlobalBatchSampler(
        len(dataset),
        global_batch_size,
        rank,
        world_size,
        shuffle=shuffle,
        seed=ORDER_SEED if seed is None else seed,
        drop_last=drop_last,
        seeds_samples=seeds_samples,
    )
    if seeds_samples:
        dataset = SeededSamples(dataset)
    if kwargs.get("worker_init_fn") is None:
        kwargs["worker_init_fn"] = functools.partial(_seed_worker, WORKER_SEED if seed is None else seed)
    return HeteroDataLoader(dataset, batch_sampler, pin_memory=pin_memory, num_workers=num_workers, **kwargs)


def check_same_order(loader: HeteroDataLoader) -> None:
    everyone = of_every_rank(loader.global_sampler.identity())
    others = [rank for rank, found in enumerate(everyone) if found != everyone[0]]
    if others:
        raise ValueError(
            f"ranks {', '.join(map(str, others))} draw other samples than rank 0: all ranks need the same dataset and "
            "the same arguments of plugin.prepare_dataloader"
        )


def _seed_worker(seed: int, worker: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
