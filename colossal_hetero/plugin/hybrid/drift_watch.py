"""Measure what a stage's passes take, and say at the end of an epoch if that is not what was planned."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console

from ... import accelerator
from ...pipeline_parallel.drift import DriftReport, PassSeconds, compare
from ...planner.plans.plan import Plan
from ...planner.profile.layer_profile import ModelProfile

__all__ = ["DriftWatch", "StageClock"]

WARMUP_ITERATIONS = 2
"""The first iterations allocate memory and exchange shapes; they are not measured."""

_Pass = tuple[Any, Any]
"""Events at its start and its end."""


class _Schedule(Protocol):
    forward_step: Callable[..., Any]
    backward_step: Callable[..., Any]


class StageClock:
    """Times the forward and backward passes of a 1F1B schedule, between which it waits for other stages.

    Events are read when the device has passed them, so that the host never waits for it. An iteration counts as the
    means over its micro-batches: a device that is stopped now and then is slow on average, and rarely in the median.
    """

    def __init__(self, schedule: _Schedule) -> None:
        self._forward: list[_Pass] = []
        self._backward: list[_Pass] = []
        self._running: deque[tuple[list[_Pass], list[_Pass]]] = deque()
        self._finished: list[PassSeconds] = []
        schedule.forward_step = self._timed(schedule.forward_step, lambda: self._forward)
        schedule.backward_step = self._timed(schedule.backward_step, lambda: self._backward)

    def _timed(self, step: Callable[..., Any], passes: Callable[[], list[_Pass]]) -> Callable[..., Any]:
        event = functools.partial(accelerator.get_accelerator().Event, enable_timing=True)

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return step(*args, **kwargs)
            start, end = event(), event()
            start.record()
            result = step(*args, **kwargs)
            end.record()
            passes().append((start, end))
            return result

        return run

    def end_iteration(self, counts: bool = True) -> None:
        """The passes since the last call were an iteration's; unless it ``counts`` they are forgotten."""
        if counts and self._forward and self._backward:
            self._running.append((self._forward, self._backward))
        self._forward, self._backward = [], []
        while self._running and all(passes[-1][1].query() for passes in self._running[0]):
            self._finished.append(PassSeconds(*(_mean_seconds(passes) for passes in self._running.popleft())))

    def read(self) -> PassSeconds | None:
        """The medians over the iterations that have become known since the last call; None if there are none."""
        finished, self._finished = self._finished, []
        if not finished:
            return None
        return PassSeconds(
            median(each.forward_seconds for each in finished), median(each.backward_seconds for each in finished)
        )


def _mean_seconds(passes: list[_Pass]) -> float:
    return sum(start.elapsed_time(end) for start, end in passes) * 1e-3 / len(passes)


class DriftWatch:
    """Compares a plan with what comes of it, epoch by epoch. On all ranks alike.

    Args:
        schedule: whose passes are timed; from now on.
        plan: as it runs.
        threshold: relative difference beyond which a stage is reported.
        profile: of the model's layers, to compute new splits from.
        interval: iterations in an epoch.
    """

    def __init__(
        self, schedule: _Schedule, plan: Plan, threshold: float, profile: ModelProfile | None, interval: int
    ) -> None:
        self.interval = interval
        self.report: DriftReport | None = None
        """On the last epoch that was measured."""
        self._clock = StageClock(schedule)
        self._plan, self._threshold, self._profile = plan, threshold, profile
        self._iterations = 0
        self._told: DriftReport | None = None

    def tick(self) -> None:
        """An iteration has ended. Collective at the end of an epoch; prints on rank 0 what it has not said yet."""
        self._clock.end_iteration(counts=self._iterations >= WARMUP_ITERATIONS)
        self._iterations += 1
        if self._iterations % self.interval == 0:
            self._compare(self._iterations // self.interval)

    def _compare(self, epoch: int) -> None:
        times: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(times, self._clock.read())
        measured = {rank: each for rank, each in enumerate(times) if each is not None}
        if not measured:
            return
        self.report = compare(self._plan, measured, self._threshold, self._profile)
        news = self.report.differs_from(self._told)
        if news or not self.report.drifted:
            self._told = self.report if self.report.drifted else None
        if news and dist.get_rank() == 0:
            message = f"epoch {epoch}: stages take another time than planned\n{self.report}"
            Console(stderr=True).print(message, soft_wrap=True, highlight=False, markup=False)
