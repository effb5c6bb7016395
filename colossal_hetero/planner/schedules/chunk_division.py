"""Divides the blocks of a model over the chunks of pipelines that are alike, for the shortest simulated iteration.

All divisions are compared if there are few. Otherwise the search starts from several proportional divisions and moves
blocks from one chunk to another, which shifts the chunks between them, as long as that makes the iteration shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..stages.all_cuts import all_bounds
from .chunked_pipeline import ChunkedPipeline

__all__ = ["ChunkDivision", "divide_blocks", "proportional_bounds", "uniform_chunks"]

MAX_COMPARED = 1_500
"""If there are more divisions, they are not all compared."""
MAX_ROUNDS = 200
"""Moves of blocks, from each start."""
MAX_PAIRS_OF_MOVES = 4_000
"""If no move helps, pairs of moves are tried, unless there are more of them."""
ROUNDING = 1e-12


@dataclass(frozen=True)
class ChunkDivision:
    """The blocks of each chunk, and what that takes."""

    bounds: tuple[int, ...]
    """``[chunks + 1]``."""
    seconds: float
    """Of the slowest pipeline."""


def divide_blocks(pipelines: Sequence[ChunkedPipeline], max_compared: int = MAX_COMPARED) -> ChunkDivision | None:
    """The best division of the blocks that is found; None if none fits in memory, or there are too few blocks.

    Args:
        pipelines: Pipelines that run the same passes in the same order. Each is cut in the same way.
        max_compared: Up to so many divisions are all compared.
    """
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
