"""Event simulation of a pipeline's iteration under 1F1B, as Colossal-AI's ``OneForwardOneBackwardSchedule`` runs it.

Stage p of P does ``w = min(P − p − 1, K)`` warm-up forwards, then one forward and one backward in turn, then ``w``
backwards. Over the cut behind it go, in this order: w forward messages, K − w exchanges (an activation one way and a
gradient the other, in one ``batch_isend_irecv``), w backward messages. Two ways that a message can take its time:

``blocking``
    Both ends stand still from when the later of them is ready until the message is over; the two messages of an
    exchange run at the same time. So it is with NCCL: the schedule has ``overlap_p2p=False``, each ``wait`` makes the
    compute stream wait for the transfer, and a send ends when the receiver takes it.
``overlapped``
    The sender goes on at once, the receiver waits until the message is there: with Gloo as this package mends it
    (``cpu/point_to_point.py``), where sends are buffered.

`[Note: wavefront]`  Number the exchanges of cut p by the micro-batch n that goes forward in it; micro-batch m goes
back in number ``m + P − 1 − p`` (beyond K − 1 where no forward is left). Exchange n of cut p needs only exchanges of
the cuts p − 1, p and p + 1 with a smaller ``p + 2n``. So all cuts with the same ``p + 2n`` are done in one vector step,
which touches each stage at most once, as their p are of one parity: 2(P + K) steps in all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .pipeline import Pipeline, PipelineCost, Split, evaluate

__all__ = ["Event", "PipelineTimeline", "StageShare", "Transfers", "simulate", "simulate_times"]

Transfers = Literal["blocking", "overlapped"]
Kind = Literal["forward", "backward", "transfer", "update"]


class Event(NamedTuple):
    """What a stage does for a while."""

    kind: Kind
    micro_batch: int
    """Of a transfer both ways: the one that goes forward. 0 for the update."""
    start: float
    stop: float


class StageShare(NamedTuple):
    """How a stage spends the iteration; the shares sum to 1."""

    compute: float
    """Forward, backward and update."""
    transfer: float
    bubble: float
    """Waiting for another stage, or for messages on their way."""


@dataclass(frozen=True, eq=False)
class PipelineTimeline:
    """An iteration of one pipeline, in seconds from its start."""

    forward_seconds: NDArray[np.float64]
    """Per stage and micro-batch ``[stages]``, as the next two."""
    backward_seconds: NDArray[np.float64]
    update_seconds: NDArray[np.float64]
    hop_seconds: NDArray[np.float64]
    """One way over the cut behind each stage but the last ``[stages − 1]``."""
    micro_batches: int
    transfers: Transfers
    stage_seconds: NDArray[np.float64]
    """When each stage has done its last backward and sent its gradient on ``[stages]``."""

    @property
    def seconds(self) -> float:
        """When the last stage has done its update."""
        return float((self.stage_seconds + self.update_seconds).max())

    @cached_property
    def shares(self) -> tuple[StageShare, ...]:
        """By stage."""
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
        """By stage, in order of time. Made on demand: it holds 2K events per stage, and K per cut."""
        made: list[list[Event]] = [[] for _ in self.forward_seconds]
        _run(
            self.forward_seconds,
            self.backward_seconds,
            self.hop_seconds,
            self.micro_batches,
            self.transfers,
            made,
        )
        for events, end, update in zip(made, self.stage_seconds, self.update_seconds, strict=True):
            if update > 0:
                events.append(Event("update", 0, float(end), float(end + update)))
        return tuple(tuple(events) for events in made)


def simulate(pipeline: Pipeline, split: Split, transfers: Transfers = "blocking") -> PipelineTimeline:
    """The iteration of ``pipeline`` if it is divided so. A stage updates its parameters after its last backward.

    Raises:
        ValueError: fewer than one micro-batch, or an unknown way of transfers.
    """
    return _of_cost(evaluate(pipeline, split), pipeline.micro_batches, transfers)


def simulate_times(
    forward_seconds: Iterable[float],
    backward_seconds: Iterable[float],
    hop_seconds: Iterable[float],
    micro_batches: int,
    *,
    update_seconds: Iterable[float] | None = None,
    transfers: Transfers = "blocking",
) -> PipelineTimeline:
    """Same, from times: per stage and micro-batch, and one way over each cut (one fewer).

    Raises:
        ValueError: fewer than one micro-batch, lengths that do not belong together, or an unknown way of transfers.
    """
    forward, backward, hops = (np.array(list(v), dtype=float) for v in (forward_seconds, backward_seconds, hop_seconds))
    update = np.zeros(len(forward)) if update_seconds is None else np.array(list(update_seconds), dtype=float)
    if micro_batches < 1:
        raise ValueError(f"{micro_batches} micro-batches: an iteration has at least 1")
    if transfers not in ("blocking", "overlapped"):
        raise ValueError(f"transfers {transfers!r}: valid are 'blocking' and 'overlapped'")
    if not len(forward) == len(backward) == len(update) == len(hops) + 1:
        raise ValueError(
            f"{len(forward)} forward, {len(backward)} backward and {len(update)} update times with {len(hops)} hops: "
            "P stages have P of each and P − 1 hops"
        )
    ends = _run(forward, backward, hops, micro_batches, transfers, None)
    return PipelineTimeline(forward, backward, update, hops, micro_batches, transfers, ends)


def _of_cost(cost: PipelineCost, micro_batches: int, transfers: Transfers) -> PipelineTimeline:
    return simulate_times(
        cost.forward_seconds,
        cost.backward_seconds,
        cost.hop_seconds,
        micro_batches,
        update_seconds=cost.update_seconds,
        transfers=transfers,
    )


def _run(
    forward: NDArray[np.float64],
    backward: NDArray[np.float64],
    hops: NDArray[np.float64],
    count: int,
    transfers: Transfers,
    made: list[list[Event]] | None,
) -> NDArray[np.float64]:
    """When each stage is done ``[stages]``; see Note: wavefront. Appends events to ``made``, if given.

    The arrays are shifted by one: place c is the cut behind stage c − 1, so its left stage has place c and its right
    one c + 1. Cuts 0 and P lie outside: only stage 0's backward goes "over" the former, and only the last stage's
    forward over the latter, both in no time.
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
    """When each stage is done with what it did so far."""
    came_forward = np.zeros(stages + 2)
    came_back = np.zeros(stages + 2)
    """When the message is there that each stage needs for its next forward, and its next backward."""
    last = 2 * (count + stages - 2)
    for level in range(-1, last + 2):
        # Cuts p of this level's parity, from −1 on, whose exchange number n = (level − p) / 2 is one of theirs.
        first = -1 if level % 2 else 0
        top = min(stages - 1, level, last - level)
        if top < first:
            continue
        cuts = slice(first + 1, top + 2, 2)
        rights = slice(first + 2, top + 3, 2)
        p = np.arange(first, top + 1, 2)
        goes = p > level - 2 * count
        comes = p >= 2 * (stages - 1) - level
        left_start, right_start = free[cuts], free[rights]
        if not blocking:
            left_start = np.where(goes, np.maximum(left_start, came_forward[cuts]), left_start)
            right_start = np.where(comes, np.maximum(right_start, came_back[rights]), right_start)
        left_stop = left_start + np.where(goes, left_work[cuts], 0.0)
        right_stop = right_start + np.where(comes, right_work[cuts], 0.0)
        if made is not None:
            _note_work(made, p, level, stages, goes, comes, left_start, left_stop, right_start, right_stop)
        if blocking:
            inner = (p >= 0) & (p < stages - 1) & (goes | comes)
            start = np.maximum(left_stop, right_stop)
            stop = start + hop[cuts]
            if made is not None:
                _note_transfers(made, p, level, stages, inner & (hop[cuts] > 0), goes, start, stop)
            free[cuts] = np.where(inner, stop, left_stop)
            free[rights] = np.where(inner, stop, right_stop)
        else:
            free[cuts], free[rights] = left_stop, right_stop
            came_forward[rights] = left_stop + hop[cuts]
            came_back[cuts] = right_stop + hop[cuts]
    return np.array(free[1:-1])


def _note_work(
    made: list[list[Event]],
    cuts: NDArray[np.int_],
    level: int,
    stages: int,
    goes: NDArray[np.bool_],
    comes: NDArray[np.bool_],
    left_start: NDArray[np.float64],
    left_stop: NDArray[np.float64],
    right_start: NDArray[np.float64],
    right_stop: NDArray[np.float64],
) -> None:
    for i, p in enumerate(cuts.tolist()):
        number = (level - p) // 2
        if goes[i] and p >= 0:
            made[p].append(Event("forward", number, float(left_start[i]), float(left_stop[i])))
        if comes[i] and p + 1 < stages:
            back = number - (stages - 1 - p)
            made[p + 1].append(Event("backward", back, float(right_start[i]), float(right_stop[i])))


def _note_transfers(
    made: list[list[Event]],
    cuts: NDArray[np.int_],
    level: int,
    stages: int,
    takes_time: NDArray[np.bool_],
    goes: NDArray[np.bool_],
    start: NDArray[np.float64],
    stop: NDArray[np.float64],
) -> None:
    for i in np.flatnonzero(takes_time).tolist():
        p = int(cuts[i])
        number = (level - p) // 2
        event = Event("transfer", number if goes[i] else number - (stages - 1 - p), float(start[i]), float(stop[i]))
        made[p].append(event)
        made[p + 1].append(event)
