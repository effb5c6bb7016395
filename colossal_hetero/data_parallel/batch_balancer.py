"""Divides global batches over ranks by what each can do, and again when that changes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch.distributed as dist
from rich.console import Console
from scipy.optimize import isotonic_regression

from ..planner.batches.allocation import Allocation, allocate
from ..planner.batches.batch_profile import BatchProfile, DeviceProfile
from ..planner.batches.time_curve import Curve
from ..profiling.batches.forward_watch import KEPT, ForwardWatch
from .config import BatchConfig
from .loader import HeteroDataLoader

__all__ = ["BatchBalancer", "damped", "in_words", "slowdown"]

MIN_PASSES = 3
MIN_SECONDS = 0.5
"""A statement on a rank's speed takes so many forward passes at least, and so long ones in all: less is noise."""

CALIBRATED = 0.25
"""By how much, relative to each other, ranks may differ from the profile when training begins before that is taken for
a change of speed. Up to there it is what training differs from measuring by: a rank under a CPU quota, for example, has
some of it in hand when it has waited for others, and its forward passes, which come then, are quicker than measured.
"""


class BatchBalancer:
    """Keeps a loader's division in step with the speed of the ranks.

    Every rank computes the same allocation from the same profile and the same exchanged factors.

    Args:
        config: what the user asked for.
        profile: of all ranks.
        stage: of ZeRO; it says where ranks wait for each other.
        loader: of this rank.
        watch: of this rank's forward passes.
        replica_of: which replica of the model each rank belongs to; without model parallelism each is its own.
    """

    def __init__(
        self,
        config: BatchConfig,
        profile: BatchProfile,
        stage: int,
        loader: HeteroDataLoader,
        watch: ForwardWatch,
        replica_of: Sequence[int],
    ) -> None:
        self._config = config
        self._profile = profile
        self._stage = stage
        self._loader = loader
        self._watch = watch
        self._replica_of = replica_of
        own = replica_of[dist.get_rank()]
        largest = min(config.global_batch_size, config.max_micro_batch or config.global_batch_size)
        self._curves = profile.curves(stage, largest)
        self._forward = _forward_curve(profile.kinds[profile.ranks[own]], self._curves[own].max_batch)
        self._since_check = 0
        self._reference: list[float] | None = None
        self._last_moves = [1.0] * len(self._curves)
        self._passes: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self.slowdowns: tuple[float, ...] = (1.0,) * len(self._curves)
        """How much slower than in the profile each replica was when batches were divided last."""
        self.reallocations = 0
        """How often batches were divided anew since the start."""
        self._divide()
        _say(
            f"{in_words(self.allocation, profile.devices)}; {self.allocation.wall_seconds:.3g} s predicted, "
            f"{self.allocation.samples_per_second:.3g} samples/s"
        )

    @property
    def allocation(self) -> Allocation:
        """How a full global batch is divided now (or will be, from the next global batch that is not yet drawn)."""
        return self._allocate(self._config.global_batch_size)

    def on_step(self) -> None:
        """Count an optimizer step; look at the speeds if it is time. Every rank calls it after every step."""
        self._since_check += 1
        if self._config.check_every is None:
            due = (
                self._loader.current is not None
                and self._loader.current.global_batch == self._loader.global_batches - 1
            )
        else:
            due = self._since_check >= self._config.check_every
        if due and math.isfinite(self._config.reallocate_above):
            self._since_check = 0
            self._check()

    def _check(self) -> None:
        self._passes.extend(self._watch.take())
        mine = None if self._forward is None else slowdown(self._passes, self._forward)
        if mine is not None:
            self._passes.clear()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (mine, self._loader.drawn_global_batch))
        now = list(self.slowdowns)
        for replica in range(len(now)):
            seen = [each for (each, _), of in zip(everyone, self._replica_of, strict=True) if of == replica]
            # Who has not run enough to say anything is as fast as it was.
            if None not in seen:
                now[replica] = max(seen) / (1.0 if self._reference is None else self._reference[replica])
        if self._reference is None and None not in [each for each, _ in everyone]:
            is_small = max(now) / min(now) - 1 <= CALIBRATED
            self._reference = now if is_small else [1.0] * len(now)
            if is_small:
                return
        # What slows all ranks alike changes nothing about who should do how much.
        moves = [new / old for new, old in zip(now, self.slowdowns, strict=True)]
        if max(moves) / min(moves) - 1 <= self._config.reallocate_above:
            return
        before = self.allocation
        now = [damped(*each) for each in zip(self.slowdowns, now, self._last_moves, strict=True)]
        self._last_moves = moves
        self.slowdowns = tuple(now)
        self._divide(drawn_global_batch=max(drawn for _, drawn in everyone))
        self.reallocations += 1
        self._report(moves, before)

    def _divide(self, drawn_global_batch: int = -1) -> None:
        curves = [curve.scaled(factor) for curve, factor in zip(self._curves, self.slowdowns, strict=True)]

        # A division stays in force for global batches drawn before the next one: it must not look at self.
        @lru_cache(maxsize=8)
        def allocate_now(samples: int) -> Allocation:
            return allocate(
                curves,
                samples,
                self._stage,
                method=self._config.method,
                accumulation=self._config.accumulation,
                communication_seconds=self._profile.communication(self._stage),
                flops=self._profile.flops,
            )

        def division(samples: int) -> Sequence[Sequence[int]]:
            return [share.sizes for share in allocate_now(samples).shares]

        self._allocate = allocate_now
        self._loader.redivide(division, drawn_global_batch)

    def _report(self, moves: Sequence[float], before: Allocation) -> None:
        changes = [
            f"rank {rank} ({self._profile.devices[rank]}) takes {move:.2f} times as long as before, "
            f"{old.samples} → {new.samples} samples"
            for rank, (move, old, new) in enumerate(zip(moves, before.shares, self.allocation.shares, strict=True))
            if old.samples != new.samples
        ]
        if changes:
            _say(f"global batches of {before.global_batch_size} are divided anew: {'; '.join(changes)}")


def _say(message: str) -> None:
    if dist.get_rank() == 0:
        Console(stderr=True).print(message, soft_wrap=True, highlight=False)


def damped(before: float, now: float, last_move: float) -> float:
    """The slowdown to go by, where ``now`` is measured, ``before`` was gone by and ``last_move`` led to it.

    A move back goes half the way: what is measured depends on the batch a little, and would swing with it.
    """
    turns_back = (now / before - 1) * (last_move - 1) < 0
    return math.sqrt(before * now) if turns_back else now


def in_words(allocation: Allocation, devices: Sequence[str]) -> str:
    """Who does how much of a global batch; ranks that are next to each other and alike are named together."""
    groups: list[tuple[int, int]] = []
    for rank, (share, device) in enumerate(zip(allocation.shares, devices, strict=True)):
        if groups and (share, device) == (allocation.shares[groups[-1][0]], devices[groups[-1][0]]):
            groups[-1] = groups[-1][0], rank
        else:
            groups.append((rank, rank))
    parts = []
    for first, last in groups:
        share = allocation.shares[first]
        names = f"rank {first}" if first == last else f"ranks {first}-{last}"
        steps = "" if share.steps == 1 else f" in {share.steps} micro-batches of at most {share.micro_batch}"
        parts.append(f"{names} ({devices[first]}) {share.samples}{steps}")
    return f"of each global batch of {allocation.global_batch_size}: {'; '.join(parts)}"


def slowdown(passes: Collection[tuple[int, float]], expected: Curve) -> float | None:
    """How many times as long as expected forward passes took; None if they are too few or too short to tell.

    Args:
        passes: ``(samples, seconds)`` each.
        expected: seconds of a forward pass by its samples.

    The ratio of the sums, because a device that is throttled for part of each second is slow in some passes only. The
    longest pass is left out: one hiccup (a compilation, a page of memory first touched) says nothing of the speed.
    """
    if len(passes) < MIN_PASSES or sum(seconds for _, seconds in passes) < MIN_SECONDS:
        return None
    longest = int(np.argmax([seconds for _, seconds in passes]))
    kept = [each for index, each in enumerate(passes) if index != longest]
    return sum(seconds for _, seconds in kept) / sum(float(expected.seconds[samples]) for samples, _ in kept)


def _forward_curve(device: DeviceProfile, max_batch: int) -> Curve | None:
    """Seconds of a forward pass by its samples; None where the profile does not say, and speeds cannot be told."""
    points = {point.batch: point.forward_seconds for point in device.points if point.forward_seconds is not None}
    if len(points) < min(2, max_batch):
        return None
    # Short passes are noisy; whatever they say, a larger batch does not take less.
    seconds = isotonic_regression([points[batch] for batch in sorted(points)]).x
    return Curve.through(dict(zip(sorted(points), seconds, strict=True)), max(max_batch, *points)).limited(max_batch)
