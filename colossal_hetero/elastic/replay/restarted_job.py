"""A job that goes on by starting again from the checkpoints in a shared folder, as a job under torchrun does.

All its processes end, new ones start and load the whole state, and what was computed since the last whole checkpoint is
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .assumptions import Assumptions
from .available_devices import Availability
from .fitted_plans import FitPlan, FittedPlan, is_faster
from .job_record import JobOutcome, JobRecord

__all__ = ["RestartOn", "simulate_restarted_job"]

RestartOn = Literal["change", "need", "loss"]
"""When the processes end: at each ``change``; if there is a ``need``, that is, a device in use is gone or the plan with
those who have come is faster; or only at the ``loss`` of a device in use."""


def simulate_restarted_job(
    changes: Sequence[Availability],
    stop: float,
    fit_plan: FitPlan,
    assumptions: Assumptions,
    *,
    restart_on: RestartOn = "change",
    min_devices: int = 1,
) -> JobOutcome:
    """What the job achieves.

    Args:
        changes: Which devices are there, from second 0 on.
        stop: The end of the trace, in seconds.
        fit_plan: Finds plans.
        assumptions: What restarts cost.
        restart_on: When the processes end.
        min_devices: With fewer devices the job waits.
    """
    record = JobRecord(assumptions)
    plan: FittedPlan | None = None
    begun, since, start = False, 0.0, 0.0
    for change in changes:
        now = change.seconds
        enough = len(change.devices) >= min_devices
        fitting = fit_plan(change.devices, {}) if enough else None
        if plan is not None:
            if not _must_end(plan, change.devices, fitting, restart_on):
                continue
            record.recover(since, min(start, now))
            if start < now:
                record.crash(start, now, plan)
            record.drop_unfinished_saves(now)
            record.roll_back()
        else:
            record.wait(since, now)
        plan, since = fitting, now
        if plan is not None:
            # A job that can begin at once is already running when the trace starts.
            first_seconds = assumptions.start_seconds if now > 0 else 0.0
            start = now + (assumptions.restart_seconds if begun else first_seconds)
            if begun:
                record.interrupt()
            begun = True
    if plan is None:
        record.wait(since, stop)
    else:
        record.recover(since, min(start, stop))
        if start < stop:
            record.train(start, stop, plan)
    return record.outcome()


def _must_end(plan: FittedPlan, devices: frozenset[int], fitting: FittedPlan | None, restart_on: RestartOn) -> bool:
    """Whether the processes of ``plan`` end when the devices that are there have changed to ``devices``."""
    if restart_on == "change" or not plan.holdings.keys() <= devices:
        return True
    return restart_on == "need" and fitting is not None and is_faster(fitting, plan)
