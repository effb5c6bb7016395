"""Event simulation of an iteration in which every stage runs a given list of passes.

A stage runs its passes one after the other. A pass starts when the stage is free and what it needs has arrived.
Messages are sent while stages compute, as in Colossal-AI's interleaved and zero-bubble schedules: the sender goes on at
once, and the receiver waits until the message is there. Messages from one stage to another go one after the other; the
other direction is a channel of its own. There are two models of when a message leaves:

``blocking``
    When the receiver has asked for it, as with NCCL. The interleaved schedule asks for the input of a forward when the
    forward before it has ended, and so for backwards; the zero-bubble schedule asks early.
``overlapped``
    At once, as with Gloo and this package's corrections, because sends are buffered.

All times can be given for several divisions of the model at once, ``[chunks, divisions]``: the order of the passes is
the same, so they are simulated together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..stages.event_simulation import Event, StageShare, Transfers
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
    transfers: Transfers
    """Model of when messages leave."""
    stage_seconds: NDArray[np.float64]
    """Time from the start of the iteration until each stage has finished its last pass, ``[stages]``."""

    @classmethod
    def of(cls, order: PassOrder, times: ChunkTimes, transfers: Transfers = "blocking") -> PassTimeline:
        """The simulated iteration.

        Raises:
            ValueError: The order cannot be run.
        """
        return cls(order, times, transfers, simulate_passes(order, times, transfers))

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

        _run(self.order, self.times, self.transfers, record)
        for events, end, update in zip(by_stage, self.stage_seconds, self.times.update_seconds, strict=True):
            if update > 0:
                events.append(Event("update", 0, float(end), float(end + update)))
        return tuple(tuple(events) for events in by_stage)


def simulate_passes(order: PassOrder, times: ChunkTimes, transfers: Transfers = "blocking") -> NDArray[np.float64]:
    """When each stage has finished its last pass, in seconds: ``[stages]``, or ``[stages, divisions]``.

    Raises:
        ValueError: The order cannot be run.
    """
    ends = _run(order, times, transfers)
    return ends if times.forward_seconds.ndim == 2 else ends[:, 0]


def _run(
    order: PassOrder,
    times: ChunkTimes,
    transfers: Transfers,
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
    asked: dict[tuple[int, str], NDArray[np.float64]] = {}
    channel_free: dict[tuple[int, int], NDArray[np.float64]] = {}
    inputs: dict[Pass, NDArray[np.float64]] = {}
    """By pass: when its input has arrived, or when it was ready if it is still to be sent."""
    waits = transfers == "blocking" and order.receives_late

    def arrival(ready: NDArray[np.float64], chunk: int, to_chunk: int) -> NDArray[np.float64]:
        channel = stage_of[chunk], stage_of[to_chunk]
        if channel[0] == channel[1]:
            return ready
        begin = np.maximum(ready, channel_free.get(channel, zero))
        channel_free[channel] = begin + hops[min(chunk, to_chunk)]
        return channel_free[channel]

    for each in order.sequence:
        kind, chunk, _ = each
        stage, step = stage_of[chunk], {"forward": 1, "backward": -1, "weight": 0}[kind]
        start = free[stage]
        if each in inputs:
            there = inputs.pop(each)
            if waits:
                there = arrival(np.maximum(there, asked.get((stage, kind), zero)), chunk - step, chunk)
            start = np.maximum(start, there)
        stop = start + duration[kind][chunk]
        free[stage] = asked[stage, kind] = stop
        if record is not None:
            record(each, start, stop)
        if step and 0 <= chunk + step <= last:
            inputs[each._replace(chunk=chunk + step)] = stop if waits else arrival(stop, chunk, chunk + step)
    return np.array(free)
