"""Event simulation of a plan, as planned or with ranks that became slow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...io.text import spans
from ..stages.event_simulation import PipelineTimeline, Transfers, simulate_times, with_schedule
from .plan import Plan, Replica, StagePlan

__all__ = ["PlanSimulation", "simulate_plan", "slowed"]

MAX_MICRO_BATCHES = 1_000_000
"""Maximum number of micro-batches of a replica: simulating them takes about 15 seconds on one core."""


@dataclass(frozen=True, eq=False)
class PlanSimulation:
    """A simulated iteration of a plan."""

    plan: Plan
    """The plan with the stage times that were simulated, so that its prediction can be compared with the simulation."""
    timelines: tuple[PipelineTimeline, ...]
    """Timeline of each replica; replicas with the same times share one object."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Factor by which the work of each slow rank takes longer."""

    @cached_property
    def seconds(self) -> float:
        """Time of the iteration: the replicas wait for the slowest of them and then sum their gradients."""
        return max(timeline.seconds for timeline in self.timelines) + self.plan.synchronization_seconds


def simulate_plan(
    plan: Plan, slow: Mapping[int, float] | None = None, transfers: Transfers = "blocking"
) -> PlanSimulation:
    """Simulate an iteration of every replica of ``plan``.

    Args:
        plan: The plan to simulate.
        slow: Factor by which the work of a rank takes longer, e.g. 2 for a rank at half its speed. A tensor-parallel
            group is as slow as its slowest rank.
        transfers: Model of the transfers, see :mod:`~colossal_hetero.planner.stages.event_simulation`.

    Raises:
        ValueError: The plan does not use a slow rank, a factor is not above 0, or there are too many micro-batches.
    """
    micro_batches = max(replica.micro_batches for replica in plan.replicas)
    if micro_batches > MAX_MICRO_BATCHES:
        raise ValueError(
            f"{micro_batches:,} micro-batches are too many to simulate; at most {MAX_MICRO_BATCHES:,} are allowed"
        )
    plan = slowed(plan, slow or {})
    known: dict[object, PipelineTimeline] = {}
    timelines = []
    for replica in plan.replicas:
        forward, backward, schedule, update = (
            tuple(getattr(stage, f"{name}_seconds") for stage in replica.stages)
            for name in ("forward", "backward", "schedule", "update")
        )
        forward, backward = with_schedule(forward, schedule), with_schedule(backward, schedule)
        key = (forward, backward, update, replica.hop_seconds, replica.micro_batches)
        if key not in known:
            known[key] = simulate_times(
                forward,
                backward,
                replica.hop_seconds,
                replica.micro_batches,
                update_seconds=update,
                transfers=transfers,
            )
        timelines.append(known[key])
    return PlanSimulation(plan, tuple(timelines), dict(slow or {}))


def slowed(plan: Plan, slow: Mapping[int, float]) -> Plan:
    """The plan with the times that the closed form predicts if the work of some ranks takes longer by these factors.

    Raises:
        ValueError: The plan does not use a slow rank, or a factor is not above 0.
    """
    used = {rank for replica in plan.replicas for stage in replica.stages for rank in stage.ranks}
    for rank, factor in slow.items():
        if rank not in used:
            raise ValueError(f"rank {rank} is not in the plan, which uses ranks {spans(sorted(used))}")
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(
                f"rank {rank} cannot be {factor} times as slow: the factor must be above 0, e.g. 2 for half speed"
            )
    if not slow:
        return plan
    replicas = tuple(_slowed_replica(replica, slow) for replica in plan.replicas)
    longest = max(replica.pipeline_seconds for replica in replicas)
    return plan.model_copy(
        update={
            "replicas": replicas,
            "iteration_seconds": longest + plan.synchronization_seconds,
            "uniform_seconds": None,
        }
    )


def _slowed_replica(replica: Replica, slow: Mapping[int, float]) -> Replica:
    if not any(rank in slow for stage in replica.stages for rank in stage.ranks):
        return replica
    stages = tuple(_slowed_stage(stage, max(slow.get(rank, 1.0) for rank in stage.ranks)) for stage in replica.stages)
    times = [stage.micro_batch_seconds for stage in stages]
    seconds = sum(times) + (replica.micro_batches - 1) * max(times) + max(stage.update_seconds for stage in stages)
    return replica.model_copy(update={"stages": stages, "pipeline_seconds": seconds})


def _slowed_stage(stage: StagePlan, factor: float) -> StagePlan:
    names = ("forward_seconds", "backward_seconds", "schedule_seconds", "update_seconds")
    return stage.model_copy(update={name: getattr(stage, name) * factor for name in names})
