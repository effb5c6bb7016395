"""The order in which each stage runs its passes, in Colossal-AI's schedules.

The model is cut into chunks, which are numbered in the order of the model. With p stages, stage s holds chunk s
(``1f1b``), the chunks s, s + p, s + 2p, … (``interleaved``), or s and 2p − 1 − s, in the shape of a V (``zbv``). In
``zbv``, a backward pass is two passes: one for the gradients of the inputs, which the chunk before waits for, and one
for those of the weights, for which nothing waits.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

from ...common.files import FilePart, Seconds
from ...common.text import count

Schedule = Literal["1f1b", "interleaved", "zbv"]
"""Colossal-AI's ``pp_style``."""

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zbv")
CHUNKED: tuple[Schedule, ...] = ("interleaved", "zbv")  # schedules in which a stage holds several chunks

PassKind = Literal["forward", "backward", "weight", "transfer"]


class Pass(NamedTuple):
    kind: PassKind
    """``weight``: only the gradients of the weights; ``backward`` is without them then. ``transfer``: no pass, but
    messages over the cut behind the chunk that two stages exchange at the same time, between their passes."""
    chunk: int
    micro_batch: int  # of a transfer, its number among those over its cut


@dataclass(frozen=True, eq=False)
class PassOrder:
    """The passes that each stage runs in an iteration, one after the other, and the stage of each chunk."""

    stage_of_chunk: tuple[int, ...]
    passes: tuple[tuple[Pass, ...], ...]  # a transfer is in the lists of both of its stages
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
    def exchanges(self) -> bool:
        """True if stages send messages between their passes, and not while they run passes."""
        return any(each.kind == "transfer" for each in self.passes[0])

    @cached_property
    def sequence(self) -> tuple[Pass, ...]:
        """All passes, each behind those that it waits for: the one that its stage runs before it, and the forward of
        the chunk before it or the backward of the chunk behind it. Transfers are behind all that both stages run before
        them."""
        places = [0] * self.stages
        done: set[Pass | None] = {None}
        reached: dict[Pass, int] = {}
        ordered: list[Pass] = []
        while places != list(map(len, self.passes)):
            before = len(ordered)
            for stage, passes in enumerate(self.passes):
                while places[stage] < len(passes):
                    each = passes[places[stage]]
                    if each.kind == "transfer":
                        other = reached.setdefault(each, stage)
                        if other == stage:
                            break
                        places[other] += 1
                    elif self._source(each) not in done:
                        break
                    done.add(each)
                    ordered.append(each)
                    places[stage] += 1
            if len(ordered) == before:
                waiting = next(
                    passes[place] for passes, place in zip(self.passes, places, strict=True) if passes[place:]
                )
                raise ValueError(f"the order cannot be run: {waiting} waits for a pass that waits for it")
        return tuple(ordered)

    def _source(self, each: Pass) -> Pass | None:
        kind, chunk, number = each
        if kind == "forward":
            return Pass("forward", chunk - 1, number) if chunk else None
        if kind == "weight":
            return Pass("backward", chunk, number)
        return Pass("forward", chunk, number) if chunk + 1 == self.chunks else Pass("backward", chunk + 1, number)


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


@lru_cache(maxsize=8)
def one_forward_one_backward(stages: int, micro_batches: int) -> PassOrder:
    """Passes of ``OneForwardOneBackwardSchedule.run_forward_backward``: of P stages, stage s first does
    ``min(P − s − 1, K)`` warm-up forwards, then one forward and one backward in turn, then the other backwards.

    Stages send in ``batch_isend_irecv`` before or behind a pass: an activation, a gradient, or an activation one way
    and a gradient the other way. These exchanges are numbered by the micro-batch whose activation they carry. The
    gradients of micro-batch m go back over cut s in exchange ``m + P − 1 − s``, from number K on without an activation.
    """
    rows = []
    for stage in range(stages):
        row: list[Pass] = []
        chunks = [stage] * micro_batches
        for each in _alternating(chunks, chunks, min(stages - stage - 1, micro_batches)):
            number, forward = each.micro_batch, each.kind == "forward"
            before = Pass("transfer", stage - 1, number if forward else number + stages - stage)
            behind = Pass("transfer", stage, number if forward else number + stages - 1 - stage)
            received, sent = (before, behind) if forward else (behind, before)
            # With the message that it receives, a stage sends what it has to send to the same stage.
            if 0 <= received.chunk < stages - 1 and received not in row[-1:]:
                row.append(received)
            row.append(each)
            if 0 <= sent.chunk < stages - 1:
                row.append(sent)
        rows.append(tuple(row))
    return PassOrder(stages_of_chunks("1f1b", stages, 1), tuple(rows))


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


def chunked_order(stages: int, chunks: int, micro_batches: int, seconds: GraphSeconds | None) -> PassOrder:
    """The order of ``chunks`` chunks in all: with ``seconds`` that of the schedule ``zbv``, else ``interleaved``."""
    if seconds is not None:
        return zero_bubble_v(stages, micro_batches, seconds)
    return interleaved(stages, chunks // stages, micro_batches)


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
