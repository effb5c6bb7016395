"""The order in which each stage runs its passes, in Colossal-AI's schedules, and the simulation of that order.

The model is cut into chunks, which are numbered in the order of the model. With p stages, stage s holds chunk s
(``1f1b``), the chunks s, s + p, s + 2p, … (``interleaved``), or s and 2p − 1 − s, in the shape of a V (``zbv``). In
``zbv``, a backward pass is two passes: one for the gradients of the inputs, which the chunk before waits for, and one
for those of the weights, for which nothing waits.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...common.files import FilePart, Seconds
from ...common.text import count
from ..stages.event_simulation import Event, StageShare, Transfers

__all__ = [
    "CHUNKED",
    "SCHEDULES",
    "WEIGHT_SHARE",
    "ChunkTimes",
    "GraphSeconds",
    "Pass",
    "PassOrder",
    "PassTimeline",
    "Schedule",
    "interleaved",
    "one_forward_one_backward",
    "simulate_passes",
    "stages_of_chunks",
    "why_not_schedulable",
    "zero_bubble_nodes",
    "zero_bubble_v",
]


Schedule = Literal["1f1b", "interleaved", "zbv"]
"""Colossal-AI's ``pp_style``."""

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zbv")
CHUNKED: tuple[Schedule, ...] = ("interleaved", "zbv")
"""Schedules in which a stage holds several chunks."""

PassKind = Literal["forward", "backward", "weight"]


class Pass(NamedTuple):
    kind: PassKind
    """``weight``: only the gradients of the weights; ``backward`` is without them then."""
    chunk: int
    """Number in the order of the model."""
    micro_batch: int


@dataclass(frozen=True, eq=False)
class PassOrder:
    """The passes that each stage runs in an iteration, one after the other, and the stage of each chunk."""

    stage_of_chunk: tuple[int, ...]
    passes: tuple[tuple[Pass, ...], ...]
    receives_late: bool = False
    """True if a stage asks for the input of a pass only when it has run the pass of that kind before."""

    @property
    def stages(self) -> int:
        return len(self.passes)

    @property
    def chunks(self) -> int:
        return len(self.stage_of_chunk)

    @cached_property
    def splits_backward(self) -> bool:
        """True if the gradients of the weights have passes of their own."""
        return any(each.kind == "weight" for each in self.passes[0])

    @cached_property
    def sequence(self) -> tuple[Pass, ...]:
        """All passes, each behind those that it waits for: the one that its stage runs before it, and the forward of
        the chunk before it or the backward of the chunk behind it."""
        places = [0] * self.stages
        done: set[Pass] = set()
        ordered: list[Pass] = []
        total = sum(map(len, self.passes))
        while len(ordered) < total:
            before = len(ordered)
            for stage, passes in enumerate(self.passes):
                while places[stage] < len(passes) and self._waits_for(passes[places[stage]]) <= done:
                    each = passes[places[stage]]
                    done.add(each)
                    ordered.append(each)
                    places[stage] += 1
            if len(ordered) == before:
                waiting = next(
                    passes[place] for passes, place in zip(self.passes, places, strict=True) if passes[place:]
                )
                raise ValueError(f"the order cannot be run: {waiting} waits for a pass that waits for it")
        return tuple(ordered)

    def _waits_for(self, each: Pass) -> set[Pass]:
        if each.kind == "forward":
            return {each._replace(chunk=each.chunk - 1)} if each.chunk else set()
        if each.kind == "weight":
            return {each._replace(kind="backward")}
        if each.chunk + 1 == self.chunks:
            return {each._replace(kind="forward")}
        return {each._replace(chunk=each.chunk + 1)}


def stages_of_chunks(schedule: Schedule, stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """The stage of each chunk, in the order of the model."""
    if schedule == "zbv":
        return (*range(stages), *reversed(range(stages)))
    return tuple(range(stages)) * chunks_per_stage


def why_not_schedulable(schedule: Schedule, stages: int, micro_batches: int) -> str | None:
    """Reason why Colossal-AI's ``schedule`` cannot run so many micro-batches in so many stages; None if it can."""
    if schedule == "1f1b":
        if stages > 1 and stages > micro_batches:
            return "Colossal-AI's 1F1B schedule needs at least one micro-batch per stage"
    elif stages < 2:
        return f"the schedule {schedule} needs at least 2 stages"
    elif micro_batches % stages:
        return (
            f"Colossal-AI's schedule {schedule} needs a number of micro-batches that is a multiple of the number of "
            "stages"
        )
    return None


@lru_cache(maxsize=64)
def one_forward_one_backward(stages: int, micro_batches: int) -> PassOrder:
    """Passes of ``OneForwardOneBackwardSchedule.run_forward_backward``."""
    return PassOrder(
        stages_of_chunks("1f1b", stages, 1),
        tuple(
            _alternating([stage] * micro_batches, [stage] * micro_batches, min(stages - stage - 1, micro_batches))
            for stage in range(stages)
        ),
    )


@lru_cache(maxsize=64)
def interleaved(stages: int, chunks_per_stage: int, micro_batches: int) -> PassOrder:
    """Passes of ``InterleavedSchedule.run_forward_backward``: p micro-batches of a chunk, then of the next chunk."""
    problem = why_not_schedulable("interleaved", stages, micro_batches)
    if problem is not None:
        raise ValueError(f"{count(micro_batches, 'micro-batch')} for {count(stages, 'stage')}: {problem}")
    total = micro_batches * chunks_per_stage
    # By place in the order: which of the stage's chunks a forward is of.
    places = [number % (stages * chunks_per_stage) // stages for number in range(total)]
    orders = []
    for stage in range(stages):
        forward = [stage + place * stages for place in places]
        backward = [stage + (chunks_per_stage - 1 - place) * stages for place in places]
        warm_up = min(2 * (stages - stage - 1) + (chunks_per_stage - 1) * stages, total)
        orders.append(_alternating(forward, backward, warm_up))
    return PassOrder(stages_of_chunks("interleaved", stages, chunks_per_stage), tuple(orders), receives_late=True)


def _alternating(forward: list[int], backward: list[int], warm_up: int) -> tuple[Pass, ...]:
    """Passes of these chunks: ``warm_up`` forwards, then a forward and a backward in turn, then backwards."""
    numbers: dict[tuple[PassKind, int], int] = {}

    def following(kind: PassKind, chunk: int) -> Pass:
        number = numbers.get((kind, chunk), 0)
        numbers[kind, chunk] = number + 1
        return Pass(kind, chunk, number)

    passes = [following("forward", chunk) for chunk in forward[:warm_up]]
    steady = len(forward) - warm_up
    for chunk, back in zip(forward[warm_up:], backward[:steady], strict=True):
        passes += [following("forward", chunk), following("backward", back)]
    passes += [following("backward", chunk) for chunk in backward[steady:]]
    return tuple(passes)


# Zero bubble ---------------------------------------------------------------------------------------------------------
# ``PipelineGraph.get_v_schedule()`` orders the passes of stages that are alike, from the times of one chunk. The plugin
# runs the same nodes (``scheduler_nodes``), so a plan has these times. Unequal stages run this order as well.
#
# `[Note: one file of Colossal-AI]` Importing the graph's file as part of its package imports torch, which takes seconds
# and which planning does not need. So that one file, which needs only the standard library, is loaded on its own.


KINDS: dict[str, PassKind] = {"F": "forward", "B": "backward", "W": "weight"}


class GraphSeconds(FilePart):
    """The times of one chunk and one micro-batch from which the passes are ordered, in seconds."""

    forward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    transfer: Seconds
    """From a stage to the next, one way."""


@lru_cache(maxsize=64)
def zero_bubble_v(stages: int, micro_batches: int, seconds: GraphSeconds) -> PassOrder:
    numbers = [(stage, 2 * stages - 1 - stage) for stage in range(stages)]
    passes = tuple(
        tuple(Pass(KINDS[node.type], numbers[stage][node.chunk], node.minibatch) for node in row if node.type in KINDS)
        for stage, row in enumerate(zero_bubble_nodes(stages, micro_batches, seconds))
    )
    return PassOrder(stages_of_chunks("zbv", stages, 2), passes)


def zero_bubble_nodes(stages: int, micro_batches: int, seconds: GraphSeconds) -> list[list[Any]]:
    """Passes and messages of each stage in Colossal-AI's order, its ``scheduler_nodes``. Activations are kept until the
    pass for the gradients of the weights; the graph keeps those of at most 2p passes of a chunk in a stage."""
    problem = why_not_schedulable("zbv", stages, micro_batches)
    if problem is not None:
        raise ValueError(f"{count(micro_batches, 'micro-batch')} for {count(stages, 'stage')}: {problem}")
    graph = _module().PipelineGraph(
        n_stage=stages,
        n_micro=micro_batches,
        f_cost=seconds.forward,
        b_cost=seconds.input_gradient,
        w_cost=seconds.weight_gradient,
        c_cost=seconds.transfer,
        f_mem=1,
        b_mem=0,
        w_mem=-1,
    )
    try:
        return cast("list[list[Any]]", graph.get_v_schedule())
    except AssertionError:
        raise ValueError(
            f"Colossal-AI finds no zero-bubble order for {stages} stages and {micro_batches} micro-batches with the "
            f"times {seconds.model_dump()}; use other times or another schedule"
        ) from None


@lru_cache(maxsize=1)
def _module() -> ModuleType:
    """Colossal-AI's ``v_schedule``; see Note: one file of Colossal-AI."""
    name = "colossalai.pipeline.schedule.v_schedule"
    if name in sys.modules:
        return sys.modules[name]
    package = importlib.util.find_spec("colossalai")
    if package is None or not package.submodule_search_locations:
        raise ImportError("zero-bubble plans need Colossal-AI, which is not installed: pip install colossalai")
    path = Path(package.submodule_search_locations[0], "pipeline", "schedule", "v_schedule.py")
    # Under a name of its own, so that Colossal-AI later imports it as part of its package.
    spec = importlib.util.spec_from_file_location("colossalai_v_schedule", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Pass simulation -----------------------------------------------------------------------------------------------------
# A pass starts when its stage is free and its input has arrived. Messages are sent while stages compute, as in
# Colossal-AI's interleaved and zero-bubble schedules; those from one stage to another go one after the other. There are
# two models of when a message leaves. ``blocking``: when the receiver has asked for it, as with NCCL. The interleaved
# schedule asks for the input of a forward when the forward before it has ended, and so for backwards; the zero-bubble
# schedule asks early. ``overlapped``: at once, as with Gloo and this package's corrections, because sends are buffered.


WEIGHT_SHARE = 0.5
"""Share of a backward pass that computes the gradients of weights, where they have passes of their own: a matrix
product has two gradients of equal cost (Qi et al., Zero Bubble Pipeline Parallelism, 2024). It is not measured."""


@dataclass(frozen=True, eq=False)
class ChunkTimes:
    """Times of the chunks per micro-batch, ``[chunks]``, or ``[chunks, divisions]`` to simulate divisions together."""

    forward_seconds: NDArray[np.float64]
    backward_seconds: NDArray[np.float64]
    """Whole backward pass, with the gradients of the weights."""
    schedule_seconds: NDArray[np.float64]
    """Time of the schedule itself, half with the forward and half with the backward."""
    hop_seconds: NDArray[np.float64]
    """Message over the cut behind the chunk, one way; 0 behind the last one, and inside a stage."""
    update_seconds: NDArray[np.float64]
    """Optimizer step of each stage, ``[stages]`` or ``[stages, divisions]``."""


@dataclass(frozen=True, eq=False)
class PassTimeline:
    """A simulated iteration of one pipeline; times are ``[chunks]``."""

    order: PassOrder
    times: ChunkTimes
    transfers: Transfers
    stage_seconds: NDArray[np.float64]
    """Time until each stage has finished its last pass, ``[stages]``."""

    @classmethod
    def of(cls, order: PassOrder, times: ChunkTimes, transfers: Transfers = "blocking") -> PassTimeline:
        return cls(order, times, transfers, simulate_passes(order, times, transfers))

    @property
    def seconds(self) -> float:
        """Time from the start of the iteration until all stages have finished their updates."""
        return float((self.stage_seconds + self.times.update_seconds).max())

    @cached_property
    def shares(self) -> tuple[StageShare, ...]:
        """Shares of the iteration by stage, ``[stages]``. Messages do not occupy a stage."""
        whole = self.seconds or 1.0
        compute = [sum(event.stop - event.start for event in events) / whole for events in self.events]
        return tuple(StageShare(share, 0.0, max(1.0 - share, 0.0)) for share in compute)

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
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
    """Seconds until each stage has finished its last pass, ``[stages]`` or ``[stages, divisions]``."""
    ends = _run(order, times, transfers)
    return ends if times.forward_seconds.ndim == 2 else ends[:, 0]


def _run(
    order: PassOrder,
    times: ChunkTimes,
    transfers: Transfers,
    record: Callable[[Pass, NDArray[np.float64], NDArray[np.float64]], None] | None = None,
) -> NDArray[np.float64]:
    """:func:`simulate_passes`; ``record`` is called with the start and the stop of every pass, each ``[divisions]``."""

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
    """Time when the input of each pass has arrived, or was ready if it is still to be sent."""
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
