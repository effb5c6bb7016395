"""Event simulation of an iteration in which every stage runs a given list of passes.

A stage runs its passes one after the other. A pass starts when the stage is free and what it needs has arrived.
Messages are sent while stages compute, as in Colossal-AI's interleaved and zero-bubble schedules: the sender goes on at
once, and the receiver waits until the message is there. Messages from one stage to another go one after the other; the
other direction is a channel of its own.

All times can be given for several divisions of the model at once, ``[chunks, divisions]``: the order of the passes is
the same, so they are simulated together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..stages.event_simulation import Event, StageShare
from .pass_order import Pass, PassOrder

__all__ = ["WEIGHT_SHARE", "ChunkTimes", "PassTimeline", "simulate_passes"]

WEIGHT_SHARE = 0.5
"""Share of a backward pass that computes the gradients of weights, where they have passes of their own: a matrix
product has two gradients of equal cost (Qi et al., Zero Bubble Pipeline Parallelism, 2024). It is not measured."""


@dataclass(frozen=True, eq=False)
class ChunkTimes:
    """Times per micro-batch of each chunk, in the order of the model, ``[chunks]`` or ``[chunks, divisions]``."""

    forward_seconds: NDArray[np.float64]
    backward_seconds: NDArray[np.float64]
    """Whole backward pass, with the gradients of the weights."""
    schedule_seconds: NDArray[np.float64]
    """What the schedule itself takes, half with the forward and half with the backward."""
    hop_seconds: NDArray[np.float64]
    """Of a message over the cut behind the chunk, one way; 0 behind the last one, and inside a stage."""
    update_seconds: NDArray[np.float64]
    """Optimizer step of each stage, ``[stages]`` or ``[stages, divisions]``."""


@dataclass(frozen=True, eq=False)
class PassTimeline:
    """A simulated iteration of one pipeline."""

    order: PassOrder
    times: ChunkTimes
    """``[chunks]``."""
    stage_seconds: NDArray[np.float64]
    """Time from the start of the iteration until each stage has finished its last pass, ``[stages]``."""

    @property
    def seconds(self) -> float:
        """Time from the start of the iteration until all stages have finished their updates."""
        return float((self.stage_seconds + self.times.update_seconds).max())

    @cached_property
    def shares(self) -> tuple[StageShare, ...]:
        """How each stage spends the iteration, ``[stages]``. Messages do not occupy it."""
        whole = self.seconds or 1.0
        compute = [sum(event.stop - event.start for event in events) / whole for events in self.events]
        return tuple(StageShare(share, 0.0, max(1.0 - share, 0.0)) for share in compute)

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """Events of each stage in order of time."""
        by_stage: list[list[Event]] = [[] for _ in range(self.order.stages)]

        def record(each: Pass, start: NDArray[np.float64], stop: NDArray[np.float64]) -> None:
            stage = self.order.stage_of_chunk[each.chunk]
            place = self.order.stage_of_chunk[: each.chunk].count(stage)
            by_stage[stage].append(Event(each.kind, each.micro_batch, float(start[0]), float(stop[0]), place))

        _run(self.order, self.times, record)
        for events, end, update in zip(by_stage, self.stage_seconds, self.times.update_seconds, strict=True):
            if update > 0:
                events.append(Event("update", 0, float(end), float(end + update)))
        return tuple(tuple(events) for events in by_stage)


def simulate_passes(order: PassOrder, times: ChunkTimes) -> NDArray[np.float64]:
    """When each stage has finished its last pass, in seconds: ``[stages]``, or ``[stages, divisions]``.

    Raises:
        ValueError: The order cannot be run.
    """
    ends = _run(order, times)
    return ends if times.forward_seconds.ndim == 2 else ends[:, 0]


def _run(
    order: PassOrder,
    times: ChunkTimes,
    record: Callable[[Pass, NDArray[np.float64], NDArray[np.float64]], None] | None = None,
) -> NDArray[np.float64]:
    """``[stages, divisions]``; ``record`` is called with the start and the stop of every pass, each ``[divisions]``."""

    def columns(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(values.reshape(len(values), -1))

    weight = columns(times.backward_seconds) * (WEIGHT_SHARE if order.splits_backward else 0.0)
    schedule = columns(times.schedule_seconds) / 2
    duration = {
        "forward": columns(times.forward_seconds) + schedule,
        "backward": columns(times.backward_seconds) - weight + schedule,
        "weight": weight,
    }
    hops, stage_of, last = columns(times.hop_seconds), order.stage_of_chunk, order.chunks - 1
    zero = np.zeros(weight.shape[1])
    free = [zero] * order.stages
    channel_free: dict[tuple[int, int], NDArray[np.float64]] = {}
    arrival: dict[Pass, NDArray[np.float64]] = {}
    for each in order.sequence:
        kind, chunk, _ = each
        stage = stage_of[chunk]
        start = free[stage]
        if each in arrival:
            start = np.maximum(start, arrival.pop(each))
        stop = start + duration[kind][chunk]
        free[stage] = stop
        if record is not None:
            record(each, start, stop)
        step = {"forward": 1, "backward": -1, "weight": 0}[kind]
        if step == 0 or not 0 <= chunk + step <= last:
            continue
        to = stage_of[chunk + step]
        if to != stage:
            begin = np.maximum(stop, channel_free.get((stage, to), zero))
            stop = begin + hops[min(chunk, chunk + step)]
            channel_free[stage, to] = stop
        arrival[each._replace(chunk=chunk + step)] = stop
    return np.array(free)
