"""Divide global batches over ranks by their measured speed, and divide them again when a speed changes."""

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
from ..profiling.batches.forward_timer import MAX_PASSES, ForwardTimer
from .config import BatchConfig
from .loader import HeteroDataLoader

__all__ = ["BatchBalancer", "damped", "in_words", "slowdown"]

MIN_PASSES = 3
"""Smallest number of forward passes from which a rank's speed is computed; fewer are noise."""
MIN_SECONDS = 0.5
"""Smallest total time of these passes."""

MAX_FIRST_DEVIATION = 0.25
"""Largest relative difference between the ranks' first slowdowns that counts as a difference between training and
measuring. It becomes the reference for later slowdowns; a larger one counts as a change of speed. For example, a rank
under a CPU quota saves quota while it waits for others, so its forward passes, which come right after, are faster than
measured."""


class BatchBalancer:
    """Adapts the division of a loader's global batches to the speed of the ranks.

    Every rank computes the same allocation, because the profile and the exchanged slowdowns are the same on all ranks.

    Args:
        config: the user's settings.
        profile: profile of all ranks.
        stage: stage of ZeRO.
        loader: this rank's loader.
        timer: timer of this rank's forward passes.
        replica_of: index of the model replica that each rank belongs to, by rank; without model parallelism, the rank.
    """

    def __init__(
        self,
        config: BatchConfig,
        profile: BatchProfile,
        stage: int,
        loader: HeteroDataLoader,
        timer: ForwardTimer,
        replica_of: Sequence[int],
    ) -> None:
        self._config = config
        self._profile = profile
        self._stage = stage
        self._loader = loader
        self._timer = timer
        self._replica_of = replica_of
        replica = replica_of[dist.get_rank()]
        largest = min(config.global_batch_size, config.max_micro_batch or config.global_batch_size)
        self._curves = profile.curves(stage, largest)
        self._forward = _forward_curve(profile.kinds[profile.ranks[replica]], self._curves[replica].max_batch)
        self._since_check = 0
        self._reference: list[float] | None = None
        self._last_moves = [1.0] * len(self._curves)
        self._passes: deque[tuple[int, float]] = deque(maxlen=MAX_PASSES)
        self.slowdowns: tuple[float, ...] = (1.0,) * len(self._curves)
        """Slowdown of each replica relative to the profile, at the time of the last division."""
        self.reallocations = 0
        """How often global batches were divided again since the start."""
        self._divide()
        _print_on_rank_0(
            f"{in_words(self.allocation, profile.devices)}; {self.allocation.wall_seconds:.3g} s predicted, "
            f"{self.allocation.samples_per_second:.3g} samples/s"
        )

    @property
    def allocation(self) -> Allocation:
        """The current division of a full global batch; it holds from the next global batch that is not drawn yet."""
        return self._allocate(self._config.global_batch_size)

    def on_step(self) -> None:
        """Count an optimizer step, and check the speeds if a check is due. Every rank calls it after every step."""
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
        self._passes.extend(self._timer.take())
        measured = None if self._forward is None else slowdown(self._passes, self._forward)
        if measured is not None:
            self._passes.clear()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (measured, self._loader.drawn_global_batch))
        now = list(self.slowdowns)
        for replica in range(len(now)):
            found = [each for (each, _), index in zip(everyone, self._replica_of, strict=True) if index == replica]
            # If a rank has too few passes, its replica keeps its slowdown.
            if None not in found:
                now[replica] = max(found) / (1.0 if self._reference is None else self._reference[replica])
        if self._reference is None and None not in [each for each, _ in everyone]:
            is_small = max(now) / min(now) - 1 <= MAX_FIRST_DEVIATION
            self._reference = now if is_small else [1.0] * len(now)
            if is_small:
                return
        # An equal slowdown of all ranks does not change the best division, so only differences count.
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

        # The loader keeps this division for global batches that it has drawn, so it must not depend on later changes of
        # self.
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
            f"rank {rank} ({self._profile.devices[rank]}) takes {move:.2f} times as long as before: "
            f"{old.samples} → {new.samples} samples"
            for rank, (move, old, new) in enumerate(zip(moves, before.shares, self.allocation.shares, strict=True))
            if old.samples != new.samples
        ]
        if changes:
            _print_on_rank_0(f"global batches of {before.global_batch_size} are divided again: {'; '.join(changes)}")


def _print_on_rank_0(message: str) -> None:
    if dist.get_rank() == 0:
        Console(stderr=True).print(message, soft_wrap=True, highlight=False)


def damped(before: float, now: float, last_move: float) -> float:
    """The slowdown to divide by, from the measured one (``now``) and the last one that was used (``before``).

    ``last_move`` is the factor that led to ``before``. If the direction turns, only half of the change is applied,
    because the measured slowdown depends a little on the batch, and the division would oscillate.
    """
    turns_back = (now / before - 1) * (last_move - 1) < 0
    return math.sqrt(before * now) if turns_back else now


def in_words(allocation: Allocation, devices: Sequence[str]) -> str:
    """Each rank's samples of a global batch, in words; consecutive ranks with the same device and part are grouped."""
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
    """Ratio of the measured to the expected time of forward passes; None if they are too few or too short.

    It is a ratio of sums, because a device that is throttled for part of each second is slow in some passes only. The
    longest pass is left out, because a single delay (a compilation, the first use of a memory page) is not a change of
    speed.

    Args:
        passes: ``(samples, seconds)`` of each pass.
        expected: expected seconds of a forward pass, by its samples.
    """
    if len(passes) < MIN_PASSES or sum(seconds for _, seconds in passes) < MIN_SECONDS:
        return None
    longest = int(np.argmax([seconds for _, seconds in passes]))
    kept = [each for index, each in enumerate(passes) if index != longest]
    return sum(seconds for _, seconds in kept) / sum(float(expected.seconds[samples]) for samples, _ in kept)


def _forward_curve(device: DeviceProfile, max_batch: int) -> Curve | None:
    """Seconds of a forward pass by its samples; None if the profile has too few forward times to compare speeds."""
    points = {point.batch: point.forward_seconds for point in device.points if point.forward_seconds is not None}
    if len(points) < min(2, max_batch):
        return None
    # The times of short passes are noisy; make them non-decreasing.
    seconds = isotonic_regression([points[batch] for batch in sorted(points)]).x
    return Curve.through(dict(zip(sorted(points), seconds, strict=True)), max(max_batch, *points)).limited(max_batch)
