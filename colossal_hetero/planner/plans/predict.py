"""A plan for a given layout and a given split: nothing is chosen, only what it would take is predicted."""

from __future__ import annotations

from collections.abc import Sequence

from ..cluster.all_reduce import concurrent_seconds
from ..cluster.topology import Topology
from ..profile.layer_profile import ModelProfile
from ..stages.pipeline import Pipeline, Slot, Split, evaluate
from ..stages.split_methods import split
from .plan import Plan, Replica, StagePlan

__all__ = ["priced_plan"]


def priced_plan(
    topology: Topology,
    profile: ModelProfile,
    ranks: Sequence[Sequence[Sequence[int]]],
    *,
    micro_batch: int,
    global_batch: int,
    bounds: Sequence[int] | None = None,
    method: str = "uniform",
    notes: Sequence[str] = (),
) -> Plan:
    """What it takes to train with these ranks in these places.

    Args:
        topology: Machines.
        profile: The model's layers on their kinds of devices.
        ranks: By replica, stage and place in the tensor-parallel group, ``[replicas][stages][tensor parallel]``.
        micro_batch: Samples.
        global_batch: Samples per iteration, equally many for each replica.
        bounds: Stage s of every replica runs blocks ``[bounds[s], bounds[s + 1])``; None: as ``method`` splits the
            first replica, with its stages in this order.
        method: One of :data:`~colossal_hetero.planner.stages.split_methods.METHODS`; with ``bounds``, a name
            for the record.
        notes: For readers of the plan.

    Raises:
        ValueError: The batch cannot be divided into these micro-batches, the bounds do not fit, a tensor-parallel group
            is of several kinds, a kind was not measured like that, or devices cannot reach each other.
    """
    replicas, stages, degree = len(ranks), len(ranks[0]), len(ranks[0][0])
    micro_batches, left = divmod(global_batch, micro_batch * replicas)
    if left or not micro_batches:
        raise ValueError(
            f"a global batch of {global_batch} samples cannot be divided into micro-batches of {micro_batch} for "
            f"{replicas} replicas; use a multiple of {micro_batch * replicas}"
        )
    pipelines = [_pipeline(topology, profile, groups, degree, micro_batch, micro_batches) for groups in ranks]
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
            f"bounds={list(bounds)} do not cut {profile.blocks} blocks into {stages} stages; they rise from 0 to "
            f"{profile.blocks}, {stages + 1} numbers in all"
        )
    cut = Split(order, tuple(bounds))
    costs = [evaluate(pipeline, cut) for pipeline in pipelines]
    written = []
    for groups, pipeline, cost in zip(ranks, pipelines, costs, strict=True):
        parts = tuple(
            StagePlan(
                blocks=(bounds[stage], bounds[stage + 1]),
                device=pipeline.slots[stage].name,
                ranks=tuple(group),
                node=topology.nodes[topology.devices[group[0]].node].name,
                forward_seconds=cost.forward_seconds[stage],
                backward_seconds=cost.backward_seconds[stage],
                transfer_seconds=cost.transfer_seconds[stage],
                update_seconds=cost.update_seconds[stage],
                memory_bytes=cost.memory_bytes[stage],
                memory_available_bytes=pipeline.slots[stage].memory_bytes,
            )
            for stage, group in enumerate(groups)
        )
        written.append(Replica(stages=parts, micro_batches=micro_batches, pipeline_seconds=cost.seconds))
    synchronization = _synchronization(topology, pipelines[0], ranks, bounds)
    return Plan(
        model=profile.name,
        blocks=profile.blocks,
        method=method,
        tensor_parallel=degree,
        micro_batch=micro_batch,
        global_batch=global_batch,
        replicas=tuple(written),
        synchronization_seconds=synchronization,
        iteration_seconds=max(cost.seconds for cost in costs) + synchronization,
        notes=tuple(notes),
    )


def _pipeline(
    topology: Topology,
    profile: ModelProfile,
    groups: Sequence[Sequence[int]],
    degree: int,
    micro_batch: int,
    micro_batches: int,
) -> Pipeline:
    slots = []
    for group in groups:
        devices = [topology.devices[rank] for rank in group]
        kinds = sorted({device.kind.name for device in devices})
        if len(kinds) > 1 or len(group) != degree:
            raise ValueError(
                f"ranks {tuple(group)} ({', '.join(kinds)}) are no tensor-parallel group of {degree} alike"
            )
        speed = min(device.speed for device in devices)
        costs = profile.costs(kinds[0], degree, micro_batch, speed)
        slots.append(Slot(kinds[0], costs, devices[0].kind.memory_bytes, tuple(group)))
    channels = tuple(tuple(topology.channel(one[0], other[0]) for other in groups) for one in groups)
    return Pipeline(tuple(slots), channels, micro_batches)


def _synchronization(
    topology: Topology, pipeline: Pipeline, ranks: Sequence[Sequence[Sequence[int]]], bounds: Sequence[int]
) -> float:
    """All stages at once; the slowest counts."""
    groups, sizes = [], []
    for stage in range(len(bounds) - 1):
        gradient_bytes = float(pipeline.slots[stage].costs.gradient_bytes[bounds[stage] : bounds[stage + 1]].sum())
        for place in range(len(ranks[0][stage])):
            groups.append([replica[stage][place] for replica in ranks])
            sizes.append(gradient_bytes)
    return max(concurrent_seconds(topology, groups, sizes))
