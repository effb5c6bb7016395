"""The predicted times of a plan whose ranks and stages are given: nothing is searched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from ..cluster.all_reduce import concurrent_seconds
from ..cluster.shared_hops import hop_channels
from ..cluster.topology import Channel, Topology
from ..profile.layer_profile import ModelProfile
from ..stages.pipeline import Pipeline, PipelineCost, Slot, Split, evaluate
from ..stages.split_methods import split
from .pass_order import GraphSeconds, Schedule
from .plan import Plan, Replica, StagePlan, exposed_seconds

__all__ = [
    *("StageGroup", "equal_micro_batches", "finished_plan", "finished_replica", "hop_lanes", "predict_plan"),
    *("stage_slots", "summing_seconds"),
]


class StageGroup(NamedTuple):
    """Devices that run a stage, all of one kind."""

    ranks: tuple[int, ...]
    device: str
    block_bytes: float
    """Memory of each device for the state and the activations of its blocks."""
    tensor_parallel: int | None = None
    """Overrides the plan's degree."""
    recompute: bool = False


def predict_plan(
    topology: Topology,
    profile: ModelProfile,
    ranks: Sequence[Sequence[Sequence[int]]],
    *,
    micro_batch: int,
    global_batch: int,
    bounds: Sequence[int] | None = None,
    method: str = "uniform",
    notes: Sequence[str] = (),
    overlap: bool = False,
) -> Plan:
    """The plan with these ranks in these places, with its predicted times and memory."""
    replicas, stages, degree = len(ranks), len(ranks[0]), len(ranks[0][0])
    micro_batches = equal_micro_batches(global_batch, micro_batch, replicas)
    # The members of a tensor-parallel group are in one node, so their hops are alike.
    hops = hop_channels(topology, hop_lanes(ranks))[::degree]
    pipelines = [
        _pipeline(topology, profile, groups, degree, micro_batch, micro_batches, channels)
        for groups, channels in zip(ranks, hops, strict=True)
    ]
    order = tuple(range(stages))
    if bounds is None:
        bounds = split(pipelines[0], method, order=order).bounds
    if (
        len(bounds) != stages + 1
        or bounds[0] != 0
        or bounds[-1] != profile.blocks
        or list(bounds) != sorted(set(bounds))
    ):
        raise ValueError(
            f"bounds={list(bounds)} do not cut {profile.blocks} blocks into {stages} stages; give {stages + 1} numbers "
            f"that rise from 0 to {profile.blocks}"
        )
    cut = Split(order, tuple(bounds))
    written = []
    for groups, pipeline in zip(ranks, pipelines, strict=True):
        members = [
            StageGroup(tuple(group), slot.name, slot.memory_bytes)
            for group, slot in zip(groups, pipeline.slots, strict=True)
        ]
        written.append(finished_replica(topology, members, cut.bounds, evaluate(pipeline, cut), micro_batches))
    gradient_bytes = [
        float(slot.costs.gradient_bytes[start:stop].sum())
        for slot, (start, stop) in zip(pipelines[0].slots, pairwise(bounds), strict=True)
    ]
    synchronization = summing_seconds(topology, ranks, gradient_bytes)
    if overlap:
        stages_of_all = [stage for replica in written for stage in replica.stages]
        passes = [(stage.forward_seconds, stage.backward_seconds) for stage in stages_of_all]
        synchronization = exposed_seconds(synchronization, passes)
    return finished_plan(profile, written, method, degree, micro_batch, synchronization, notes)


def equal_micro_batches(global_batch: int, micro_batch: int, replicas: int) -> int:
    micro_batches, left = divmod(global_batch, micro_batch * replicas)
    if left or not micro_batches:
        raise ValueError(
            f"a global batch of {global_batch} samples cannot be divided into micro-batches of {micro_batch} for "
            f"{replicas} replicas; use a multiple of {micro_batch * replicas}"
        )
    return micro_batches


def hop_lanes(ranks: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """The ranks that send to each other from stage to stage: a lane per replica and place in the group."""
    return [[group[place] for group in groups] for groups in ranks for place in range(len(groups[0]))]


def finished_replica(
    topology: Topology, groups: Sequence[StageGroup], bounds: Sequence[int], cost: PipelineCost, micro_batches: int
) -> Replica:
    kinds = [topology.devices[group.ranks[0]].kind for group in groups]
    stages = tuple(
        StagePlan(
            blocks=(bounds[stage], bounds[stage + 1]),
            device=group.device,
            ranks=group.ranks,
            tensor_parallel=group.tensor_parallel,
            recompute=group.recompute,
            node=topology.nodes[topology.devices[group.ranks[0]].node].name,
            forward_seconds=cost.forward_seconds[stage],
            backward_seconds=cost.backward_seconds[stage],
            transfer_seconds=cost.transfer_seconds[stage],
            schedule_seconds=cost.schedule_seconds[stage],
            update_seconds=cost.update_seconds[stage],
            memory_bytes=cost.memory_bytes[stage] + kinds[stage].memory_bytes - group.block_bytes,
            memory_overhead_bytes=kinds[stage].memory_bytes - group.block_bytes,
            memory_available_bytes=kinds[stage].memory_bytes,
        )
        for stage, group in enumerate(groups)
    )
    return Replica(stages=stages, micro_batches=micro_batches, pipeline_seconds=cost.seconds)


def finished_plan(
    profile: ModelProfile,
    replicas: Sequence[Replica],
    method: str,
    tensor_parallel: int,
    micro_batch: int,
    synchronization_seconds: float,
    notes: Sequence[str] = (),
    schedule: Schedule = "1f1b",
    order_seconds: GraphSeconds | None = None,
    zero_stage: Literal[0, 1] = 0,
) -> Plan:
    """The plan of these replicas. Its iteration takes as long as the slowest pipeline and the synchronization."""
    return Plan(
        model=profile.name,
        precision=profile.precision,
        blocks=profile.blocks,
        method=method,
        schedule=schedule,
        order_seconds=order_seconds,
        tensor_parallel=tensor_parallel,
        zero_stage=zero_stage,
        micro_batch=micro_batch,
        global_batch=micro_batch * sum(replica.micro_batches for replica in replicas),
        replicas=tuple(replicas),
        synchronization_seconds=synchronization_seconds,
        iteration_seconds=max(replica.pipeline_seconds for replica in replicas) + synchronization_seconds,
        notes=tuple(notes),
    )


def _pipeline(
    topology: Topology,
    profile: ModelProfile,
    groups: Sequence[Sequence[int]],
    degree: int,
    micro_batch: int,
    micro_batches: int,
    hops: Sequence[Channel],
) -> Pipeline:
    """The pipeline of these groups in this order; ``hops`` are the channels between neighbors."""
    slots = stage_slots(topology, profile, groups, degree, micro_batch)
    channels = [[topology.channel(one[0], other[0]) for other in groups] for one in groups]
    for stage, channel in enumerate(hops):
        channels[stage][stage + 1] = channels[stage + 1][stage] = channel
    return Pipeline(slots, tuple(tuple(row) for row in channels), micro_batches)


def stage_slots(
    topology: Topology, profile: ModelProfile, groups: Sequence[Sequence[int]], degree: int, micro_batch: int
) -> tuple[Slot, ...]:
    """The slot of each stage, by the ranks of its tensor-parallel group."""
    slots = []
    for group in groups:
        devices = [topology.devices[rank] for rank in group]
        kinds = sorted({device.kind.name for device in devices})
        if len(kinds) > 1 or len(group) != degree:
            raise ValueError(
                f"ranks {tuple(group)} ({', '.join(kinds)}) are not a tensor-parallel group of {degree} devices of one "
                "kind"
            )
        speed = min(device.speed for device in devices)
        costs = profile.costs(kinds[0], degree, micro_batch, speed)
        slots.append(Slot(kinds[0], costs, costs.memory_for_blocks(devices[0].kind.usable_bytes, len(groups))))
    return tuple(slots)


def summing_seconds(
    topology: Topology, ranks: Sequence[Sequence[Sequence[int]]], gradient_bytes: Sequence[float]
) -> float:
    """Seconds until all stages have summed their gradients over the replicas, all at the same time."""
    groups, sizes = [], []
    for stage, size in enumerate(gradient_bytes):
        for place in range(len(ranks[0][stage])):
            groups.append([replica[stage][place] for replica in ranks])
            sizes.append(size)
    return max(concurrent_seconds(topology, groups, sizes))
