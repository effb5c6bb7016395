"""Event simulation of a pipeline's iteration under 1F1B, as Colossal-AI's ``OneForwardOneBackwardSchedule`` runs it.

Stage p of P first does ``w = min(P − p − 1, K)`` warm-up forwards, then one forward and one backward in turn, then w
backwards. Over the cut behind it go w forward messages, K − w exchanges (an activation one way and a gradient the other
way, in one ``batch_isend_irecv``), and w backward messages. Two models of how long a message keeps the stages waiting:

- ``blocking``: both stages wait from when the later of them is ready until the message has arrived; the two messages of
  an exchange run at the same time. NCCL behaves like this: the schedule has ``overlap_p2p=False``, each ``wait`` makes
  the compute stream wait for the transfer, and a send ends when the receiver takes it.
- ``overlapped``: the sender continues at once, and the receiver waits until the message has arrived. Gloo behaves like
  this with this package's corrections (``colossalai_support/cpu.py``), because sends are buffered.

`[Note: wavefront]`  The exchanges over cut p are numbered by the micro-batch n whose forward message they carry.
Micro-batch m goes back over cut p in exchange ``m + P − 1 − p``; numbers above K − 1 have no forward message. Exchange
n of cut p depends only on exchanges of the cuts p − 1, p and p + 1 with a smaller ``p + 2n``. So all cuts with the same
``p + 2n`` can be computed in one vector step. Their p are all even or all odd, so a step uses each stage at most once.
There are 2(P + K) steps in total.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .pipeline import Pipeline, Split, evaluate

__all__ = [
    "Event",
    "PipelineTimeline",
    "StageShare",
    "Transfers",
    "simulate",
    "simulate_times",
    "with_schedule",
]

Transfers = Literal["blocking", "overlapped"]
Kind = Literal["forward", "backward", "weight", "transfer", "update", "synchronization"]


class Event(NamedTuple):
    """One thing that a stage does without interruption."""

    kind: Kind
    """``weight``: a pass for the gradients of weights only, in schedules that have such passes."""
    micro_batch: int
    """Number of the micro-batch: of an exchange, that of the forward message; of the update, 0."""
    start: float
    """Seconds since the start of the iteration."""
    stop: float
    chunk: int = 0
    """Place of the chunk in its stage."""


class StageShare(NamedTuple):
    """Shares of the iteration that a stage spends on each activity; they sum to 1. Compute includes the update."""

    compute: float
    transfer: float
    """0 with ``overlapped`` transfers."""
    bubble: float
    """Waiting, for another stage or for a message that has not arrived."""


@dataclass(frozen=True, eq=False)
class PipelineTimeline:
    """A simulated iteration of one pipeline. Times are ``[stages]``, and of passes per micro-batch."""

    forward_seconds: NDArray[np.float64]
    backward_seconds: NDArray[np.float64]
    update_seconds: NDArray[np.float64]
    hop_seconds: NDArray[np.float64]
    """One transfer in one direction over the cut behind each stage except the last, ``[stages − 1]``."""
    micro_batches: int
    transfers: Transfers
    stage_seconds: NDArray[np.float64]
    """Time until each stage has finished its last backward and sent the gradient."""

    @property
    def seconds(self) -> float:
        """Time from the start of the iteration until all stages have finished their updates."""
        return float((self.stage_seconds + self.update_seconds).max())

    @cached_property
    def shares(self) -> tuple[StageShare, ...]:
        """Shares of each stage, ``[stages]``."""
        stages, count = len(self.forward_seconds), self.micro_batches
        compute = count * (self.forward_seconds + self.backward_seconds) + self.update_seconds
        transfer = np.zeros(stages)
        if self.transfers == "blocking":
            cut = self.hop_seconds * (count + np.minimum(stages - 1 - np.arange(stages - 1), count))
            transfer[:-1] += cut
            transfer[1:] += cut
        whole = self.seconds or 1.0
        idle = np.maximum(whole - compute - transfer, 0.0)
        return tuple(StageShare(*parts) for parts in (np.stack([compute, transfer, idle], axis=1) / whole).tolist())

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """Events of each stage in order of time: 2K events of work, and up to 2K per cut, so only computed if used."""
        by_stage: list[list[Event]] = [[] for _ in self.forward_seconds]
        _run(
            self.forward_seconds,
            self.backward_seconds,
            self.hop_seconds,
            self.micro_batches,
            self.transfers,
            by_stage,
        )
        for events, end, update in zip(by_stage, self.stage_seconds, self.update_seconds, strict=True):
            if update > 0:
                events.append(Event("update", 0, float(end), float(end + update)))
        return tuple(tuple(events) for events in by_stage)


def simulate(pipeline: Pipeline, split: Split, transfers: Transfers = "blocking") -> PipelineTimeline:
    """Simulate an iteration of ``pipeline`` with ``split``. A stage updates its parameters after its last backward."""
    cost = evaluate(pipeline, split)
    return simulate_times(
        with_schedule(cost.forward_seconds, cost.schedule_seconds),
        with_schedule(cost.backward_seconds, cost.schedule_seconds),
        cost.hop_seconds,
        pipeline.micro_batches,
        update_seconds=cost.update_seconds,
        transfers=transfers,
    )


def simulate_times(
    forward_seconds: Iterable[float],
    backward_seconds: Iterable[float],
    hop_seconds: Iterable[float],
    micro_batches: int,
    *,
    update_seconds: Iterable[float] | None = None,
    transfers: Transfers = "blocking",
) -> PipelineTimeline:
    """Simulate an iteration from the times of each stage, ``[stages]``, those of passes per micro-batch, and of one
    transfer in one direction over each cut, ``[stages − 1]``."""
    forward, backward, hops = (np.array(list(v), dtype=float) for v in (forward_seconds, backward_seconds, hop_seconds))
    update = np.zeros(len(forward)) if update_seconds is None else np.array(list(update_seconds), dtype=float)
    if micro_batches < 1:
        raise ValueError(f"{micro_batches} micro-batches: an iteration must have at least 1")
    if transfers not in ("blocking", "overlapped"):
        raise ValueError(f"unknown transfers {transfers!r}: valid are 'blocking' and 'overlapped'")
    if not len(forward) == len(backward) == len(update) == len(hops) + 1:
        raise ValueError(
            f"{len(forward)} forward, {len(backward)} backward and {len(update)} update times with {len(hops)} hops: "
            "P stages need P times of each kind and P − 1 hops"
        )
    ends = _run(forward, backward, hops, micro_batches, transfers, None)
    return PipelineTimeline(forward, backward, update, hops, micro_batches, transfers, ends)


def with_schedule(pass_seconds: Iterable[float], schedule_seconds: Iterable[float]) -> tuple[float, ...]:
    """Times of the forward or of the backward of each stage with half of the schedule's own time, ``[stages]``, because
    a stage has as many messages with its forward as with its backward."""
    return tuple(seconds + schedule / 2 for seconds, schedule in zip(pass_seconds, schedule_seconds, strict=True))


def _run(
    forward: NDArray[np.float64],
    backward: NDArray[np.float64],
    hops: NDArray[np.float64],
    count: int,
    transfers: Transfers,
    events: list[list[Event]] | None,
) -> NDArray[np.float64]:
    """Time when each stage has finished, ``[stages]``; see Note: wavefront. ``events`` gets the events of each stage.

    The arrays are shifted by one: the cut behind stage c − 1 has place c, the stage to its left too, and the stage to
    its right place c + 1. The cuts at places 0 and P are outside the pipeline and take no time: only the backwards of
    stage 0 use place 0, and only the forwards of the last stage use place P.
    """
    stages = len(forward)
    blocking = transfers == "blocking"
    left_work = np.zeros(stages + 1)
    left_work[1:] = forward
    right_work = np.zeros(stages + 1)
    right_work[:-1] = backward
    hop = np.zeros(stages + 1)
    hop[1:-1] = hops
    free = np.zeros(stages + 2)
    """Time when each stage has finished everything it has done so far."""
    forward_arrival = np.zeros(stages + 2)
    backward_arrival = np.zeros(stages + 2)
    """Time when the message arrives that each stage needs for its next forward, and for its next backward."""
    last = 2 * (count + stages - 2)
    for level in range(-1, last + 2):
        # The step computes the cuts p ≥ −1 that have an exchange n with p + 2n = level.
        first = -1 if level % 2 else 0
        top = min(stages - 1, level, last - level)
        if top < first:
            continue
        cuts = slice(first + 1, top + 2, 2)
        rights = slice(first + 2, top + 3, 2)
        p = np.arange(first, top + 1, 2)
        has_forward = p > level - 2 * count
        has_backward = p >= 2 * (stages - 1) - level
        left_start, right_start = free[cuts], free[rights]
        if not blocking:
            left_start = np.where(has_forward, np.maximum(left_start, forward_arrival[cuts]), left_start)
            right_start = np.where(has_backward, np.maximum(right_start, backward_arrival[rights]), right_start)
        left_stop = left_start + np.where(has_forward, left_work[cuts], 0.0)
        right_stop = right_start + np.where(has_backward, right_work[cuts], 0.0)
        if events is not None:
            _record_work(
                events, p, level, stages, has_forward, has_backward, left_start, left_stop, right_start, right_stop
            )
        if blocking:
            inner = (p >= 0) & (p < stages - 1) & (has_forward | has_backward)
            start = np.maximum(left_stop, right_stop)
            stop = start + hop[cuts]
            if events is not None:
                _record_transfers(events, p, level, stages, inner & (hop[cuts] > 0), has_forward, start, stop)
            free[cuts] = np.where(inner, stop, left_stop)
            free[rights] = np.where(inner, stop, right_stop)
        else:
            free[cuts], free[rights] = left_stop, right_stop
            forward_arrival[rights] = left_stop + hop[cuts]
            backward_arrival[cuts] = right_stop + hop[cuts]
    return np.array(free[1:-1])


def _record_work(
    events: list[list[Event]],
    cuts: NDArray[np.int_],
    level: int,
    stages: int,
    has_forward: NDArray[np.bool_],
    has_backward: NDArray[np.bool_],
    left_start: NDArray[np.float64],
    left_stop: NDArray[np.float64],
    right_start: NDArray[np.float64],
    right_stop: NDArray[np.float64],
) -> None:
    for i, p in enumerate(cuts.tolist()):
        number = (level - p) // 2
        if has_forward[i] and p >= 0:
            events[p].append(Event("forward", number, float(left_start[i]), float(left_stop[i])))
        if has_backward[i] and p + 1 < stages:
            back = number - (stages - 1 - p)
            events[p + 1].append(Event("backward", back, float(right_start[i]), float(right_stop[i])))


def _record_transfers(
    events: list[list[Event]],
    cuts: NDArray[np.int_],
    level: int,
    stages: int,
    takes_time: NDArray[np.bool_],
    has_forward: NDArray[np.bool_],
    start: NDArray[np.float64],
    stop: NDArray[np.float64],
) -> None:
    for i in np.flatnonzero(takes_time).tolist():
        p = int(cuts[i])
        number = (level - p) // 2
        micro_batch = number if has_forward[i] else number - (stages - 1 - p)
        event = Event("transfer", micro_batch, float(start[i]), float(stop[i]))
        events[p].append(event)
        events[p + 1].append(event)
