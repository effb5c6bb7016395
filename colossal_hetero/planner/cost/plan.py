"""The plan file: which device runs which layers, in which groups, and predicted times, which reading does not check."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ...common.files import (
    Amount,
    FilePart,
    NonNegative,
    PositiveCount,
    PositiveSeconds,
    Seconds,
    load_json_file,
    write_json,
)
from ...common.text import count
from ..profile.layer_profile import UNITS, Units
from .pass_order import GraphSeconds, Schedule, stages_of_chunks

SCHEMA = 1

Name = Annotated[str, Field(min_length=1)]


def _some_blocks(blocks: tuple[int, int]) -> tuple[int, int]:
    if blocks[0] >= blocks[1]:
        raise ValueError(f"[{blocks[0]}, {blocks[1]}) has no block; [a, b) needs at least one, so a < b")
    return blocks


BlockRange = Annotated[tuple[NonNegative, NonNegative], AfterValidator(_some_blocks)]
"""``[a, b)``: block numbers; embedding and head go with the first and the last block."""


def without_defaults(part: FilePart, content: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """``content`` without those of these fields that have their default value."""
    left_out = {name for name in names if getattr(part, name) == type(part).model_fields[name].default}
    return {name: value for name, value in content.items() if name not in left_out}


class ChunkPlan(FilePart):
    """Consecutive blocks of a stage that holds several such chunks. Times are per micro-batch."""

    blocks: BlockRange
    forward_seconds: Seconds
    backward_seconds: Seconds
    hop_seconds: Seconds = 0.0
    """One way over the cut behind the chunk; 0 behind the last one and inside a stage."""


class StagePlan(FilePart):
    """Blocks on one tensor-parallel group, consecutive or in chunks. Times are per micro-batch, bytes per device."""

    blocks: BlockRange = Field(default=cast(Any, None))
    """``[a, b)``. With chunks: from the first to the last block, with other stages' between; files leave this out."""
    chunks: tuple[ChunkPlan, ...] = ()
    """Chunks in the order of the model; empty in a 1F1B plan, whose stages hold one."""
    device: Name
    ranks: Annotated[tuple[NonNegative, ...], Field(min_length=1)]
    """Its tensor-parallel group, numbered as in the cluster file, and as ranks if one is launched per device."""
    recompute: bool = False
    """True if only inputs of blocks are kept, and the backward pass runs the forward again. Files leave out False."""
    node: str
    forward_seconds: Seconds
    backward_seconds: Seconds
    transfer_seconds: Seconds
    """Time in steady state: one way over the cuts before and behind the stage; with chunks, over all their cuts."""
    update_seconds: Seconds
    memory_bytes: Amount
    memory_overhead_bytes: Amount = 0.0
    """Part that does not depend on the stage's blocks: the device's reserve, and what passes need for a moment."""
    memory_available_bytes: Amount

    @model_validator(mode="after")
    def _range_of_the_chunks(self) -> StagePlan:
        if "blocks" not in self.model_fields_set:
            if not self.chunks:
                raise ValueError("blocks is missing; a stage has blocks [a, b), or chunks of them")
            ranges = [chunk.blocks for chunk in self.chunks]
            # The model is frozen, and this completes it.
            object.__setattr__(self, "blocks", (min(a for a, _ in ranges), max(b for _, b in ranges)))
        return self

    @model_serializer(mode="wrap")
    def _one_of_both(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = write(self)
        content.pop("blocks" if self.chunks else "chunks", None)
        return without_defaults(self, content, ("recompute",))

    @property
    def block_ranges(self) -> tuple[tuple[int, int], ...]:
        """``[a, b)`` of each chunk, in the order of the model; of a stage without chunks its only one."""
        return tuple(chunk.blocks for chunk in self.chunks) or (self.blocks,)

    @property
    def micro_batch_seconds(self) -> float:
        """Time that the stage is occupied in steady state; stages with chunks send while they compute."""
        transfer = 0.0 if self.chunks else self.transfer_seconds
        return self.forward_seconds + self.backward_seconds + transfer


class Replica(FilePart):
    """One pipeline that holds the whole model; replicas are data-parallel."""

    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]
    """Stages in the order of their blocks, or of their first chunks."""
    micro_batches: PositiveCount
    pipeline_seconds: Seconds
    """Predicted time of an iteration without synchronization."""

    @model_validator(mode="after")
    def _one_after_the_other(self) -> Replica:
        numbers = [len(stage.chunks) for stage in self.stages]
        if len(set(numbers)) > 1:
            raise ValueError(
                f"the stages have {', '.join(map(str, numbers))} chunks; all stages of a replica have equally many"
            )
        what, has = ("chunk", "a chunk of blocks") if numbers[0] else ("stage", "blocks")
        start, before = 0, f"the first {what} starts at 0"
        for stage, part in self.chunks or enumerate(self.stages):
            first, stop = part.blocks
            if first != start:
                raise ValueError(
                    f"stage {stage} has {has} [{first}, {stop}), but {before}; every block belongs to one {what}, so "
                    f"{'one' if numbers[0] else 'it'} must start at {start}"
                )
            start = stop
            before = (
                f"the chunk before it, in stage {stage}, ends at {stop}"
                if numbers[0]
                else f"stage {stage} ends at {stop}"
            )
        return self

    @property
    def chunks(self) -> tuple[tuple[int, ChunkPlan], ...]:
        """Every chunk with the number of its stage, in the order of the model; empty in a 1F1B plan."""
        placed = [(number, chunk) for number, stage in enumerate(self.stages) for chunk in stage.chunks]
        return tuple(sorted(placed, key=lambda each: each[1].blocks))

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(sum(b - a for a, b in stage.block_ranges) for stage in self.stages)

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        """Blocks per chunk, in the order of the model; without chunks, per stage."""
        ranges = sorted(each for stage in self.stages for each in stage.block_ranges)
        return tuple(b - a for a, b in ranges)

    @property
    def hop_seconds(self) -> tuple[float, ...]:
        """Seconds of a micro-batch over each cut, one way; without chunks, from ``transfer_seconds`` of both cuts."""
        if self.chunks:
            return tuple(chunk.hop_seconds for _, chunk in self.chunks[:-1])
        hops: list[float] = []
        for stage in self.stages[:-1]:
            hops.append(max(stage.transfer_seconds - (hops[-1] if hops else 0.0), 0.0))
        return tuple(hops)

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """Share of ``pipeline_seconds`` in which each stage waits, by the formula."""
        total = self.pipeline_seconds
        busy = (self.micro_batches * stage.micro_batch_seconds + stage.update_seconds for stage in self.stages)
        return tuple(min(max(1.0 - each / total, 0.0), 1.0) if total > 0 else 0.0 for each in busy)


class Plan(FilePart):
    schema_version: Literal[1] = Field(default=1, alias="schema")
    units: Units = Field(default_factory=lambda: dict(UNITS))
    model: str
    cluster: str = ""
    profile: str = ""
    precision: str = "fp32"
    blocks: PositiveCount
    method: str
    schedule: Schedule = "1f1b"
    """Colossal-AI's ``pp_style``."""
    order_seconds: GraphSeconds | None = None
    """With the schedule ``zbv``: the times from which Colossal-AI orders the passes of all stages."""
    tensor_parallel: PositiveCount
    zero_stage: Literal[0, 1] = 0
    """1: each replica keeps an equal part of the optimizer's state of every block. Files leave out 0."""
    micro_batch: PositiveCount
    global_batch: PositiveCount
    iteration_seconds: PositiveSeconds
    relative_error: Annotated[float, Field(ge=0)] | None = None
    """Standard error of ``iteration_seconds`` as a share of it; None, and left out of files, if not in the profile."""
    synchronization_seconds: Seconds
    """Predicted time to sum gradients over replicas, per iteration; included in ``iteration_seconds``."""
    uniform_seconds: PositiveSeconds | None = None
    """Predicted time of the best plan with equally many layers per stage; None if there is none or not computed."""
    bound_seconds: PositiveSeconds | None = None
    """Lower bound of the predicted time of all plans that were searched; None if it was not computed."""
    notes: tuple[str, ...] = ()
    replicas: Annotated[tuple[Replica, ...], Field(min_length=1)]

    @model_serializer(mode="wrap")
    def _without_what_it_does_not_use(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        names = ("order_seconds", "zero_stage", "relative_error", "bound_seconds")
        return without_defaults(self, write(self), names)

    @model_validator(mode="after")
    def _whole(self) -> Plan:
        self._check_schedule()
        seen: dict[int, str] = {}
        for number, replica in enumerate(self.replicas):
            end = max(stage.blocks[1] for stage in replica.stages)
            if end != self.blocks:
                raise ValueError(
                    f"the stages of replicas[{number}] hold blocks 0 to {end - 1}, but the model has {self.blocks} "
                    f"blocks; the last stage must end at {self.blocks}"
                )
            for index, stage in enumerate(replica.stages):
                place = f"replicas[{number}].stages[{index}]"
                if len(stage.ranks) != self.tensor_parallel:
                    raise ValueError(
                        f"{place} has {count(len(stage.ranks), 'rank')} ({', '.join(map(str, stage.ranks))}), but "
                        f"tensor_parallel={self.tensor_parallel}; every stage needs a group of that size"
                    )
                for rank in stage.ranks:
                    if rank in seen:
                        raise ValueError(
                            f"rank {rank} is in {seen[rank]} and in {place}; a rank runs one stage of one replica"
                            if seen[rank] != place
                            else f"rank {rank} is given twice in {place}; the ranks of a group are different"
                        )
                    seen[rank] = place
        self._check_samples()
        return self

    def _check_schedule(self) -> None:
        for number, replica in enumerate(self.replicas):
            place, chunks = f"replicas[{number}]", len(replica.stages[0].chunks)
            if self.schedule == "1f1b" and chunks:
                raise ValueError(
                    f"schedule='1f1b', but the stages of {place} have chunks; with them the schedule is 'interleaved' "
                    "or 'zbv'"
                )
            if self.schedule == "1f1b":
                continue
            if chunks < 2 or (self.schedule == "zbv" and chunks != 2):
                needed = "2 chunks" if self.schedule == "zbv" else "at least 2 chunks"
                raise ValueError(
                    f"schedule={self.schedule!r}, but the stages of {place} have {count(chunks, 'chunk')}; each needs "
                    f"{needed}"
                )
            found = tuple(stage for stage, _ in replica.chunks)
            needed_order = stages_of_chunks(self.schedule, len(replica.stages), chunks)
            if found != needed_order:
                raise ValueError(
                    f"in the order of the model, the chunks of {place} are in the stages {', '.join(map(str, found))}; "
                    f"the schedule {self.schedule!r} needs {', '.join(map(str, needed_order))}"
                )
        if (self.order_seconds is None) == (self.schedule == "zbv"):
            raise ValueError(
                "schedule='zbv' needs order_seconds, from which Colossal-AI orders the passes; plan again"
                if self.schedule == "zbv"
                else f"order_seconds belong to schedule='zbv' only, not to {self.schedule!r}; leave them out"
            )

    def _check_samples(self) -> None:
        counts = [replica.micro_batches for replica in self.replicas]
        samples = sum(counts) * self.micro_batch
        if samples != self.global_batch:
            summed = " + ".join(map(str, counts[:8])) + (" + …" if len(counts) > 8 else "")
            raise ValueError(
                f"global_batch={self.global_batch}, but {summed} micro-batches of {self.micro_batch} are {samples} "
                "samples; change global_batch, micro_batch or the replicas' micro_batches"
            )

    @property
    def world_size(self) -> int:
        return sum(len(stage.ranks) for replica in self.replicas for stage in replica.stages)

    @property
    def samples_per_second(self) -> float:
        return self.global_batch / self.iteration_seconds

    @property
    def gap(self) -> float | None:
        """Share by which another plan is faster at most (0.03: 3 %); None if it was not computed."""
        return None if self.bound_seconds is None else max(self.iteration_seconds / self.bound_seconds - 1.0, 0.0)

    @property
    def symmetric(self) -> bool:
        """True if all replicas cut the model alike and run equally many micro-batches."""
        shapes = {
            (replica.micro_batches, tuple(stage.block_ranges for stage in replica.stages)) for replica in self.replicas
        }
        return len(shapes) == 1

    @property
    def plain(self) -> bool:
        """True without ZeRO stage 1 and recomputation."""
        return self.zero_stage == 0 and not any(stage.recompute for each in self.replicas for stage in each.stages)

    @property
    def rank_order(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Ranks as numbered in the cluster file, ``[replicas][stages][tensor parallel]``."""
        return tuple(tuple(stage.ranks for stage in replica.stages) for replica in self.replicas)

    @property
    def launched_order(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """:attr:`rank_order` if only the plan's devices are launched, with ranks 0 … ``world_size`` − 1."""
        used = itertools.chain.from_iterable(itertools.chain.from_iterable(self.rank_order))
        place = {rank: index for index, rank in enumerate(sorted(used))}
        return tuple(tuple(tuple(place[r] for r in group) for group in replica) for replica in self.rank_order)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return self.replicas[0].layers_per_stage

    @property
    def chunks_per_stage(self) -> int:
        """Colossal-AI's ``num_model_chunks``; 1 in a 1F1B plan."""
        return len(self.replicas[0].stages[0].block_ranges)

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        """Blocks per chunk of the first replica, in the order of the model: ``num_layers_per_stage`` of the plugin."""
        return self.replicas[0].layers_per_chunk


def load_plan(path: Path | str) -> Plan:
    def other_kind(content: Mapping[str, object]) -> str | None:
        return None if "replicas" in content else 'it has no "replicas"; `colossal-hetero plan --out` writes one'

    return load_json_file(path, Plan, kind="plan", schema=SCHEMA, remedy="plan again", other_kind=other_kind)


def save_plan(plan: Plan, path: Path | str) -> None:
    write_json(plan.model_dump(mode="json", by_alias=True), path)


def exposed_seconds(
    synchronization_seconds: float, passes: Iterable[tuple[float, float]], *, equal: bool = True
) -> float:
    """Time of sums of gradients over replicas that the overlapped optimizer does not hide, per iteration: its formula
    is in docs/algorithms.md, 3. That communication slows down computation is not counted."""
    half = synchronization_seconds / 2
    return max(max(half - forward if equal else half, 0.0) + max(half - backward, 0.0) for forward, backward in passes)
