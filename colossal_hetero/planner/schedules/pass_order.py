"""The order in which each stage runs its passes, in Colossal-AI's 1F1B and interleaved schedules.

The model is cut into chunks, which are numbered in the order of the model. A stage holds one chunk or several:

- ``1f1b``: stage s holds chunk s.
- ``interleaved``: with p stages, stage s holds the chunks s, s + p, s + 2p, …
- ``zbv``: stage s holds the chunks s and 2p − 1 − s, so that the chunks go through the stages in the shape of a V. A
  backward pass is two passes: one for the gradients of the inputs, which the chunk before waits for, and one for the
  gradients of the weights, for which nothing waits. ``zero_bubble.py`` has the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from ...io.text import count

__all__ = [
    "CHUNKED",
    "SCHEDULES",
    "Pass",
    "PassOrder",
    "Schedule",
    "interleaved",
    "one_forward_one_backward",
    "stages_of_chunks",
    "why_not_schedulable",
]

Schedule = Literal["1f1b", "interleaved", "zbv"]
"""Colossal-AI's ``pp_style``."""

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zbv")
CHUNKED: tuple[Schedule, ...] = ("interleaved", "zbv")
"""Those in which a stage holds several chunks."""

PassKind = Literal["forward", "backward", "weight"]


class Pass(NamedTuple):
    """One pass of a chunk for one micro-batch."""

    kind: PassKind
    """``weight``: only the gradients of the weights, of which ``backward`` is without then."""
    chunk: int
    """Number in the order of the model."""
    micro_batch: int


@dataclass(frozen=True, eq=False)
class PassOrder:
    """What every stage runs in an iteration."""

    stage_of_chunk: tuple[int, ...]
    """By chunk, in the order of the model."""
    passes: tuple[tuple[Pass, ...], ...]
    """By stage: its passes, one after the other."""
    receives_late: bool = False
    """Whether a stage asks for the input of a pass only when it has run the pass of that kind before."""

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.passes)

    @property
    def chunks(self) -> int:
        """How many there are, in all stages together."""
        return len(self.stage_of_chunk)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradients of the weights have passes of their own."""
        return any(each.kind == "weight" for each in self.passes[0])

    @cached_property
    def sequence(self) -> tuple[Pass, ...]:
        """All passes, each behind those that it waits for.

        A forward waits for the forward of the chunk before it, and a backward for the backward of the chunk behind it.
        Every pass waits for the one that its stage runs before it.

        Raises:
            ValueError: Stages wait for each other for ever.
        """
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
    """The stage of each chunk, in the order of the model.

    Args:
        schedule: One of :data:`SCHEDULES`.
        stages: p.
        chunks_per_stage: 1 in ``1f1b``, 2 in ``zbv``.
    """
    if schedule == "zbv":
        return (*range(stages), *reversed(range(stages)))
    return tuple(range(stages)) * chunks_per_stage


def why_not_schedulable(schedule: Schedule, stages: int, micro_batches: int) -> str | None:
    """Why Colossal-AI's ``schedule`` cannot run so many micro-batches in so many stages; None if it can.

    A pipeline of one stage has no schedule, and can run any number.
    """
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
    """As ``OneForwardOneBackwardSchedule.run_forward_backward`` runs them."""
    return PassOrder(
        stages_of_chunks("1f1b", stages, 1),
        tuple(
            _alternating([stage] * micro_batches, [stage] * micro_batches, min(stages - stage - 1, micro_batches))
            for stage in range(stages)
        ),
    )


@lru_cache(maxsize=64)
def interleaved(stages: int, chunks_per_stage: int, micro_batches: int) -> PassOrder:
    """As ``InterleavedSchedule.run_forward_backward`` runs them: p micro-batches of a chunk, then of the next chunk.

    Raises:
        ValueError: The number of micro-batches is not a multiple of the number of stages, p.
    """
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
    """Passes of these chunks: ``warm_up`` forwards, then a forward and a backward in turn, then backwards.

    The micro-batches of each chunk come in the order of their numbers.
    """
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
