"""A job that goes on with the devices that are left, as this package trains.

After a loss the survivors wait for signs of life, meet, plan again, move layers to where they are needed, and compute
the running iteration again. Devices that come start their processes while the others train, and are admitted at the end
of an iteration if the plan with them is faster. If the last holder of a layer is gone, all devices load the last whole
checkpoint. Losses come without a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..state.held_layers import Holdings, has_every_layer
from .assumptions import Assumptions
from .available_devices import Availability
from .fitted_plans import FitPlan, is_faster
from .job_record import ROUNDING, JobOutcome, JobRecord

__all__ = ["simulate_elastic_job"]


def simulate_elastic_job(
    changes: Sequence[Availability], stop: float, fit_plan: FitPlan, assumptions: Assumptions
) -> JobOutcome:
    """What the job achieves.

    Args:
        changes: Which devices are there, from second 0 on.
        stop: The end of the trace, in seconds.
        fit_plan: Finds plans.
        assumptions: What recoveries cost.
    """
    job = _ElasticJob(changes[0].devices, fit_plan, assumptions)
    for event in _events(changes, stop, assumptions.start_seconds):
        if job.admission <= event.seconds:
            job.admit()
        if event.lost:
            job.lose(event.seconds, event.lost)
        if event.ready:
            job.join(event.seconds, event.ready)
    if job.admission < stop:
        job.admit()
    return job.end(stop)


class _DeviceEvent(NamedTuple):
    seconds: float
    lost: frozenset[int]
    ready: frozenset[int]
    """Devices that came before, and whose processes have started now."""


def _events(changes: Sequence[Availability], stop: float, start_seconds: float) -> Iterator[_DeviceEvent]:
    lost: dict[float, frozenset[int]] = {}
    ready: dict[float, frozenset[int]] = {}
    for number in range(1, len(changes)):
        now, before = changes[number], changes[number - 1].devices
        lost[now.seconds] = before - now.devices
        begins = now.seconds + start_seconds
        # A device that goes before its process has started has never taken part.
        stays = now.devices - before
        later = number + 1
        while later < len(changes) and changes[later].seconds <= begins:
            stays &= changes[later].devices
            later += 1
        if begins < stop:
            ready[begins] = ready.get(begins, frozenset()) | stays
    for seconds in sorted({*lost, *ready}):
        yield _DeviceEvent(seconds, lost.get(seconds, frozenset()), ready.get(seconds, frozenset()))


class _ElasticJob:
    def __init__(self, devices: frozenset[int], fit_plan: FitPlan, assumptions: Assumptions) -> None:
        self._ready, self._fit_plan, self._assumptions = devices, fit_plan, assumptions
        self._record = JobRecord(assumptions)
        self._held: Holdings = {}
        """By device: what it held when the present plan was decided. Empty: a checkpoint must be loaded."""
        self._plan = fit_plan(devices, {})
        self._begun = self._plan is not None
        """Whether the job has ever trained. Before it, nothing is moved or loaded, and no recovery is counted."""
        self._since = 0.0
        """Until then the record is written."""
        self._start = 0.0
        """When training with the plan begins; before it, the job recovers. Without a plan: the earliest moment at which
        those who wait have noticed the last loss."""
        self.admission = math.inf
        """When those who have come are admitted."""

    def lose(self, now: float, lost: frozenset[int]) -> None:
        """Devices are gone."""
        self._ready -= lost
        plan = self._plan
        if plan is None:
            if lost & self._held.keys():
                self._forget(now, lost)
            return
        if now >= self._start:
            if not lost & plan.holdings.keys():
                return
            self._record_pause(self._start)
            self._record.crash(self._start, now, plan)
            self._held = plan.holdings
        else:
            if not lost & (plan.holdings.keys() | self._held.keys()):
                return
            self._record_pause(now)
        self._since = now
        self._forget(now, lost)
        self._begin(now, now + self._assumptions.recovery_seconds)

    def join(self, now: float, came: frozenset[int]) -> None:
        """Devices have come, and their processes have started."""
        self._ready |= came
        plan = self._plan
        if plan is None:
            self._record.wait(self._since, now)
            self._since = now
            self._begin(now, max(now, self._start) + self._assumptions.join_seconds)
        elif self.admission == math.inf:
            begun = (now - self._start) / plan.iteration_seconds
            iterations = max(math.ceil(begun - ROUNDING), 1)
            self.admission = self._start + iterations * plan.iteration_seconds

    def admit(self) -> None:
        """Continue with those who have come, if that is faster."""
        now, present = self.admission, self._plan
        self.admission = math.inf
        assert present is not None
        plan = self._fit_plan(self._ready, present.holdings)
        if plan is None or not is_faster(plan, present):
            return
        self._record_pause(self._start)
        self._record.train(self._start, now, present)
        self._record.interrupt()
        self._since, self._held, self._plan = now, present.holdings, plan
        self._start = now + self._assumptions.join_seconds + plan.move_seconds

    def end(self, stop: float) -> JobOutcome:
        """The trace ends."""
        if self._plan is None:
            self._record.wait(self._since, stop)
        else:
            self._record_pause(min(self._start, stop))
            if self._start < stop:
                self._record.train(self._start, stop, self._plan)
        return self._record.outcome()

    def _record_pause(self, stop: float) -> None:
        """The pause before the present plan, up to ``stop``."""
        self._record.recover(self._since, stop)
        self._since = stop

    def _forget(self, now: float, lost: frozenset[int]) -> None:
        """What lost devices held is gone; if no other device holds some of it, the job goes back to a checkpoint."""
        self._record.drop_unfinished_saves(now)
        left = {device: layers for device, layers in self._held.items() if device not in lost}
        if not has_every_layer(left, self._held):
            self._record.roll_back()
            left = {}
        self._held = left

    def _begin(self, now: float, start: float) -> None:
        """Continue at ``start`` with the best plan, after what must be moved or loaded; wait if no plan fits."""
        self.admission = math.inf
        self._plan = self._fit_plan(self._ready, self._held)
        if self._plan is None:
            self._start = start - self._assumptions.join_seconds
            return
        if not self._begun:
            self._begun, self._start = True, now
            return
        self._record.interrupt()
        self._start = start + (self._plan.move_seconds if self._held else self._assumptions.load_seconds)
