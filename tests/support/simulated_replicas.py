"""Data-parallel training on a simulated clock: replicas with quotas, noise and slow data, which wait for each other."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from colossal_hetero.planner import Curve
from colossal_hetero.planner.batches.closed_loop import BatchDivider, GlobalBatchTime, Redivision, Speed

SKIPPED = 1
"""Global batches after a new division that are not judged."""
PERIOD = 0.1
"""Seconds of a period of a quota."""
COMMUNICATION = 0.004
"""Seconds of communication in an iteration."""


@dataclass
class SimulatedReplica:
    """A device that computes, under a limit of its CPU time as the kernel enforces it."""

    sample_seconds: float
    """CPU time of a sample."""
    quota: float = 1.0
    """CPU seconds per second. In each period the device runs until its share is used up."""
    data_seconds: float = 0.0
    """Seconds per sample in which the loop waits for data; they need no CPU time."""
    _used: dict[int, float] = field(default_factory=dict)
    """CPU time that was used, by period."""

    def busy_until(self, start: float, samples: int, noise: float) -> float:
        """When a micro-batch of ``samples`` ends that begins to compute at ``start``."""
        left = self.sample_seconds * max(samples, 1) * noise
        now, whole = start, self.quota * PERIOD
        if self.quota >= 1.0:
            now += left
            index = int(now / PERIOD + 1e-9)
            self._used = {index: self._used.get(index, 0.0) + now - max(start, index * PERIOD)}
            return now
        while left > 1e-12:
            index = int(now / PERIOD + 1e-9)
            if index not in self._used and now <= index * PERIOD + 1e-12 and left > whole:
                periods = int(left / whole)
                left, now = left - periods * whole, now + periods * PERIOD
                continue
            end = (index + 1) * PERIOD
            runs = max(min(left, whole - self._used.get(index, 0.0), end - now), 0.0)
            self._used[index] = self._used.get(index, 0.0) + runs
            left -= runs
            now = now + runs if left <= 1e-12 else end
        self._used = {index: used for index, used in self._used.items() if index >= int(now / PERIOD) - 1}
        return now


class Simulation:
    """Training whose global batches are divided by :class:`Redivision`. ``noise``: relative standard deviation of a
    replica's time."""

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        global_batch_size: int,
        *,
        noise: float = 0.0,
        check_every: int = 5,
        seed: int = 0,
    ) -> None:
        self.replicas = replicas
        self._noise = noise
        self._random = random.Random(seed)
        self._check_every = check_every
        curves = [
            Curve.from_seconds([each.sample_seconds * n / each.quota for n in range(1, global_batch_size + 1)])
            for each in replicas
        ]
        self.divider = BatchDivider(curves, 1, communication_seconds=COMMUNICATION)
        self.loop = Redivision(self.divider, global_batch_size, 0.02)
        self.global_batch_size = global_batch_size
        self._now = 0.0
        self.walls: list[float] = []
        """Seconds of each iteration."""
        self.divisions: list[tuple[int, ...]] = []
        """Samples by replica, of each iteration."""

    def iterate(self, samples: Sequence[int]) -> list[float]:
        """One iteration with so many samples on each replica; the seconds that each replica needs before it waits."""
        busy = []
        for replica, count in zip(self.replicas, samples, strict=True):
            noise = max(self._random.gauss(1.0, self._noise), 0.5)
            data = replica.data_seconds * max(count, 1)
            busy.append(data + replica.busy_until(self._now + data, count, noise) - (self._now + data))
        wall = max(busy) + COMMUNICATION
        self._now += wall
        self.walls.append(wall)
        self.divisions.append(tuple(samples))
        return busy

    def train(self, iterations: int, before: Callable[[int], None] = lambda iteration: None) -> None:
        """Train; ``before`` is called with the number of each iteration, and may change replicas."""
        times: list[list[GlobalBatchTime]] = [[] for _ in self.replicas]
        for iteration in range(iterations):
            before(iteration)
            shares = self.loop.allocation.shares
            busy = self.iterate([share.samples for share in shares])
            for index, (of_replica, share, seconds) in enumerate(zip(times, shares, busy, strict=True)):
                expected = self.divider.expected_seconds(index, share.sizes)
                data = self.replicas[index].data_seconds * max(share.samples, 1)
                of_replica.append(GlobalBatchTime(expected, max(share.samples, 1), seconds - data, data))
            if (iteration + 1) % self._check_every == 0:
                if self.loop.observe(times):
                    self.loop.skip(SKIPPED)
                times = [[] for _ in self.replicas]

    def true_speeds(self) -> list[Speed]:
        """The speeds of replicas that never wait, relative to the curves of :attr:`divider`."""
        return [
            Speed(each.sample_seconds / each.quota / float(curve.seconds[1]), each.data_seconds)
            for each, curve in zip(self.replicas, self.divider.curves, strict=True)
        ]

    def best_division(self) -> tuple[int, ...]:
        """Samples by replica in the best fixed division, if quotas limit the devices all the time."""
        allocation = self.divider.divide(self.true_speeds(), self.global_batch_size)
        return tuple(share.samples for share in allocation.shares)

    def mean_wall(self, samples: Sequence[int], iterations: int = 40) -> float:
        """Mean seconds of an iteration in a fixed division of these devices, without noise."""
        replicas = [SimulatedReplica(each.sample_seconds, each.quota, each.data_seconds) for each in self.replicas]
        fixed = Simulation(replicas, self.global_batch_size)
        for _ in range(iterations):
            fixed.iterate(samples)
        return sum(fixed.walls[iterations // 4 :]) / len(fixed.walls[iterations // 4 :])
