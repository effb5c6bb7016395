"""Divide global batches over ranks by their measured speed, and divide them again when a speed changes. busy_timer.py
measures times, and ``planner.batches.closed_loop`` decides. Here times are exchanged, and decisions carried out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from statistics import fmean

import torch.distributed as dist
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..common.ranks import of_every_rank, print_on_rank_0
from ..common.tables import make_table, number_column, word_column
from ..common.text import count, duration, numbers_of, times
from ..planner.batches.allocation import Allocation
from ..planner.batches.batch_profile import BatchProfile
from ..planner.batches.closed_loop import BatchDivider, GlobalBatchTime, Redivision
from ..planner.batches.time_curve import equal_devices, joint_curves, joint_seconds
from .busy_timer import BusyTimer, TimedGlobalBatch
from .config import BatchConfig, BatchSetup
from .loader import HeteroDataLoader


@dataclass(frozen=True)
class BatchShare:
    """A rank's or replica's part of a global batch. Times are in seconds."""

    number: int
    device: str
    samples: int
    micro_batches: tuple[int, ...]  # samples of each micro-batch, in running order
    slowdown: float  # time of its passes relative to that in the profile, or of replicas relative to the fastest
    work_seconds: float
    data_seconds: float  # time for which it waits for its data
    wait_seconds: float  # the rest of an iteration: waiting for slower ones, and communication

    def in_words(self) -> str:
        """Micro-batches in short, such as ``26 × 2`` or ``7 × 3 + 6``."""
        runs = ((size, len(list(same))) for size, same in groupby(self.micro_batches))
        return " + ".join(f"{size} × {number}" if number > 1 else str(size) for size, number in runs)


@dataclass(frozen=True)
class BatchReport:
    """How global batches are divided."""

    of: str
    """"rank" or "replica"."""
    global_batch_size: int
    shares: tuple[BatchShare, ...]
    iteration_seconds: float  # predicted time of a global batch, with communication
    equal_seconds: float | None  # the same if all had equal parts; None if that is not possible
    changes: int  # how often batches were divided again
    is_measured: bool  # True if ``work_seconds`` are those of training with this division; otherwise they are predicted

    def shown(self) -> Iterator[RenderableType]:
        yield batch_table(self)
        yield Text(batches_in_words(self))

    def numbers(self) -> dict[str, float]:
        """All numbers by flat names, such as ``rank1/samples``."""
        found = numbers_of(self)
        for share in self.shares:
            name = f"{self.of}{share.number}"
            found |= numbers_of(share, f"{name}/") | {f"{name}/micro_batches": len(share.micro_batches)}
        return found


def batch_table(report: BatchReport) -> Table:
    source = "measured" if report.is_measured else "predicted"
    names = ("work_seconds", "data_seconds", "wait_seconds")
    unit, *columns_of_times = times(*([getattr(each, name) for each in report.shares] for name in names))
    title = f"A global batch of {report.global_batch_size}, by {report.of} (times in {unit}, {source})"
    columns = map(number_column, ("samples", "micro-batches", "work", "data", "wait", "slowdown"))
    lines = [
        (str(each.number), str(each.samples), each.in_words(), *taken, f"{each.slowdown:.2f}")
        for each, *taken in zip(report.shares, *columns_of_times, strict=True)
    ]
    return make_table([word_column(report.of), *columns], lines, title=title)


def batches_in_words(report: BatchReport) -> str:
    words = f"A global batch takes {duration(report.iteration_seconds)} by these times"
    if report.equal_seconds is not None:
        ratio = report.equal_seconds / report.iteration_seconds
        words += f", and with equal parts {duration(report.equal_seconds)} ({ratio:.2f} times as long)"
    return f"{words}. It was divided again {count(report.changes, 'time')}."


def division_in_words(allocation: Allocation, devices: Sequence[str]) -> str:
    """Samples of each rank in words; consecutive ranks with the same device and part are grouped."""
    parts = []
    for (share, device), same in groupby(enumerate(zip(allocation.shares, devices, strict=True)), itemgetter(1)):
        ranks = [rank for rank, _ in same]
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        steps = "" if share.steps == 1 else f" in {share.steps} micro-batches of at most {share.micro_batch}"
        parts.append(f"{names} ({device}) {share.samples}{steps}")
    return f"of each global batch of {allocation.global_batch_size}: {'; '.join(parts)}"


def changes_in_words(
    before: Allocation, after: Allocation, moves: Sequence[float], devices: Sequence[str]
) -> str | None:
    """Differences of two divisions in words; None if every rank keeps its samples."""
    changes = [
        f"rank {rank} ({devices[rank]}) takes {move:.2f} times as long as before: {old.samples} → {new.samples} samples"
        for rank, (move, old, new) in enumerate(zip(moves, before.shares, after.shares, strict=True))
        if old.samples != new.samples
    ]
    return f"global batches of {before.global_batch_size} are divided again: {'; '.join(changes)}" if changes else None


FIRST_GLOBAL_BATCHES = 2
"""Global batches after the start or a new division that are not judged: they allocate memory, a device under a CPU
quota has saved up time, and a prefetcher may still hold a batch of the former division."""


class BatchBalancer:
    """Adapts the division of a loader's global batches to the speed of the ranks; it is the same on all of them."""

    def __init__(
        self, setup: BatchSetup, profile: BatchProfile, loader: HeteroDataLoader, timer: BusyTimer | None
    ) -> None:
        self._config = config = setup.config
        self._stage, self._replica_of = setup.stage, setup.replica_of
        self._profile, self._loader, self._timer = profile, loader, timer
        self._divider = divider_of(config, profile, setup.stage, loader.multiple_of)
        self._redivision = Redivision(self._divider, config.global_batch_size, config.reallocate_above)
        self._redivision.skip(FIRST_GLOBAL_BATCHES)
        self._since_check = 0
        self._measured: tuple[Allocation, list[tuple[float, float]]] | None = None
        """Work and waiting for data in the latest check, by rank, with the division at that time."""
        self.reallocations = 0
        self._divide()
        print_on_rank_0(
            f"{division_in_words(self.allocation, profile.devices)}; {self.allocation.wall_seconds:.3g} s predicted, "
            f"{self.allocation.samples_per_second:.3g} samples/s"
        )
        if self.allocation.steps > 1:
            print_on_rank_0(
                f"a loop over the loader has a turn for each of {self.allocation.steps} micro-batches; "
                "loader.by_global_batch() has one for each optimizer step"
            )

    @property
    def allocation(self) -> Allocation:
        """Current division of a full global batch, which holds from the next one that is not drawn yet."""
        return self._redivision.allocation

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """Slowdown of each replica's passes relative to the profile, at the last division."""
        return tuple(speed.factor for speed in self._redivision.speeds)

    def report(self) -> BatchReport:
        """How global batches are divided now, and the latest times; the same on all ranks."""
        allocation, speeds, shares = self.allocation, self._redivision.speeds, []
        is_measured = self._measured is not None and self._measured[0] is allocation
        measured = self._measured[1] if self._measured is not None and is_measured else None
        for rank, replica in enumerate(self._replica_of):
            share = allocation.shares[replica]
            work, data = (allocation.busy_seconds[replica], 0.0) if measured is None else measured[rank]
            wait = max(0.0, allocation.wall_seconds - work - data)
            device, slowdown = self._profile.devices[replica], speeds[replica].factor
            shares.append(BatchShare(rank, device, share.samples, share.sizes, slowdown, work, data, wait))
        try:
            equal = replace(self._divider, method="uniform").divide(speeds, allocation.global_batch_size).wall_seconds
        except ValueError:  # equal parts do not fit in the memory of some rank
            equal = None
        return BatchReport(
            of="rank",
            global_batch_size=allocation.global_batch_size,
            shares=tuple(shares),
            iteration_seconds=allocation.wall_seconds,
            equal_seconds=equal,
            changes=self.reallocations,
            is_measured=measured is not None,
        )

    def on_step(self) -> None:
        """Check the speeds if a check is due. Every rank calls it after every step."""
        self._since_check += 1
        if self._config.check_every is None:
            due = self._current() == self._loader.global_batches - 1
        else:
            due = self._since_check >= self._config.check_every
        if due and self._timer is not None and math.isfinite(self._config.reallocate_above):
            self._since_check = 0
            self._check(self._timer)

    def _check(self, timer: BusyTimer) -> None:
        replica = self._replica_of[dist.get_rank()]
        measured = [self._against_profile(replica, each) for each in timer.take()]
        everyone = of_every_rank((measured, self._loader.global_sampler.drawn_global_batch))
        by_rank = _complete([times for times, _ in everyone])
        if not by_rank[0]:
            return
        means = [(fmean(each.work_seconds for each in of), fmean(each.data_seconds for each in of)) for of in by_rank]
        self._measured = self.allocation, means
        before, speeds_before = self.allocation, self._redivision.speeds
        if not self._redivision.observe(_by_replica(by_rank, self._replica_of)):
            return
        drawn = max(drawn for _, drawn in everyone)
        self._redivision.skip(drawn - self._current() + FIRST_GLOBAL_BATCHES)
        self._divide(drawn_global_batch=drawn)
        self.reallocations += 1
        moves = []
        for rank, (old, new) in enumerate(zip(speeds_before, self._redivision.speeds, strict=True)):
            part = self._divider.expected_seconds(rank, before.shares[rank].sizes), before.shares[rank].samples
            moves.append(new.seconds(*part) / old.seconds(*part))
        words = changes_in_words(before, self.allocation, moves, self._profile.devices)
        if words is not None:
            print_on_rank_0(words)

    def _current(self) -> int:
        return -1 if self._loader.current is None else self._loader.current.global_batch

    def _against_profile(self, replica: int, timed: TimedGlobalBatch) -> GlobalBatchTime:
        """Measured and profiled time. In stage 0, other ranks wait for the step; see [Note: what a rank waits for]."""
        expected = self._divider.expected_seconds(replica, timed.sizes)
        work = timed.work_seconds + (timed.step_seconds if self._stage == 0 else 0.0)
        return GlobalBatchTime(expected, sum(max(size, 1) for size in timed.sizes), work, timed.data_seconds)

    def _divide(self, drawn_global_batch: int = -1) -> None:
        speeds = self._redivision.speeds

        # The loader keeps this for global batches that it has drawn, so it must not depend on later changes of self.
        @lru_cache(maxsize=8)
        def division(samples: int) -> Sequence[Sequence[int]]:
            return [share.sizes for share in self._divider.divide(speeds, samples).shares]

        self._loader.divide_by(division, drawn_global_batch)


def divider_of(config: BatchConfig, profile: BatchProfile, stage: int, multiple_of: int = 1) -> BatchDivider:
    """Divider of global batches by ``profile``. Equal devices get the mean of their times."""
    curves, step_seconds = profile.curves(stage, config.largest_micro_batch), profile.step_seconds(stage)
    groups = equal_devices(profile.devices, curves)
    return BatchDivider(
        joint_curves(curves, groups),
        stage,
        method=config.method,
        accumulation=config.accumulation,
        communication_seconds=profile.communication(stage),
        flops=profile.flops,
        step_seconds=step_seconds and joint_seconds(step_seconds, groups),
        multiple_of=multiple_of,
    )


def _complete(by_rank: Sequence[Sequence[GlobalBatchTime]]) -> list[list[GlobalBatchTime]]:
    """The latest global batches that all ranks have timed and for which all have drawn samples, by rank."""
    count = min(len(times) for times in by_rank)
    latest = zip(*(times[len(times) - count :] for times in by_rank), strict=True)
    complete = [each for each in latest if all(time.expected_seconds > 0 for time in each)]
    return [[each[rank] for each in complete] for rank in range(len(by_rank))]


def _by_replica(by_rank: Sequence[Sequence[GlobalBatchTime]], replica_of: Sequence[int]) -> list[list[GlobalBatchTime]]:
    """Times of the slowest rank of each replica."""
    replicas: list[list[Sequence[GlobalBatchTime]]] = [[] for _ in range(max(replica_of) + 1)]
    for of_rank, replica in zip(by_rank, replica_of, strict=True):
        replicas[replica].append(of_rank)
    return [
        [max(each, key=lambda time: time.work_seconds + time.data_seconds) for each in zip(*ranks, strict=True)]
        for ranks in replicas
    ]
