"""What the layout of a plan says: pipelines, their stages, kinds of devices and blocks, but not which devices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

from ...io.marked_error import MarkedError
from ..plans.plan import Plan, StagePlan
from ..schedules.pass_order import Schedule

__all__ = ["PipelineLayout", "PlanLayout", "StageLayout", "layout_of"]


@dataclass(frozen=True)
class StageLayout:
    """A stage of a pipeline."""

    device: str
    """Kind of its devices."""
    block_ranges: tuple[tuple[int, int], ...]
    """``[a, b)`` of each chunk, in the order of the model; of a stage without chunks its only one."""
    tensor_parallel: int = 1
    """Its devices, which are one tensor-parallel group."""
    recompute: bool = False
    """Whether the backward pass runs the forward pass again."""
    place: int = field(default=0, compare=False)
    """Where it starts in the line that was read."""

    @property
    def blocks_per_chunk(self) -> tuple[int, ...]:
        """How many blocks each chunk has."""
        return tuple(stop - start for start, stop in self.block_ranges)


@dataclass(frozen=True)
class PipelineLayout:
    """A pipeline that holds the whole model."""

    stages: tuple[StageLayout, ...]
    micro_batches: int | None = None
    """Per iteration; None if the layout does not say it."""


@dataclass(frozen=True)
class PlanLayout:
    """The pipelines of a plan and its micro-batches."""

    pipelines: tuple[PipelineLayout, ...]
    """One per replica."""
    micro_batch: int | None = None
    """Samples per micro-batch; None if the layout does not say it."""
    schedule: Schedule = "1f1b"
    zero_stage: Literal[0, 1] = 0
    tensor_parallel: int = field(default=1, compare=False)
    """Degree that the line names first, for stages that name none."""
    line: str = field(default="", compare=False)
    """The text that was read."""

    @property
    def blocks(self) -> int:
        """Of the model."""
        return max(stop for stage in self.pipelines[0].stages for _, stop in stage.block_ranges)

    @property
    def alike(self) -> bool:
        """Whether all pipelines have the same blocks in their stages and equally many micro-batches."""
        shapes = {(each.micro_batches, tuple(stage.block_ranges for stage in each.stages)) for each in self.pipelines}
        return len(shapes) == 1

    def with_batches(self, micro_batch: int | None = None, micro_batches: int | None = None) -> PlanLayout:
        """The layout with a size of micro-batches, and with so many of them in each pipeline, where they are given.

        Raises:
            ValueError: The layout says something else.
        """
        sizes = {size for size in (self.micro_batch, micro_batch) if size is not None}
        if len(sizes) > 1:
            raise ValueError(
                f"the layout has micro-batches of {self.micro_batch} samples, not of {micro_batch}; leave one of both "
                "out"
            )
        counts = {each.micro_batches for each in self.pipelines} - {None}
        if micro_batches is not None and counts - {micro_batches}:
            said = ", ".join(map(str, sorted(count for count in counts if count is not None)))
            raise ValueError(
                f"the layout has {said} micro-batches per pipeline, not {micro_batches}; leave one of both out"
            )
        pipelines = self.pipelines
        if micro_batches is not None:
            pipelines = tuple(replace(each, micro_batches=micro_batches) for each in pipelines)
        return replace(self, pipelines=pipelines, micro_batch=next(iter(sizes), None))

    def wrong(self, message: str, stage: StageLayout | None = None) -> NoReturn:
        """Say what is wrong with the layout, and where in the line that was read.

        Raises:
            ValueError: Always.
        """
        if self.line and stage is not None:
            raise MarkedError(message, self.line, stage.place)
        raise ValueError(message)


def layout_of(plan: Plan) -> PlanLayout:
    """The layout of ``plan``."""
    pipelines = tuple(
        PipelineLayout(tuple(_stage_of(plan, stage) for stage in replica.stages), replica.micro_batches)
        for replica in plan.replicas
    )
    return PlanLayout(pipelines, plan.micro_batch, plan.schedule, plan.zero_stage, plan.tensor_parallel)


def _stage_of(plan: Plan, stage: StagePlan) -> StageLayout:
    return StageLayout(stage.device, stage.block_ranges, plan.degree(stage), stage.recompute)
