"""Event simulation of an iteration of a plan, as planned or with ranks that became slow.

A pass starts when its stage is free and its input has arrived. There are two models of messages between stages:

- ``blocking``, as with NCCL. 1F1B has ``overlap_p2p=False``, each ``wait`` makes the compute stream wait for the
  transfer, and a send ends when the receiver takes it: both stages of an exchange wait from when the later of them is
  ready until the messages have arrived. In the other schedules messages are sent while stages compute, those from one
  stage to another one after the other. The interleaved schedule asks for the input of a forward when the forward before
  it has ended, and so for backwards, and the message leaves then; the zero-bubble schedule asks early.
- ``overlapped``, as with Gloo and this package's corrections (``colossalai_support/cpu.py``), because sends are
  buffered: messages leave at once, the sender continues, and the receiver waits until the message has arrived.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...common.text import spans
from .pass_order import Pass, PassOrder, chunked_order, one_forward_one_backward
from .plan import Plan, Replica

Transfers = Literal["blocking", "overlapped"]

WEIGHT_SHARE = 0.5
"""Share of a backward pass that computes the gradients of weights, where they have passes of their own: a matrix
product has two gradients of equal cost (Qi et al., Zero Bubble Pipeline Parallelism, 2024). It is not measured."""

MAX_PASSES = 200_000
"""Maximum number of passes of a pipeline whose stages hold several chunks, of which the search simulates many."""
MAX_PASSES_1F1B = 1_000_000
"""Maximum number of passes of a 1F1B pipeline: simulating them takes about 15 seconds on one core, and 0.5 GB."""


@dataclass(frozen=True, eq=False)
class ChunkTimes:
    """Times of the chunks per micro-batch, ``[chunks]``, or ``[chunks, divisions]`` to simulate divisions together."""

    forward_seconds: NDArray[np.float64]
    backward_seconds: NDArray[np.float64]
    hop_seconds: NDArray[np.float64]
    """Message over the cut behind the chunk, one way; 0 behind the last one, and inside a stage."""
    update_seconds: NDArray[np.float64]  # optimizer step of each stage, ``[stages]`` or ``[stages, divisions]``


class Event(NamedTuple):
    """One thing that a stage does without interruption."""

    kind: Literal["forward", "backward", "weight", "transfer", "update", "synchronization"]
    micro_batch: int  # number of the micro-batch, or of the transfer; of the update, 0
    start: float
    stop: float
    chunk: int = 0


class StageShare(NamedTuple):
    """Shares of the iteration that a stage spends on each activity; they sum to 1. Compute includes the update."""

    compute: float
    transfer: float  # 0 if messages are sent while stages compute: they do not occupy a stage
    bubble: float  # waiting, for another stage or for a message that has not arrived


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated iteration of one pipeline; ``times`` are ``[chunks]``."""

    order: PassOrder
    times: ChunkTimes
    transfers: Transfers = "blocking"

    @cached_property
    def stage_seconds(self) -> NDArray[np.float64]:
        """Time until each stage has finished its last pass and transfer, ``[stages]``."""
        return simulate_passes(self.order, self.times, self.transfers)

    @property
    def seconds(self) -> float:
        return float((self.stage_seconds + self.times.update_seconds).max())

    @cached_property
    def shares(self) -> tuple[StageShare, ...]:
        whole, shares = self.seconds or 1.0, []
        for events in self.events:
            compute, transfer = (
                sum(event.stop - event.start for event in events if (event.kind == "transfer") == is_transfer) / whole
                for is_transfer in (False, True)
            )
            shares.append(StageShare(compute, transfer, max(1.0 - compute - transfer, 0.0)))
        return tuple(shares)

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """Events of each stage in order of time, without transfers that take no time."""
        stage_of = self.order.stage_of_chunk
        by_stage: list[list[Event]] = [[] for _ in range(self.order.stages)]

        def record(each: Pass, start: float, stop: float) -> None:
            kind, chunk, number = each
            if kind != "transfer":
                place = stage_of[:chunk].count(stage_of[chunk])
                by_stage[stage_of[chunk]].append(Event(kind, number, start, stop, place))
            elif stop > start:
                for stage in stage_of[chunk : chunk + 2]:
                    by_stage[stage].append(Event(kind, number, start, stop))

        simulate_passes(self.order, self.times, self.transfers, record)
        ends = zip(by_stage, self.stage_seconds.tolist(), self.times.update_seconds.tolist(), strict=True)
        for events, end, update in ends:
            if update > 0:
                events.append(Event("update", 0, end, end + update))
        return tuple(map(tuple, by_stage))


def simulate_passes(
    order: PassOrder,
    times: ChunkTimes,
    transfers: Transfers = "blocking",
    record: Callable[[Pass, float, float], None] | None = None,
) -> NDArray[np.float64]:
    """Seconds until each stage has finished its last pass, ``[stages]`` or ``[stages, divisions]``. ``record`` gets the
    start and the stop of every pass and transfer."""
    # A time is a number, or one of each division.
    is_number = times.forward_seconds.ndim == 1
    later: Callable[[Any, Any], Any] = max if is_number else np.maximum
    zero: Any = 0.0 if is_number else np.zeros(times.forward_seconds.shape[1])

    def by_chunk(values: NDArray[np.float64]) -> list[Any]:
        return values.tolist() if is_number else list(values)

    weight = times.backward_seconds * (WEIGHT_SHARE if order.splits_backward else 0.0)
    duration = {
        "forward": by_chunk(times.forward_seconds),
        "backward": by_chunk(times.backward_seconds - weight),
        "weight": by_chunk(weight),
    }
    steps = {"forward": 1, "backward": -1, "weight": 0, "transfer": 0}
    hops, stage_of, last = by_chunk(times.hop_seconds), order.stage_of_chunk, order.chunks - 1
    free = [zero] * order.stages
    asked: dict[tuple[int, str], Any] = {}
    channel_free: dict[tuple[int, int], Any] = {}
    inputs: dict[Pass, Any] = {}  # time when the input of each pass has arrived, or was ready if it is still to be sent
    waits = transfers == "blocking" and order.receives_late
    both_wait = transfers == "blocking" and order.exchanges

    def arrival(ready: Any, chunk: int, to_chunk: int) -> Any:
        channel = stage_of[chunk], stage_of[to_chunk]
        if channel[0] == channel[1]:
            return ready
        hop = hops[min(chunk, to_chunk)]
        if order.exchanges:
            return ready + hop
        channel_free[channel] = later(ready, channel_free.get(channel, zero)) + hop
        return channel_free[channel]

    for each in order.sequence:
        kind, chunk, number = each
        stage, step = stage_of[chunk], steps[kind]
        start = free[stage]
        if kind == "transfer":
            if both_wait:
                other = stage_of[chunk + 1]
                start = later(start, free[other])
                free[stage] = free[other] = stop = start + hops[chunk]
                if record is not None:
                    record(each, start, stop)
            continue
        if each in inputs:
            there = inputs.pop(each)
            if waits:
                there = arrival(later(there, asked.get((stage, kind), zero)), chunk - step, chunk)
            start = later(start, there)
        free[stage] = asked[stage, kind] = stop = start + duration[kind][chunk]
        if record is not None:
            record(each, start, stop)
        # A transfer for which both stages wait ends before the pass that needs its message.
        if step and 0 <= chunk + step <= last and not both_wait:
            inputs[Pass(kind, chunk + step, number)] = stop if waits else arrival(stop, chunk, chunk + step)
    return np.array(free)


@dataclass(frozen=True, eq=False)
class PlanSimulation:
    plan: Plan  # the plan with the simulated stage times, to compare its prediction with the simulation
    timelines: tuple[Timeline, ...]
    slow: Mapping[int, float] = field(default_factory=dict)  # factor by which the work of each slow rank takes longer

    @cached_property
    def seconds(self) -> float:
        """Time of the iteration: the replicas wait for the slowest of them and then sum their gradients."""
        return max(timeline.seconds for timeline in self.timelines) + self.plan.synchronization_seconds


def simulate_plan(
    plan: Plan, slow: Mapping[int, float] | None = None, transfers: Transfers = "blocking"
) -> PlanSimulation:
    plan = slowed(plan, slow or {})
    known: dict[object, Timeline] = {}
    timelines = []
    for replica in plan.replicas:
        key = replica.micro_batches, _times(replica)
        if key not in known:
            known[key] = _timeline(plan, replica, transfers)
        timelines.append(known[key])
    return PlanSimulation(plan, tuple(timelines), dict(slow or {}))


def _timeline(plan: Plan, replica: Replica, transfers: Transfers = "blocking") -> Timeline:
    return Timeline(order_of(plan, replica), ChunkTimes(*map(np.array, _times(replica))), transfers)


def _times(replica: Replica) -> tuple[tuple[float, ...], ...]:
    """The values of :class:`ChunkTimes`; without chunks, those of the stages."""
    parts = [chunk for _, chunk in replica.chunks] or replica.stages
    return (
        tuple(part.forward_seconds for part in parts),
        tuple(part.backward_seconds for part in parts),
        (*replica.hop_seconds, 0.0),
        tuple(stage.update_seconds for stage in replica.stages),
    )


def order_of(plan: Plan, replica: Replica) -> PassOrder:
    stages, micro_batches, chunks = len(replica.stages), replica.micro_batches, len(replica.layers_per_chunk)
    passes = chunks * micro_batches * (2 if plan.order_seconds is None else 3)
    most = MAX_PASSES_1F1B if plan.schedule == "1f1b" else MAX_PASSES
    if passes > most:
        raise ValueError(
            f"{passes:,} passes are too many to simulate; at most {most:,} are allowed, so use larger micro-batches or "
            "a smaller global batch"
        )
    if plan.schedule == "1f1b":
        return one_forward_one_backward(stages, micro_batches)
    return chunked_order(stages, chunks, micro_batches, plan.order_seconds)


def slowed(plan: Plan, slow: Mapping[int, float]) -> Plan:
    """The plan with its predicted times if the work of some ranks takes longer; the order of passes stays."""
    used = {rank for replica in plan.replicas for stage in replica.stages for rank in stage.ranks}
    for rank, factor in slow.items():
        if rank not in used:
            raise ValueError(f"rank {rank} is not in the plan, which uses ranks {spans(sorted(used))}")
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(
                f"rank {rank} cannot be {factor} times as slow: the factor must be above 0, e.g. 2 for half speed"
            )
    if not slow:
        return plan
    replicas = tuple(_slowed_replica(plan, replica, slow) for replica in plan.replicas)
    longest = max(replica.pipeline_seconds for replica in replicas)
    return plan.model_copy(
        update={
            "replicas": replicas,
            "iteration_seconds": longest + plan.synchronization_seconds,
            "uniform_seconds": None,
            "bound_seconds": None,
        }
    )


def _slowed_replica(plan: Plan, replica: Replica, slow: Mapping[int, float]) -> Replica:
    if not any(rank in slow for stage in replica.stages for rank in stage.ranks):
        return replica
    stages = []
    work = ("forward_seconds", "backward_seconds")
    for stage in replica.stages:
        factor = max(slow.get(rank, 1.0) for rank in stage.ranks)
        chunks = [
            each.model_copy(update={name: getattr(each, name) * factor for name in work}) for each in stage.chunks
        ]
        seconds = {name: getattr(stage, name) * factor for name in (*work, "update_seconds")}
        stages.append(stage.model_copy(update={**seconds, "chunks": tuple(chunks)}))
    replica = replica.model_copy(update={"stages": tuple(stages)})
    if plan.schedule != "1f1b":
        return replica.model_copy(update={"pipeline_seconds": _timeline(plan, replica).seconds})
    times = [stage.micro_batch_seconds for stage in stages]
    whole = sum(times) + (replica.micro_batches - 1) * max(times) + max(stage.update_seconds for stage in stages)
    return replica.model_copy(update={"pipeline_seconds": whole})
