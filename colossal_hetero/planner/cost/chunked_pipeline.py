"""Time and memory of a pipeline whose stages hold chunks of the model, for any division of the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel
from ..stages.fixed_order import all_bounds
from ..stages.pipeline import Slot
from .pass_order import ChunkTimes, PassOrder, simulate_passes

__all__ = [
    "ChunkDivision",
    "ChunkedPipeline",
    "divide_blocks",
    "most_in_flight",
    "proportional_bounds",
    "uniform_chunks",
]


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
    hops: tuple[Channel | None, ...]
    """The channel over the cut behind each chunk except the last; None inside a stage."""
    order: PassOrder

    @property
    def blocks(self) -> int:
        return len(self.slots[0].costs.forward_seconds)

    def times(self, bounds: NDArray[np.int64]) -> ChunkTimes:
        """Times of the chunks, ``[chunks, divisions]``."""
        stage_of, divisions = self.order.stage_of_chunk, len(bounds)
        forward, backward, schedule, hops = (np.zeros((len(stage_of), divisions)) for _ in range(4))
        update = np.zeros((len(self.slots), divisions))
        for chunk, stage in enumerate(stage_of):
            costs = self.slots[stage].costs
            start, stop = bounds[:, chunk], bounds[:, chunk + 1]
            forward[chunk] = costs.cumulative.forward_seconds[stop] - costs.cumulative.forward_seconds[start]
            backward[chunk] = costs.cumulative.backward_seconds[stop] - costs.cumulative.backward_seconds[start]
            update[stage] += costs.cumulative.update_seconds[stop] - costs.cumulative.update_seconds[start]
            neighbors = stage_of[max(chunk - 1, 0) : chunk] + stage_of[chunk + 1 : chunk + 2]
            schedule[chunk] = costs.schedule_seconds * sum(other != stage for other in neighbors)
            channel = self.hops[chunk] if chunk < len(self.hops) else None
            if channel is not None:
                hops[chunk] = costs.hop_seconds(channel)[stop]
        return ChunkTimes(forward, backward, schedule, hops, update)

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

    def excess_bytes(self, bounds: NDArray[np.int64]) -> NDArray[np.float64]:
        """Bytes by which the fullest device exceeds its memory, ``[divisions]``; 0 if everything fits."""
        available = np.array([slot.memory_bytes for slot in self.slots])
        return np.asarray(np.maximum(self.memory_bytes(bounds) - available[:, None], 0.0).max(axis=0))


# Chunk division ------------------------------------------------------------------------------------------------------
# Divisions of the blocks over pipelines that are alike. If there are few, all are compared. Otherwise blocks are moved
# from chunk to chunk, from several proportional divisions on, as long as that makes the simulated iteration shorter.


MAX_COMPARED = 1_500
"""Largest number of divisions that are all compared."""
MAX_ROUNDS = 200
"""Moves of blocks from each start."""
MAX_PAIRS_OF_MOVES = 4_000
"""Largest number of pairs of moves that are tried where no single move helps."""
ROUNDING = 1e-12


@dataclass(frozen=True)
class ChunkDivision:
    """Blocks of each chunk, as bounds ``[chunks + 1]``, and seconds of the slowest pipeline."""

    bounds: tuple[int, ...]
    seconds: float


def divide_blocks(pipelines: Sequence[ChunkedPipeline], max_compared: int = MAX_COMPARED) -> ChunkDivision | None:
    """The best division of the blocks that is found; None if none fits in memory, or there are too few blocks."""
    first = pipelines[0]
    chunks = first.order.chunks
    if first.blocks < chunks:
        return None
    every = all_bounds(first.blocks, chunks)
    if every is not None and len(every) <= max_compared:
        return _best(pipelines, every)
    starts = [proportional_bounds(pipeline) for pipeline in pipelines]
    starts.append(np.asarray(uniform_chunks(first.blocks, chunks)))
    found = [_improved(pipelines, start) for start in np.unique(starts, axis=0)]
    return min((each for each in found if each is not None), key=lambda each: each.seconds, default=None)


def proportional_bounds(pipeline: ChunkedPipeline) -> NDArray[np.int64]:
    """Chunks of blocks in proportion to the speed of their stages, ``[chunks + 1]``; each has at least one."""
    speeds = [1.0 / max(_work(pipeline, stage), 1e-30) for stage in pipeline.order.stage_of_chunk]
    ideal = np.cumsum(speeds) / sum(speeds) * pipeline.blocks
    chunks = len(speeds)
    bounds = np.concatenate([[0], np.rint(ideal)]).astype(np.int64)
    for chunk in range(1, chunks):
        bounds[chunk] = min(max(bounds[chunk], bounds[chunk - 1] + 1), pipeline.blocks - (chunks - chunk))
    return bounds


def uniform_chunks(blocks: int, chunks: int) -> tuple[int, ...]:
    """Bounds of chunks that differ by at most one block, as Colossal-AI's ``distribute_layers`` cuts."""
    size, left = divmod(blocks, chunks)
    first = chunks // 2 - left // 2
    sizes = [size + (first <= chunk < first + left) for chunk in range(chunks)]
    return (0, *(int(bound) for bound in np.cumsum(sizes)))


def _work(pipeline: ChunkedPipeline, stage: int) -> float:
    costs = pipeline.slots[stage].costs
    return float(costs.forward_seconds.sum() + costs.backward_seconds.sum())


def _improved(pipelines: Sequence[ChunkedPipeline], start: NDArray[np.int64]) -> ChunkDivision | None:
    sizes = np.diff(start)
    excess, seconds = (float(each[0]) for each in _prices(pipelines, start[None]))
    for _ in range(MAX_ROUNDS):
        moved = _moved(sizes)
        found = _better(pipelines, moved, excess, seconds)
        if found is None and 0 < len(moved) ** 2 <= MAX_PAIRS_OF_MOVES:
            found = _better(pipelines, np.concatenate([_moved(each) for each in moved]), excess, seconds)
        if found is None:
            break
        sizes, excess, seconds = found
    return ChunkDivision((0, *np.cumsum(sizes).tolist()), seconds) if excess == 0 else None


def _better(
    pipelines: Sequence[ChunkedPipeline], sizes: NDArray[np.int64], excess: float, seconds: float
) -> tuple[NDArray[np.int64], float, float] | None:
    """The best of these ``sizes`` ``[divisions, chunks]``, with its excess bytes and seconds, if it is better."""
    if not len(sizes):
        return None
    over, took = _prices(pipelines, np.pad(np.cumsum(sizes, axis=1), ((0, 0), (1, 0))))
    best = np.lexsort((took, over))[0]
    if (over[best], took[best]) < (excess, seconds * (1 - ROUNDING)):
        return sizes[best], float(over[best]), float(took[best])
    return None


def _moved(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sizes of chunks if one block, or half of the blocks, of a chunk goes to another one, ``[moves, chunks]``."""
    chunks = len(sizes)
    moved = [
        sizes + blocks * (np.arange(chunks) == taker) - blocks * (np.arange(chunks) == giver)
        for giver in np.flatnonzero(sizes > 1).tolist()
        for taker in range(chunks)
        if taker != giver
        for blocks in sorted({1, int(sizes[giver]) // 2})
    ]
    return np.array(moved, dtype=np.int64).reshape(-1, chunks)


def _best(pipelines: Sequence[ChunkedPipeline], bounds: NDArray[np.int64]) -> ChunkDivision | None:
    excess, seconds = _prices(pipelines, bounds)
    fits = np.flatnonzero(excess == 0)
    if not len(fits):
        return None
    best = fits[seconds[fits].argmin()]
    return ChunkDivision(tuple(bounds[best].tolist()), float(seconds[best]))


def _prices(
    pipelines: Sequence[ChunkedPipeline], bounds: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes by which memory is exceeded, and seconds of the slowest pipeline, each ``[divisions]``."""
    excess = np.max([pipeline.excess_bytes(bounds) for pipeline in pipelines], axis=0)
    return excess, np.max([pipeline.seconds(bounds) for pipeline in pipelines], axis=0)
