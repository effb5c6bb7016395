"""Replay a trace in three ways: this package, restarts from a shared folder, and waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...io.text import count
from .assumptions import Assumptions
from .available_devices import Availability
from .elastic_job import simulate_elastic_job
from .fitted_plans import FitPlan
from .job_record import JobOutcome
from .restarted_job import RestartOn, simulate_restarted_job

__all__ = ["Replay", "Way", "replay_trace"]

Way = Literal["elastic", "restart", "waiting"]


@dataclass(frozen=True)
class Replay:
    """What a job achieves on a trace, in each way."""

    changes: tuple[Availability, ...]
    """When the devices that are there change, from second 0 on."""
    seconds: float
    """How long the trace lasts."""
    global_batch: int
    """Samples per iteration."""
    wait_for: int
    """With fewer devices than this, ``waiting`` does not train."""
    jobs: Mapping[Way, JobOutcome]
    """``elastic``: this package. ``restart``: all processes start again from a shared folder. ``waiting``: the same,
    but with a fixed number of devices, without which the job waits."""
    best_seconds: float
    """Iteration time with all devices of the cluster."""

    @property
    def ideal_goodput(self) -> float:
        """Samples per second that all devices of the cluster could do all the time."""
        return self.global_batch / self.best_seconds

    def samples(self, way: Way) -> int:
        """Samples that count."""
        return self.jobs[way].iterations * self.global_batch

    def goodput(self, way: Way) -> float:
        """Samples that count, per second of the trace."""
        return self.samples(way) / self.seconds

    def ratio(self, way: Way, other: Way) -> float | None:
        """Goodput of one way relative to another; None if the other has none."""
        return self.samples(way) / self.samples(other) if self.samples(other) else None


def replay_trace(
    changes: Sequence[Availability],
    seconds: float,
    fit_plan: FitPlan,
    assumptions: Assumptions,
    *,
    global_batch: int,
    cluster: frozenset[int],
    restart_on: RestartOn = "change",
    wait_for: int | None = None,
) -> Replay:
    """Simulate all three ways on a trace.

    Args:
        changes: Which devices are there, from second 0 on.
        seconds: How long the trace lasts.
        fit_plan: Finds plans.
        assumptions: What recoveries and restarts cost.
        global_batch: Samples per iteration.
        cluster: All devices of the cluster. The ideal is to have them all the time.
        restart_on: When the processes of ``restart`` end.
        wait_for: Number of devices that ``waiting`` needs. None: as many as there are at the start, at least one.

    Raises:
        ValueError: No plan fits the whole cluster.
    """
    whole = fit_plan(cluster, {})
    if whole is None:
        raise ValueError(f"no plan fits the whole cluster of {count(len(cluster), 'device')}; give a larger one")
    needed = max(len(changes[0].devices), 1) if wait_for is None else wait_for
    jobs: dict[Way, JobOutcome] = {
        "elastic": simulate_elastic_job(changes, seconds, fit_plan, assumptions),
        "restart": simulate_restarted_job(changes, seconds, fit_plan, assumptions, restart_on=restart_on),
        "waiting": simulate_restarted_job(
            changes, seconds, fit_plan, assumptions, restart_on="loss", min_devices=needed
        ),
    }
    # All devices are at least as fast as some of them, also where the planner finds no better plan for more devices.
    spans = (span for job in jobs.values() for span in job.spans if span.activity == "training")
    best = min([whole.iteration_seconds, *(span.iteration_seconds for span in spans)])
    return Replay(tuple(changes), seconds, global_batch, needed, jobs, best)
