"""The plan file: which device runs which layers, in which groups, and what that is predicted to take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Plan", "Replica", "StagePlan"]

UNITS = {"seconds": "s", "bytes": "B", "micro_batch": "samples"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class StagePlan(_Part):
    """A stage of a pipeline: consecutive blocks on one tensor-parallel group."""

    blocks: tuple[int, int]
    """``[a, b)``: block numbers; embedding and head go with the first and the last block."""
    device: str
    """Kind."""
    ranks: Annotated[tuple[int, ...], Field(min_length=1)]
    """Of its tensor-parallel group, as launched."""
    node: str
    forward_seconds: float
    """Per micro-batch."""
    backward_seconds: float
    transfer_seconds: float
    update_seconds: float
    memory_bytes: float
    memory_available_bytes: float


class Replica(_Part):
    """One pipeline that holds the whole model; replicas are data-parallel."""

    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]
    micro_batches: Annotated[int, Field(ge=1)]
    pipeline_seconds: float
    """Predicted, without synchronisation."""


class Plan(_Part):
    """Everything that training needs, and what it is predicted to take."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    units: dict[str, str] = Field(default_factory=lambda: dict(UNITS))
    model: str
    blocks: Annotated[int, Field(ge=1)]
    method: str
    """How the stages were split."""
    schedule: Literal["1f1b"] = "1f1b"
    tensor_parallel: Annotated[int, Field(ge=1)]
    micro_batch: Annotated[int, Field(ge=1)]
    """Samples."""
    global_batch: Annotated[int, Field(ge=1)]
    """Samples per optimizer step, over all replicas."""
    replicas: Annotated[tuple[Replica, ...], Field(min_length=1)]
    synchronisation_seconds: float
    """Of gradients over replicas, per iteration."""
    iteration_seconds: float
    """Predicted."""
    notes: tuple[str, ...] = ()
    """What was decided and why, for readers."""

    @property
    def world_size(self) -> int:
        """Ranks in use."""
        return sum(len(stage.ranks) for replica in self.replicas for stage in replica.stages)

    @property
    def symmetric(self) -> bool:
        """Whether all replicas cut the model alike and run equally many micro-batches: what the plugin can run."""
        shapes = {(replica.micro_batches, tuple(stage.blocks for stage in replica.stages)) for replica in self.replicas}
        return len(shapes) == 1

    @property
    def rank_order(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Ranks by replica, stage and place in the tensor-parallel group."""
        return tuple(tuple(stage.ranks for stage in replica.stages) for replica in self.replicas)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Blocks per stage of the first replica: Colossal-AI's ``num_layers_per_stage``."""
        return tuple(b - a for a, b in (stage.blocks for stage in self.replicas[0].stages))
