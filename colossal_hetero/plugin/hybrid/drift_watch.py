"""Measures the passes of pipeline stages, and reports at the end of an epoch if they differ from the plan."""

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
"""Iterations at the start that are not measured, because they allocate memory and exchange shapes."""

_Pass = tuple[Any, Any]
"""The events at the start and at the end of a pass."""


class _Schedule(Protocol):
    forward_step: Callable[..., Any]
    backward_step: Callable[..., Any]


class StageClock:
    """Times the forward and backward passes of a 1F1B schedule, without its waiting for other stages between them.

    Events are read when the device has reached them, so that the host never waits for the device. The times of an
    iteration are means over its micro-batches: if a device is stopped now and then, the mean shows it, but the median
    rarely does.
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
        """The passes since the last call were one iteration; they are dropped unless the iteration ``counts``."""
        if counts and self._forward and self._backward:
            self._running.append((self._forward, self._backward))
        self._forward, self._backward = [], []
        while self._running and all(passes[-1][1].query() for passes in self._running[0]):
            self._finished.append(PassSeconds(*(_mean_seconds(passes) for passes in self._running.popleft())))

    def read(self) -> PassSeconds | None:
        """The medians over the iterations whose times were read since the last call; None if there are none."""
        finished, self._finished = self._finished, []
        if not finished:
            return None
        return PassSeconds(
            median(each.forward_seconds for each in finished), median(each.backward_seconds for each in finished)
        )


def _mean_seconds(passes: list[_Pass]) -> float:
    return sum(start.elapsed_time(end) for start, end in passes) * 1e-3 / len(passes)


class DriftWatch:
    """Compares the times of a pipeline's stages with the plan, epoch by epoch. Used by all ranks.

    Args:
        schedule: its passes are timed from now on; None if this rank's replica has no pipeline.
        plan: with ranks as launched.
        threshold: relative difference beyond which a stage is reported.
        profile: the model's layers, from which new splits are computed; None to use the plan's means.
        interval: iterations in an epoch.
    """

    def __init__(
        self, schedule: _Schedule | None, plan: Plan, threshold: float, profile: ModelProfile | None, interval: int
    ) -> None:
        self.interval = interval
        self.report: DriftReport | None = None
        """For the last epoch that was measured; None before."""
        self._clock = None if schedule is None else StageClock(schedule)
        self._plan, self._threshold, self._profile = plan, threshold, profile
        self._iterations = 0
        self._printed: DriftReport | None = None

    def tick(self) -> None:
        """An iteration has ended. At the end of an epoch this is collective, and rank 0 prints what has changed."""
        if self._clock is not None:
            self._clock.end_iteration(counts=self._iterations >= WARMUP_ITERATIONS)
        self._iterations += 1
        if self._iterations % self.interval == 0:
            self._compare(self._iterations // self.interval)

    def _compare(self, epoch: int) -> None:
        times: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(times, None if self._clock is None else self._clock.read())
        measured = {rank: each for rank, each in enumerate(times) if each is not None}
        if not measured:
            return
        self.report = compare(self._plan, measured, self._threshold, self._profile)
        changed = self.report.differs_from(self._printed)
        if changed or not self.report.drifted:
            self._printed = self.report if self.report.drifted else None
        if changed and dist.get_rank() == 0:
            message = f"epoch {epoch}: stage times differ from the plan\n{self.report}"
            Console(stderr=True).print(message, soft_wrap=True, highlight=False, markup=False)
