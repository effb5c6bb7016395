"""The record of one simulated job: iterations that are done, saved and repeated, and what each moment was spent on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .assumptions import Assumptions
from .fitted_plans import FittedPlan

__all__ = ["Activity", "JobOutcome", "JobRecord", "TimeSpan", "whole_iterations"]

Activity = Literal["training", "recovering", "waiting"]

ROUNDING = 1e-9
"""Iterations that are finished up to this share count as finished."""


class TimeSpan(NamedTuple):
    """What a job does from ``start`` to ``stop``, in seconds from the start of the trace."""

    activity: Activity
    """``recovering`` is every pause with enough devices; ``waiting`` is one in which no plan fits."""
    start: float
    stop: float
    devices: int = 0
    """Number of devices in use; 0 if the job does not train."""
    iteration_seconds: float = 0.0
    """0 if the job does not train."""


@dataclass(frozen=True)
class JobOutcome:
    """What a job has achieved by the end of the trace."""

    iterations: int
    """Optimizer steps that count: those that were lost count once they have been repeated."""
    repeated: int
    """Iterations that were begun and had to be computed again."""
    recoveries: int
    """How often training was interrupted for a recovery, a restart or a join."""
    spans: tuple[TimeSpan, ...]
    """The time line, without gaps."""

    def seconds(self, activity: Activity) -> float:
        """How long the job was occupied with something."""
        return math.fsum(span.stop - span.start for span in self.spans if span.activity == activity)


class JobRecord:
    """Records what a simulated job does. Its methods are called in the order of time."""

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._done = self._repeated = self._recoveries = 0
        self._saves = [(0, 0.0)]
        """Checkpoints: iteration, and when it is whole. The job can always begin again."""
        self._spans: list[TimeSpan] = []

    def train(self, start: float, stop: float, plan: FittedPlan) -> None:
        """Training from ``start`` to ``stop``. An iteration that is not finished does not count."""
        count = whole_iterations(stop - start, plan.iteration_seconds)
        self._save(start, self._done + count, plan.iteration_seconds)
        self._done += count
        self._add("training", start, stop, plan)

    def crash(self, start: float, stop: float, plan: FittedPlan) -> None:
        """As :meth:`train`, and the iteration that runs at ``stop`` must be computed again."""
        self.train(start, stop, plan)
        rest = (stop - start) / plan.iteration_seconds - whole_iterations(stop - start, plan.iteration_seconds)
        self._repeated += rest > ROUNDING

    def drop_unfinished_saves(self, now: float) -> None:
        """Devices are gone or processes end, so that a checkpoint that is being written does not become whole."""
        self._saves = [save for save in self._saves if save[1] <= now]

    def roll_back(self) -> None:
        """All iterations since the last whole checkpoint must be computed again."""
        saved = self._saves[-1][0]
        self._repeated += self._done - saved
        self._done = saved

    def interrupt(self) -> None:
        """Training is interrupted for a recovery, a restart or a join."""
        self._recoveries += 1

    def recover(self, start: float, stop: float) -> None:
        """A pause with enough devices."""
        self._add("recovering", start, stop)

    def wait(self, start: float, stop: float) -> None:
        """A pause in which no plan fits."""
        self._add("waiting", start, stop)

    def outcome(self) -> JobOutcome:
        """What has been recorded."""
        return JobOutcome(self._done, self._repeated, self._recoveries, tuple(self._spans))

    def _save(self, start: float, last: int, seconds: float) -> None:
        """Checkpoints up to the iteration ``last``, if the next iteration begins at ``start``.

        One checkpoint is written at a time; those that are due meanwhile are left out. Only the last two are recorded:
        when the last one begins, the one before it is whole.
        """
        every = self._assumptions.save_every
        first = self._done - self._done % every + every
        busy = self._saves[-1][1] - (start + (first - self._done) * seconds)
        first += every * max(math.ceil(busy / (every * seconds) - ROUNDING), 0)
        stride = every * max(math.ceil(self._assumptions.save_seconds / (every * seconds) - ROUNDING), 1)
        number = (last - first) // stride
        for iteration in (first + each * stride for each in (number - 1, number) if each >= 0):
            begin = start + (iteration - self._done) * seconds
            self._saves.append((iteration, begin + self._assumptions.save_seconds))

    def _add(self, activity: Activity, start: float, stop: float, plan: FittedPlan | None = None) -> None:
        if stop > start:
            in_use = (len(plan.holdings), plan.iteration_seconds) if plan is not None else (0, 0.0)
            self._spans.append(TimeSpan(activity, start, stop, *in_use))


def whole_iterations(seconds: float, iteration_seconds: float) -> int:
    """How many iterations are finished in a time."""
    return math.floor(seconds / iteration_seconds + ROUNDING)
