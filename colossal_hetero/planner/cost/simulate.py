"""Event simulation of a plan, as planned or with ranks that became slow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...common.text import spans
from ..stages.event_simulation import PipelineTimeline, Transfers, simulate_times, with_schedule
from .pass_order import ChunkTimes, PassOrder, PassTimeline, interleaved, zero_bubble_v
from .plan import Plan, Replica, StagePlan

__all__ = ["MAX_PASSES", "PlanSimulation", "chunked_order", "simulate_plan", "slowed"]

MAX_MICRO_BATCHES = 1_000_000
"""Maximum number of micro-batches of a replica: simulating them takes about 15 seconds on one core."""
MAX_PASSES = 200_000
"""Maximum number of passes of a pipeline whose stages hold several chunks; they are simulated one by one."""


@dataclass(frozen=True, eq=False)
class PlanSimulation:
    """A simulated iteration of a plan."""

    plan: Plan
    """The plan with the simulated stage times, to compare its prediction with the simulation."""
    timelines: tuple[PipelineTimeline | PassTimeline, ...]
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
    """Simulate an iteration of every replica of ``plan``."""
    micro_batches = max(replica.micro_batches for replica in plan.replicas)
    if micro_batches > MAX_MICRO_BATCHES:
        raise ValueError(
            f"{micro_batches:,} micro-batches are too many to simulate; at most {MAX_MICRO_BATCHES:,} are allowed"
        )
    plan = slowed(plan, slow or {})
    if plan.schedule != "1f1b":
        return PlanSimulation(plan, _chunked_timelines(plan, transfers), dict(slow or {}))
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


def _chunked_timelines(plan: Plan, transfers: Transfers) -> tuple[PassTimeline, ...]:
    known: dict[object, PassTimeline] = {}
    timelines = []
    for replica in plan.replicas:
        key = tuple(stage.update_seconds for stage in replica.stages), replica.chunks, replica.micro_batches
        if key not in known:
            known[key] = _simulate_chunks(plan, replica, transfers)
        timelines.append(known[key])
    return tuple(timelines)


def _simulate_chunks(plan: Plan, replica: Replica, transfers: Transfers) -> PassTimeline:
    chunks = [chunk for _, chunk in replica.chunks]
    times = ChunkTimes(
        np.array([chunk.forward_seconds for chunk in chunks]),
        np.array([chunk.backward_seconds for chunk in chunks]),
        np.array([chunk.schedule_seconds for chunk in chunks]),
        np.array([chunk.hop_seconds for chunk in chunks]),
        np.array([stage.update_seconds for stage in replica.stages]),
    )
    return PassTimeline.of(chunked_order(plan, replica.micro_batches), times, transfers)


def chunked_order(plan: Plan, micro_batches: int) -> PassOrder:
    """The passes of each stage of a plan whose stages hold several chunks."""
    stages, chunks = len(plan.layers_per_stage), plan.chunks_per_stage
    passes = stages * chunks * micro_batches * (2 if plan.order_seconds is None else 3)
    if passes > MAX_PASSES:
        raise ValueError(f"{passes:,} passes are too many to simulate; at most {MAX_PASSES:,} are allowed")
    if plan.order_seconds is not None:
        return zero_bubble_v(stages, micro_batches, plan.order_seconds)
    return interleaved(stages, chunks, micro_batches)


def slowed(plan: Plan, slow: Mapping[int, float]) -> Plan:
    """The plan with its predicted times if the work of some ranks takes longer; the order of passes stays."""
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
    replicas = tuple(_slowed_replica(plan, replica, slow) for replica in plan.replicas)
    longest = max(replica.pipeline_seconds for replica in replicas)
    return plan.model_copy(
        update={
            "replicas": replicas,
            "iteration_seconds": longest + plan.synchronization_seconds,
            "uniform_seconds": None,
            "bound_seconds": None,
        }
    )


def _slowed_replica(plan: Plan, replica: Replica, slow: Mapping[int, float]) -> Replica:
    if not any(rank in slow for stage in replica.stages for rank in stage.ranks):
        return replica
    stages = tuple(_slowed_stage(stage, max(slow.get(rank, 1.0) for rank in stage.ranks)) for stage in replica.stages)
    if plan.schedule != "1f1b":
        replica = replica.model_copy(update={"stages": stages})
        return replica.model_copy(update={"pipeline_seconds": _simulate_chunks(plan, replica, "blocking").seconds})
    times = [stage.micro_batch_seconds for stage in stages]
    seconds = sum(times) + (replica.micro_batches - 1) * max(times) + max(stage.update_seconds for stage in stages)
    return replica.model_copy(update={"stages": stages, "pipeline_seconds": seconds})


def _slowed_stage(stage: StagePlan, factor: float) -> StagePlan:
    work = ("forward_seconds", "backward_seconds", "schedule_seconds")
    chunks = tuple(
        chunk.model_copy(update={name: getattr(chunk, name) * factor for name in work}) for chunk in stage.chunks
    )
    seconds = {name: getattr(stage, name) * factor for name in (*work, "update_seconds")}
    return stage.model_copy(update={**seconds, "chunks": chunks})
