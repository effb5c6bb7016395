"""A plan run through the event simulation of its schedule, as planned or with ranks that turned slow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...io.text import spans
from ..stages.event_simulation import PipelineTimeline, Transfers, simulate_times
from .plan import Plan, Replica, StagePlan

__all__ = ["PlanSimulation", "simulate_plan", "slowed"]

MAX_MICRO_BATCHES = 1_000_000
"""Of a replica: a quarter of a minute, on a core of a few GHz."""


@dataclass(frozen=True, eq=False)
class PlanSimulation:
    """An iteration of a plan."""

    plan: Plan
    """With the times that were simulated, so its closed form can be compared."""
    timelines: tuple[PipelineTimeline, ...]
    """By replica; alike replicas share one."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Factors by rank."""

    @cached_property
    def seconds(self) -> float:
        """Of the iteration: replicas wait for the slowest of them, then sum their gradients."""
        return max(timeline.seconds for timeline in self.timelines) + self.plan.synchronization_seconds


def simulate_plan(
    plan: Plan, slow: Mapping[int, float] | None = None, transfers: Transfers = "blocking"
) -> PlanSimulation:
    """Every event of every replica of ``plan``.

    Args:
        slow: by how much the work of a rank takes longer; 2 for one at half its speed. A tensor-parallel group is as
            slow as the slowest of its ranks.
        transfers: see :mod:`~colossal_hetero.planner.stages.event_simulation`.

    Raises:
        ValueError: a rank that the plan does not use, a factor that is not above 0, or too many micro-batches.
    """
    most = max(replica.micro_batches for replica in plan.replicas)
    if most > MAX_MICRO_BATCHES:
        raise ValueError(f"{most:,} micro-batches are too many to simulate; at most {MAX_MICRO_BATCHES:,} can be")
    plan = slowed(plan, slow or {})
    known: dict[object, PipelineTimeline] = {}
    timelines = []
    for replica in plan.replicas:
        forward, backward, update = (
            tuple(getattr(stage, f"{name}_seconds") for stage in replica.stages)
            for name in ("forward", "backward", "update")
        )
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
    """The plan as it would be predicted by the closed form if these ranks were that much slower.

    Raises:
        ValueError: as :func:`simulate_plan`.
    """
    used = {rank for replica in plan.replicas for stage in replica.stages for rank in stage.ranks}
    for rank, factor in slow.items():
        if rank not in used:
            raise ValueError(f"rank {rank} is not in the plan, which uses ranks {spans(sorted(used))}")
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"rank {rank} cannot be {factor} times as slow; 2 is one at half its speed")
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
    times = [stage.forward_seconds + stage.backward_seconds + stage.transfer_seconds for stage in stages]
    seconds = sum(times) + (replica.micro_batches - 1) * max(times) + max(stage.update_seconds for stage in stages)
    return replica.model_copy(update={"stages": stages, "pipeline_seconds": seconds})


def _slowed_stage(stage: StagePlan, factor: float) -> StagePlan:
    names = ("forward_seconds", "backward_seconds", "update_seconds")
    return stage.model_copy(update={name: getattr(stage, name) * factor for name in names})
