"""The predicted plan of ranks in given places whose stages hold several chunks of the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..cluster.shared_hops import hop_channels
from ..cluster.topology import Channel, Topology
from ..profile.layer_profile import ModelProfile
from .chunked_pipeline import ChunkDivision, ChunkedPipeline, divide_blocks, proportional_bounds, uniform_chunks
from .pass_order import (
    WEIGHT_SHARE,
    GraphSeconds,
    PassOrder,
    Schedule,
    interleaved,
    stages_of_chunks,
    why_not_schedulable,
    zero_bubble_v,
)
from .plan import ChunkPlan, Plan, Replica, StagePlan
from .predict import equal_micro_batches, finished_plan, hop_lanes, stage_slots, summing_seconds
from .simulate import MAX_PASSES

__all__ = ["MAX_GROUPS", "Ranks", "all_arrangements", "predict_chunked_plan"]


MAX_PASSES_TO_DIVIDE = 10_000
"""Passes above which the blocks are divided for fewer micro-batches."""
FORWARD_FACTORS = (1.0, 0.5, 2.0)
"""Colossal-AI orders the passes of zbv for stages that are alike. For unequal stages, the order that it makes for other
forward times than the mean is sometimes better."""


def predict_chunked_plan(
    topology: Topology,
    profile: ModelProfile,
    ranks: Sequence[Sequence[Sequence[int]]],
    *,
    schedule: Schedule,
    chunks: int,
    micro_batch: int,
    global_batch: int,
    bounds: Sequence[int] | None = None,
    order_seconds: GraphSeconds | None = None,
    method: str = "exact",
    notes: Sequence[str] = (),
) -> Plan:
    """The plan with these ranks in these places, with its simulated time and its memory."""
    stages, degree = len(ranks[0]), len(ranks[0][0])
    micro_batches = equal_micro_batches(global_batch, micro_batch, len(ranks))
    problem = why_not_schedulable(schedule, stages, micro_batches)
    if problem is not None:
        raise ValueError(f"{micro_batches} micro-batches for {stages} stages: {problem}")
    total = stages * chunks
    if profile.blocks < total:
        raise ValueError(
            f"{profile.name} has {profile.blocks} blocks, but {stages} stages of {chunks} chunks need at least "
            f"{total}; use fewer stages or chunks"
        )
    if 3 * total * micro_batches > MAX_PASSES:
        raise ValueError(
            f"{micro_batches:,} micro-batches in {total} chunks are too many passes to simulate; use larger "
            "micro-batches"
        )
    lines = _Lines.of(topology, profile, ranks, schedule, chunks, micro_batch)
    if bounds is None:
        bounds, order_seconds = _divided(lines, micro_batches, method)
    elif len(bounds) != total + 1 or list(bounds) != sorted({0, *bounds, profile.blocks}):
        raise ValueError(
            f"bounds={list(bounds)} do not cut {profile.blocks} blocks into {total} chunks; give {total + 1} numbers "
            f"that rise from 0 to {profile.blocks}"
        )
    cut = np.array([bounds], dtype=np.int64)
    if schedule == "zbv" and order_seconds is None:
        order_seconds = min(
            _variants(lines.mean_seconds(cut)),
            key=lambda each: max(
                float(row.seconds(cut)[0]) for row in lines.distinct(lines.order(micro_batches, each))
            ),
        )
    pipelines = lines.pipelines(lines.order(micro_batches, order_seconds))
    written = [
        _replica(topology, groups, pipeline, cut, micro_batches)
        for groups, pipeline in zip(ranks, pipelines, strict=True)
    ]
    gradient_bytes = [
        sum(float(slot.costs.gradient_bytes[a:b].sum()) for a, b in stage.block_ranges)
        for slot, stage in zip(pipelines[0].slots, written[0].stages, strict=True)
    ]
    synchronization = summing_seconds(topology, ranks, gradient_bytes)
    return finished_plan(profile, written, method, degree, micro_batch, synchronization, notes, schedule, order_seconds)


@dataclass(frozen=True, eq=False)
class _Lines:
    """The pipelines of all replicas without an order of passes."""

    schedule: Schedule
    chunks: int
    """Chunks per stage."""
    rows: tuple[ChunkedPipeline, ...]
    """Pipeline of each replica; its order says which stage has which chunk, and has no passes."""

    @classmethod
    def of(
        cls,
        topology: Topology,
        profile: ModelProfile,
        ranks: Sequence[Sequence[Sequence[int]]],
        schedule: Schedule,
        chunks: int,
        micro_batch: int,
    ) -> _Lines:
        stages, degree = len(ranks[0]), len(ranks[0][0])
        stage_of = stages_of_chunks(schedule, stages, chunks)
        lanes = hop_lanes(ranks)
        # The last stage sends to the first; of two stages that is the same channel as from the first to the last.
        goes_round = schedule == "interleaved" and stages > 2
        channels = hop_channels(topology, [[*lane, lane[0]] if goes_round else lane for lane in lanes])[::degree]
        order = PassOrder(stage_of, ((),) * stages)
        rows = tuple(
            ChunkedPipeline(
                stage_slots(topology, profile, groups, degree, micro_batch), _hops(stage_of, stages, row), order
            )
            for groups, row in zip(ranks, channels, strict=True)
        )
        return cls(schedule, chunks, rows)

    def order(self, micro_batches: int, order_seconds: GraphSeconds | None) -> PassOrder:
        stages = len(self.rows[0].slots)
        if order_seconds is not None:
            return zero_bubble_v(stages, micro_batches, order_seconds)
        return interleaved(stages, self.chunks, micro_batches)

    def pipelines(self, order: PassOrder) -> list[ChunkedPipeline]:
        return [replace(row, order=order) for row in self.rows]

    def distinct(self, order: PassOrder) -> list[ChunkedPipeline]:
        """Pipelines without those that are as fast as another one."""
        found = {(tuple(slot.kind for slot in row.slots), row.hops): row for row in self.rows}
        return [replace(row, order=order) for row in found.values()]

    def mean_seconds(self, cut: NDArray[np.int64]) -> GraphSeconds:
        """Mean times of the chunks ``[1, chunks + 1]`` of the first replica, and of the messages between stages."""
        times = self.rows[0].times(cut)
        schedule = float(times.schedule_seconds.mean()) / 2
        backward = float(times.backward_seconds.mean())
        hops = times.hop_seconds[[number for number, hop in enumerate(self.rows[0].hops) if hop is not None]]
        return GraphSeconds(
            forward=float(times.forward_seconds.mean()) + schedule,
            input_gradient=backward * (1 - WEIGHT_SHARE) + schedule,
            weight_gradient=backward * WEIGHT_SHARE,
            transfer=float(hops.mean()),
        )


def _hops(stage_of: Sequence[int], stages: int, channels: Sequence[Channel]) -> tuple[Channel | None, ...]:
    """The channel over the cut behind each chunk except the last; ``channels[s]`` is behind stage s."""
    hops: list[Channel | None] = []
    for here, there in pairwise(stage_of):
        if here == there:
            hops.append(None)
        elif abs(here - there) == 1:
            hops.append(channels[min(here, there)])
        else:
            hops.append(channels[stages - 1])
    return tuple(hops)


def _divided(lines: _Lines, micro_batches: int, method: str) -> tuple[tuple[int, ...], GraphSeconds | None]:
    """The bounds of the chunks, and the times from which the passes of ``zbv`` are ordered."""
    first = lines.rows[0]
    stages, total = len(first.slots), first.order.chunks
    start = np.array(uniform_chunks(first.blocks, total)) if method == "uniform" else proportional_bounds(first)
    means = lines.mean_seconds(start[None]) if lines.schedule == "zbv" else None
    fewer = min(micro_batches, stages * max(MAX_PASSES_TO_DIVIDE // (3 * total * stages), 1))
    best: tuple[float, tuple[int, ...], GraphSeconds | None] | None = None
    for seconds in _variants(means):
        pipelines = lines.distinct(lines.order(fewer, seconds))
        if method == "uniform":
            excess = max(float(pipeline.excess_bytes(start[None])[0]) for pipeline in pipelines)
            took = max(float(pipeline.seconds(start[None])[0]) for pipeline in pipelines)
            found = ChunkDivision(tuple(start.tolist()), took) if excess == 0 else None
        else:
            found = divide_blocks(pipelines)
        if found is not None and (best is None or found.seconds < best[0]):
            best = found.seconds, found.bounds, seconds
    if best is None:
        raise ValueError(
            f"no division into {total} chunks that was tried fits into memory; use smaller micro-batches, more stages, "
            "or devices with more memory"
        )
    return best[1], best[2]


def _variants(means: GraphSeconds | None) -> list[GraphSeconds | None]:
    """The mean times of the chunks, and the same with longer and shorter forwards, for other orders of the passes."""
    if means is None:
        return [None]
    return [means.model_copy(update={"forward": means.forward * factor}) for factor in FORWARD_FACTORS]


def _replica(
    topology: Topology,
    groups: Sequence[Sequence[int]],
    pipeline: ChunkedPipeline,
    cut: NDArray[np.int64],
    micro_batches: int,
) -> Replica:
    times, memory = pipeline.times(cut), pipeline.memory_bytes(cut)[:, 0]
    bounds, stage_of = cut[0].tolist(), pipeline.order.stage_of_chunk
    forward, backward, schedule, hops = (
        each[:, 0].tolist()
        for each in (times.forward_seconds, times.backward_seconds, times.schedule_seconds, times.hop_seconds)
    )
    stages = []
    for number, (group, slot) in enumerate(zip(groups, pipeline.slots, strict=True)):
        own = [chunk for chunk, stage in enumerate(stage_of) if stage == number]
        kind = topology.devices[group[0]].kind
        overhead = kind.memory_bytes - slot.memory_bytes
        stages.append(
            StagePlan(
                chunks=tuple(
                    ChunkPlan(
                        blocks=(bounds[chunk], bounds[chunk + 1]),
                        forward_seconds=forward[chunk],
                        backward_seconds=backward[chunk],
                        schedule_seconds=schedule[chunk],
                        hop_seconds=hops[chunk],
                    )
                    for chunk in own
                ),
                device=slot.name,
                ranks=tuple(group),
                node=topology.nodes[topology.devices[group[0]].node].name,
                forward_seconds=sum(forward[chunk] for chunk in own),
                backward_seconds=sum(backward[chunk] for chunk in own),
                transfer_seconds=sum(hops[chunk] + (hops[chunk - 1] if chunk else 0.0) for chunk in own),
                schedule_seconds=sum(schedule[chunk] for chunk in own),
                update_seconds=float(times.update_seconds[number, 0]),
                memory_bytes=float(memory[number]) + overhead,
                memory_overhead_bytes=overhead,
                memory_available_bytes=kind.memory_bytes,
            )
        )
    seconds = float(pipeline.seconds(cut)[0])
    return Replica(stages=tuple(stages), micro_batches=micro_batches, pipeline_seconds=seconds)


# Arrangements --------------------------------------------------------------------------------------------------------


Ranks = tuple[tuple[tuple[int, ...], ...], ...]
"""``[replicas][stages][tensor parallel]``."""

MAX_GROUPS = 5
"""Groups up to which all ways are tried: 5 groups form pipelines of at least 2 stages in 380 ways."""


def all_arrangements(groups: Sequence[tuple[int, ...]]) -> Iterator[Ranks]:
    """Every choice of groups in every order of stages, at least 2. The order of replicas does not matter."""
    for stages in range(2, len(groups) + 1):
        rows = list(itertools.permutations(groups, stages))
        for replicas in range(1, len(groups) // stages + 1):
            for chosen in itertools.combinations(rows, replicas):
                if len(set(itertools.chain(*chosen))) == stages * replicas:
                    yield chosen
