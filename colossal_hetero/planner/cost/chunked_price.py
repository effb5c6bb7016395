"""The price of pipelines whose stages hold several chunks of the model, and the best division of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...common.text import count
from ..cluster.all_reduce import concurrent_seconds
from ..cluster.topology import Channel, Topology
from ..profile.layer_profile import ModelProfile
from ..stages.fixed_order import all_bounds
from ..stages.pipeline import Slot
from ..stages.split_methods import uniform_bounds
from .draft import finished_plan, planned_stage
from .pass_order import GraphSeconds, PassOrder, Schedule, chunked_order, stages_of_chunks, why_not_schedulable
from .placement import NodeLinks
from .plan import ChunkPlan, Plan, Replica
from .simulate import MAX_PASSES, WEIGHT_SHARE, ChunkTimes, simulate_passes

Ranks = tuple[tuple[tuple[int, ...], ...], ...]
"""``[replicas][stages][tensor parallel]``."""
Groups = Sequence[Sequence[Sequence[int]]]
""":data:`Ranks` of any sequences."""

MAX_PASSES_TO_DIVIDE = 10_000  # passes above which the blocks are divided for fewer micro-batches
FORWARD_FACTORS = (1.0, 0.5, 2.0)
"""Colossal-AI orders the passes of zbv for stages that are alike. For unequal stages, the order that it makes for other
forward times than the mean is sometimes better."""


def price_chunks(
    topology: Topology,
    profile: ModelProfile,
    ranks: Groups,
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
    rows = _pipelines(topology, profile, ranks, schedule, chunks, micro_batch)
    if bounds is None:
        bounds, order_seconds = _divided(rows, schedule, micro_batches, method)
    cut = np.array([bounds], dtype=np.int64)
    if schedule == "zbv" and order_seconds is None:
        order_seconds = min(
            _variants(_mean_seconds(rows[0], cut)),
            key=lambda each: float(_prices(_ordered(_distinct(rows), micro_batches, each), cut)[1][0]),
        )
    pipelines = _ordered(rows, micro_batches, order_seconds)
    written = [
        _replica(topology, groups, pipeline, cut, micro_batches)
        for groups, pipeline in zip(ranks, pipelines, strict=True)
    ]
    gradient_bytes = [
        sum(float(slot.costs.gradient_bytes[a:b].sum()) for a, b in stage.block_ranges)
        for slot, stage in zip(pipelines[0].slots, written[0].stages, strict=True)
    ]
    synchronization = summing_seconds(topology, ranks, gradient_bytes)
    return finished_plan(
        profile,
        written,
        synchronization,
        micro_batch,
        method=method,
        schedule=schedule,
        order_seconds=order_seconds,
        tensor_parallel=degree,
        notes=tuple(notes),
    )


def _pipelines(
    topology: Topology, profile: ModelProfile, ranks: Groups, schedule: Schedule, chunks: int, micro_batch: int
) -> list[ChunkedPipeline]:
    """The pipeline of each replica; its order says which stage has which chunk, and has no passes."""
    stages, degree = len(ranks[0]), len(ranks[0][0])
    stage_of = stages_of_chunks(schedule, stages, chunks)
    nodes = [[topology.devices[group[0]].node for group in groups] for groups in ranks]
    if schedule == "interleaved" and stages > 2:
        # The last stage sends to the first; of two stages that is the same channel as from the first to the last.
        nodes = [[*row, row[0]] for row in nodes]
    links = NodeLinks(topology, 0.0)
    rows = []
    for groups, numbers, where in zip(ranks, links.hops(nodes, degree), nodes, strict=True):
        # Without a link, the topology raises an error that says so.
        channels = [
            links.channels[number] if number >= 0 else topology.node_channel(*hop)
            for number, hop in zip(numbers, pairwise(where), strict=True)
        ]
        hops = tuple(
            None if a == b else channels[min(a, b) if abs(a - b) == 1 else stages - 1] for a, b in pairwise(stage_of)
        )
        slots = stage_slots(topology, profile, groups, degree, micro_batch)
        rows.append(ChunkedPipeline(slots, hops, PassOrder(stage_of, ((),) * stages)))
    return rows


def _ordered(
    rows: Sequence[ChunkedPipeline], micro_batches: int, order_seconds: GraphSeconds | None
) -> list[ChunkedPipeline]:
    order = chunked_order(rows[0].order.stages, rows[0].order.chunks, micro_batches, order_seconds)
    return [replace(row, order=order) for row in rows]


def _distinct(rows: Sequence[ChunkedPipeline]) -> list[ChunkedPipeline]:
    return list({(row.slots, row.hops): row for row in rows}.values())


def _mean_seconds(row: ChunkedPipeline, cut: NDArray[np.int64]) -> GraphSeconds:
    """Mean times of the chunks ``[1, chunks + 1]``, and of the messages between stages."""
    times = row.times(cut)
    backward = float(times.backward_seconds.mean())
    hops = times.hop_seconds[[number for number, hop in enumerate(row.hops) if hop is not None]]
    return GraphSeconds(
        forward=float(times.forward_seconds.mean()),
        input_gradient=backward * (1 - WEIGHT_SHARE),
        weight_gradient=backward * WEIGHT_SHARE,
        transfer=float(hops.mean()),
    )


def _divided(
    rows: Sequence[ChunkedPipeline], schedule: Schedule, micro_batches: int, method: str
) -> tuple[tuple[int, ...], GraphSeconds | None]:
    """The bounds of the chunks, and the times from which the passes of ``zbv`` are ordered."""
    first, distinct = rows[0], _distinct(rows)
    stages, total = first.order.stages, first.order.chunks
    start = np.array(uniform_bounds(first.blocks, total)) if method == "uniform" else proportional_bounds(first)
    means = _mean_seconds(first, start[None]) if schedule == "zbv" else None
    fewer = min(micro_batches, stages * max(MAX_PASSES_TO_DIVIDE // (3 * total * stages), 1))
    best: tuple[float, tuple[int, ...], GraphSeconds | None] | None = None
    for seconds in _variants(means):
        pipelines = _ordered(distinct, fewer, seconds)
        found = _if_it_fits(_best(pipelines, start[None])) if method == "uniform" else divide_blocks(pipelines)
        if found is not None and (best is None or found[0] < best[0]):
            best = (*found, seconds)
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
    names = ("forward_seconds", "backward_seconds", "hop_seconds")
    by_chunk = zip(pairwise(cut[0].tolist()), *(getattr(times, name)[:, 0].tolist() for name in names), strict=True)
    chunks = [ChunkPlan(blocks=blocks, **dict(zip(names, values, strict=True))) for blocks, *values in by_chunk]
    received = [0.0, *(chunk.hop_seconds for chunk in chunks)]
    stages = []
    for number, (group, slot) in enumerate(zip(groups, pipeline.slots, strict=True)):
        own = [chunk for chunk, stage in enumerate(pipeline.order.stage_of_chunk) if stage == number]
        stages.append(
            planned_stage(
                topology,
                group,
                float(memory[number]),
                slot.memory_bytes,
                chunks=tuple(chunks[chunk] for chunk in own),
                transfer_seconds=sum(chunks[chunk].hop_seconds + received[chunk] for chunk in own),
                **{name: sum(getattr(chunks[chunk], name) for chunk in own) for name in names[:2]},
                update_seconds=float(times.update_seconds[number, 0]),
            )
        )
    seconds = float(pipeline.seconds(cut)[0])
    return Replica(stages=tuple(stages), micro_batches=micro_batches, pipeline_seconds=seconds)


def equal_micro_batches(global_batch: int, micro_batch: int, replicas: int) -> int:
    micro_batches, left = divmod(global_batch, micro_batch * replicas)
    if left or not micro_batches:
        raise ValueError(
            f"a global batch of {global_batch} samples cannot be divided into micro-batches of {micro_batch} for "
            f"{count(replicas, 'replica')}; use a multiple of {micro_batch * replicas}"
        )
    return micro_batches


def stage_slots(
    topology: Topology, profile: ModelProfile, groups: Sequence[Sequence[int]], degree: int, micro_batch: int
) -> tuple[Slot, ...]:
    slots = []
    for group in groups:
        kind = kind_of_group(topology, group, degree)
        devices = [topology.devices[rank] for rank in group]
        costs = profile.costs(kind, degree, micro_batch, min(device.speed for device in devices))
        slots.append(Slot(kind, costs, costs.memory_for_blocks(devices[0].kind.usable_bytes, len(groups))))
    return tuple(slots)


def kind_of_group(topology: Topology, ranks: Sequence[int], degree: int) -> str:
    kinds = sorted({topology.devices[rank].kind.name for rank in ranks})
    if len(kinds) > 1 or len(ranks) != degree:
        raise ValueError(
            f"ranks {tuple(ranks)} ({', '.join(kinds)}) are not a tensor-parallel group of {degree} devices of one kind"
        )
    return kinds[0]


def summing_seconds(topology: Topology, ranks: Groups, gradient_bytes: Sequence[float]) -> float:
    """Seconds until all stages have summed their gradients over the replicas, all at the same time."""
    groups, sizes = [], []
    for stage, size in enumerate(gradient_bytes):
        for place in range(len(ranks[0][stage])):
            groups.append([replica[stage][place] for replica in ranks])
            sizes.append(size)
    return max(concurrent_seconds(topology, groups, sizes))


# In flight -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def most_in_flight(order: PassOrder) -> tuple[NDArray[np.int64], ...]:
    """Micro-batches that each stage holds of each chunk at its fullest moments, ``[moments, chunks]``: until the
    backward pass ends, or the pass for the gradients of the weights if there is one. The moment that needs most memory
    depends on the sizes of the chunks, so all are returned that no other moment covers."""
    released = "weight" if order.splits_backward else "backward"
    peaks = []
    for passes in order.passes:
        held = [0] * order.chunks
        moments: set[tuple[int, ...]] = set()
        for each in passes:
            if each.kind == "forward":
                held[each.chunk] += 1
                moments.add(tuple(held))
            elif each.kind == released:
                held[each.chunk] -= 1
        rows = np.array(sorted(moments), dtype=np.int64)
        covered = (rows[:, None, :] <= rows[None, :, :]).all(axis=2)
        # Every moment covers itself.
        peaks.append(rows[covered.sum(axis=1) == 1])
    return tuple(peaks)


@dataclass(frozen=True, eq=False)
class ChunkedPipeline:
    """Stages in given slots, and their passes. ``bounds`` is ``[divisions, chunks + 1]``: chunk c has the blocks
    ``[bounds[c], bounds[c + 1])``, at least one."""

    slots: tuple[Slot, ...]
    hops: tuple[Channel | None, ...]  # the channel over the cut behind each chunk except the last; None inside a stage
    order: PassOrder

    @property
    def blocks(self) -> int:
        return len(self.slots[0].costs.forward_seconds)

    def times(self, bounds: NDArray[np.int64]) -> ChunkTimes:
        stage_of, divisions = self.order.stage_of_chunk, len(bounds)
        forward, backward, hops = (np.zeros((len(stage_of), divisions)) for _ in range(3))
        update = np.zeros((len(self.slots), divisions))
        for chunk, stage in enumerate(stage_of):
            costs = self.slots[stage].costs
            start, stop = bounds[:, chunk], bounds[:, chunk + 1]
            forward[chunk] = costs.cumulative.forward_seconds[stop] - costs.cumulative.forward_seconds[start]
            backward[chunk] = costs.cumulative.backward_seconds[stop] - costs.cumulative.backward_seconds[start]
            update[stage] += costs.cumulative.update_seconds[stop] - costs.cumulative.update_seconds[start]
            channel = self.hops[chunk] if chunk < len(self.hops) else None
            if channel is not None:
                hops[chunk] = costs.hop_seconds(channel)[stop]
        return ChunkTimes(forward, backward, hops, update)

    def memory_bytes(self, bounds: NDArray[np.int64]) -> NDArray[np.float64]:
        """State, and activations at the fullest moment, of each stage per device, ``[stages, divisions]``."""
        memory = np.zeros((len(self.slots), len(bounds)))
        for stage, (slot, moments) in enumerate(zip(self.slots, most_in_flight(self.order), strict=True)):
            totals = slot.costs.cumulative
            own = [chunk for chunk, other in enumerate(self.order.stage_of_chunk) if other == stage]
            starts, stops = bounds[:, own].T, bounds[:, [chunk + 1 for chunk in own]].T
            state = (totals.state_bytes[stops] - totals.state_bytes[starts]).sum(axis=0)
            activations = totals.activation_bytes[stops] - totals.activation_bytes[starts]
            memory[stage] = state + (moments[:, own] @ activations).max(axis=0)
        return memory

    def seconds(self, bounds: NDArray[np.int64]) -> NDArray[np.float64]:
        """Simulated time of an iteration with the optimizer step, without gradient synchronization, ``[divisions]``."""
        times = self.times(bounds)
        return np.asarray((simulate_passes(self.order, times) + times.update_seconds).max(axis=0))


# Chunk division ------------------------------------------------------------------------------------------------------
# Divisions of the blocks over pipelines that are alike. If there are few, all are compared. Otherwise blocks are moved
# from chunk to chunk, from several proportional divisions on, as long as that makes the simulated iteration shorter.


MAX_COMPARED = 1_500  # largest number of divisions that are all compared
MAX_ROUNDS = 200  # moves of blocks from each start
ROUNDING = 1e-12


Division = tuple[float, tuple[int, ...]]
"""Seconds of the slowest pipeline, and blocks of each chunk, as bounds ``[chunks + 1]``."""
_Priced = tuple[float, float, NDArray[np.int64]]
"""Bytes by which memory is exceeded, seconds of the slowest pipeline, and bounds."""


def divide_blocks(pipelines: Sequence[ChunkedPipeline], max_compared: int = MAX_COMPARED) -> Division | None:
    """The best division of the blocks that is found; None if none fits in memory, or there are too few blocks."""
    first = pipelines[0]
    chunks = first.order.chunks
    if first.blocks < chunks:
        return None
    every = all_bounds(first.blocks, chunks)
    if every is not None and len(every) <= max_compared:
        return _if_it_fits(_best(pipelines, every))
    starts = [proportional_bounds(pipeline) for pipeline in pipelines]
    starts.append(np.asarray(uniform_bounds(first.blocks, chunks)))
    improved = [_improved(pipelines, start) for start in np.unique(starts, axis=0)]
    return _if_it_fits(min(improved, key=lambda each: each[:2]))


def _if_it_fits(found: _Priced) -> Division | None:
    return None if found[0] else (found[1], tuple(found[2].tolist()))


def proportional_bounds(pipeline: ChunkedPipeline) -> NDArray[np.int64]:
    """Chunks of blocks in proportion to the speed of their stages, ``[chunks + 1]``; each has at least one."""
    costs = [slot.costs for slot in pipeline.slots]
    work = [float(each.forward_seconds.sum() + each.backward_seconds.sum()) for each in costs]
    speeds = [1.0 / max(work[stage], 1e-30) for stage in pipeline.order.stage_of_chunk]
    ideal = np.cumsum(speeds) / sum(speeds) * pipeline.blocks
    chunks = len(speeds)
    bounds = np.concatenate([[0], np.rint(ideal)]).astype(np.int64)
    for chunk in range(1, chunks):
        bounds[chunk] = min(max(bounds[chunk], bounds[chunk - 1] + 1), pipeline.blocks - (chunks - chunk))
    return bounds


def _improved(pipelines: Sequence[ChunkedPipeline], start: NDArray[np.int64]) -> _Priced:
    best = _best(pipelines, start[None])
    for _ in range(MAX_ROUNDS):
        moved = _moved(best[2])
        found = _best(pipelines, moved) if len(moved) else best
        if not found[:2] < (best[0], best[1] * (1 - ROUNDING)):
            break
        best = found
    return best


def _moved(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bounds if one block, or half of the blocks, of a chunk goes to another one, ``[moves, chunks + 1]``."""
    sizes, chunks = np.diff(bounds), len(bounds) - 1
    moved = [
        sizes + blocks * (np.arange(chunks) == taker) - blocks * (np.arange(chunks) == giver)
        for giver in np.flatnonzero(sizes > 1).tolist()
        for taker in range(chunks)
        if taker != giver
        for blocks in sorted({1, int(sizes[giver]) // 2})
    ]
    return np.pad(np.cumsum(np.array(moved, dtype=np.int64).reshape(-1, chunks), axis=1), ((0, 0), (1, 0)))


def _best(pipelines: Sequence[ChunkedPipeline], bounds: NDArray[np.int64]) -> _Priced:
    excess, seconds = _prices(pipelines, bounds)
    best = np.lexsort((seconds, excess))[0]
    return float(excess[best]), float(seconds[best]), bounds[best]


def _prices(
    pipelines: Sequence[ChunkedPipeline], bounds: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes by which memory is exceeded, and seconds of the slowest pipeline, each ``[divisions]``."""
    over = [
        pipeline.memory_bytes(bounds) - np.array([slot.memory_bytes for slot in pipeline.slots])[:, None]
        for pipeline in pipelines
    ]
    excess = np.maximum(np.max([each.max(axis=0) for each in over], axis=0), 0.0)
    return excess, np.max([pipeline.seconds(bounds) for pipeline in pipelines], axis=0)
