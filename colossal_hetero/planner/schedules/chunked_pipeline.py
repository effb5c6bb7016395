"""Time and memory of a pipeline whose stages hold chunks of the model, for any division of the blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel
from ..stages.pipeline import Slot
from .in_flight import most_in_flight
from .pass_order import PassOrder
from .pass_simulation import ChunkTimes, simulate_passes

__all__ = ["ChunkedPipeline"]


@dataclass(frozen=True, eq=False)
class ChunkedPipeline:
    """Stages in given slots, and the passes that they run.

    The blocks are divided into chunks by bounds, ``[divisions, chunks + 1]``: chunk c has the blocks
    ``[bounds[c], bounds[c + 1])``, at least one.
    """

    slots: tuple[Slot, ...]
    """By stage."""
    hops: tuple[Channel | None, ...]
    """The channel over the cut behind each chunk except the last; None inside a stage."""
    order: PassOrder

    @property
    def blocks(self) -> int:
        """Number of blocks of the model."""
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
        """By how much the fullest device exceeds its memory, ``[divisions]``; 0 if everything fits."""
        available = np.array([slot.memory_bytes for slot in self.slots])
        return np.asarray(np.maximum(self.memory_bytes(bounds) - available[:, None], 0.0).max(axis=0))
