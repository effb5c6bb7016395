"""The plan file: which device runs which layers, in which groups, and the predicted times.

JSON that people can read and, with care, edit. Blocks, groups and samples are checked when it is read. The predictions
in it are not checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from ...io.json_files import check_units, write_json
from ...io.quantities import Amount, NonNegative, PositiveCount, PositiveSeconds, Seconds
from ...io.schema import FilePart, load_json_file
from ...io.text import count

__all__ = ["SCHEMA", "Plan", "Replica", "StagePlan", "load_plan", "save_plan"]

SCHEMA = 1
"""Version of the file's fields."""

UNITS = {"seconds": "s", "bytes": "B", "micro_batch": "samples"}

Name = Annotated[str, Field(min_length=1)]


class StagePlan(FilePart):
    """A stage of a pipeline: consecutive blocks on one tensor-parallel group."""

    blocks: tuple[NonNegative, NonNegative]
    """``[a, b)``: block numbers; embedding and head go with the first and the last block."""
    device: Name
    """Kind of device."""
    ranks: Annotated[tuple[NonNegative, ...], Field(min_length=1)]
    """Its tensor-parallel group. Devices are numbered in the order of the cluster file; if one rank is launched per
    device, these are the numbers of the ranks."""
    node: str
    """Name of the node that the group is in."""
    forward_seconds: Seconds
    """Per micro-batch."""
    backward_seconds: Seconds
    """Per micro-batch."""
    transfer_seconds: Seconds
    """Per micro-batch in steady state: one way over the cut before the stage and one way over the cut behind it."""
    schedule_seconds: Seconds = 0.0
    """Per micro-batch: what the schedule itself takes, beyond its passes and transfers."""
    update_seconds: Seconds
    """Optimizer step, once per iteration."""
    memory_bytes: Amount
    """Predicted, per device."""
    memory_overhead_bytes: Amount = 0.0
    """Part of it that does not depend on which blocks the stage has: the device's reserve and what passes need for a
    moment."""
    memory_available_bytes: Amount
    """Memory of each device."""

    @field_validator("blocks")
    @classmethod
    def _some_blocks(cls, blocks: tuple[int, int]) -> tuple[int, int]:
        if blocks[0] >= blocks[1]:
            raise ValueError(f"[{blocks[0]}, {blocks[1]}) has no block; a stage [a, b) needs at least one, so a < b")
        return blocks

    @property
    def micro_batch_seconds(self) -> float:
        """Time that the stage is occupied per micro-batch in steady state."""
        return self.forward_seconds + self.backward_seconds + self.transfer_seconds + self.schedule_seconds


class Replica(FilePart):
    """One pipeline that holds the whole model; replicas are data-parallel."""

    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]
    """In the order of the blocks."""
    micro_batches: PositiveCount
    """K, per iteration."""
    pipeline_seconds: Seconds
    """Predicted time of an iteration without synchronization."""

    @model_validator(mode="after")
    def _one_after_the_other(self) -> Replica:
        start = 0
        for index, stage in enumerate(self.stages):
            if stage.blocks[0] != start:
                before = f"stage {index - 1} ends at {start}" if index else "the first stage starts at 0"
                raise ValueError(
                    f"stage {index} has blocks [{stage.blocks[0]}, {stage.blocks[1]}), but {before}; "
                    f"every block belongs to one stage, so it must start at {start}"
                )
            start = stage.blocks[1]
        return self

    @property
    def hop_seconds(self) -> tuple[float, ...]:
        """Seconds of a micro-batch over each cut, one way; computed from ``transfer_seconds``, which has both cuts."""
        hops: list[float] = []
        for stage in self.stages[:-1]:
            hops.append(max(stage.transfer_seconds - (hops[-1] if hops else 0.0), 0.0))
        return tuple(hops)

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """By stage, the share of ``pipeline_seconds`` in which it waits, according to the closed form."""
        total = self.pipeline_seconds
        busy = (self.micro_batches * stage.micro_batch_seconds + stage.update_seconds for stage in self.stages)
        return tuple(min(max(1.0 - each / total, 0.0), 1.0) if total > 0 else 0.0 for each in busy)


class Plan(FilePart):
    """All that is needed to train, and the predicted times."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    units: dict[str, str] = Field(default_factory=lambda: dict(UNITS))
    """Units of the numbers, for readers of the file."""
    model: str
    """Name of the model."""
    cluster: str = ""
    """Name of the cluster file that the plan was made for."""
    profile: str = ""
    """Name of the profile file that the plan was made from."""
    precision: str = "fp32"
    """Precision in which the layers were timed."""
    blocks: PositiveCount
    """How many blocks the model has."""
    method: str
    """Method by which the layers were split into stages."""
    schedule: Literal["1f1b"] = "1f1b"
    tensor_parallel: PositiveCount
    """Ranks per stage and replica."""
    micro_batch: PositiveCount
    """Samples per micro-batch."""
    global_batch: PositiveCount
    """Samples per optimizer step, over all replicas."""
    iteration_seconds: PositiveSeconds
    """Predicted time of an iteration."""
    synchronization_seconds: Seconds = Field(
        validation_alias=AliasChoices("synchronization_seconds", "synchronisation_seconds")  # as 0.1 wrote it
    )
    """Predicted time to sum gradients over replicas, per iteration; included in ``iteration_seconds``."""
    uniform_seconds: PositiveSeconds | None = None
    """Predicted time of an iteration of the best plan with equally many layers per stage. None if there is no such
    plan, or it was not computed."""
    notes: tuple[str, ...] = ()
    """Decisions and their reasons, for readers."""
    replicas: Annotated[tuple[Replica, ...], Field(min_length=1)]

    @field_validator("units")
    @classmethod
    def _units_as_read(cls, units: dict[str, str]) -> dict[str, str]:
        check_units(units, UNITS)
        return units

    @model_validator(mode="after")
    def _whole(self) -> Plan:
        seen: dict[int, str] = {}
        for number, replica in enumerate(self.replicas):
            end = replica.stages[-1].blocks[1]
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
        """Number of ranks in use."""
        return sum(len(stage.ranks) for replica in self.replicas for stage in replica.stages)

    @property
    def samples_per_second(self) -> float:
        """Predicted samples per second."""
        return self.global_batch / self.iteration_seconds

    @property
    def symmetric(self) -> bool:
        """Whether all replicas cut the model alike and run equally many micro-batches."""
        shapes = {(replica.micro_batches, tuple(stage.blocks for stage in replica.stages)) for replica in self.replicas}
        return len(shapes) == 1

    @property
    def rank_order(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Ranks by replica, stage and place in the tensor-parallel group, ``[replicas][stages][tensor parallel]``;
        numbered in the order of the cluster file."""
        return tuple(tuple(stage.ranks for stage in replica.stages) for replica in self.replicas)

    @property
    def launched_order(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """:attr:`rank_order` if only the plan's devices are launched, with ranks 0 … ``world_size`` − 1.

        If the plan uses every device of its cluster file, this is equal to :attr:`rank_order`.
        """
        used = itertools.chain.from_iterable(itertools.chain.from_iterable(self.rank_order))
        place = {rank: index for index, rank in enumerate(sorted(used))}
        return tuple(tuple(tuple(place[r] for r in group) for group in replica) for replica in self.rank_order)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Blocks per stage of the first replica: Colossal-AI's ``num_layers_per_stage``."""
        return tuple(b - a for a, b in (stage.blocks for stage in self.replicas[0].stages))


def load_plan(path: Path | str) -> Plan:
    """Read a plan.

    Raises:
        ValueError: There is no such file, it is not JSON, has another schema version, or has fields that are wrong,
            missing or unknown (all of them are named); or the plan is not consistent: a block belongs to no stage or to
            two stages, a rank is in two places, a group has another size than ``tensor_parallel``, or the
            micro-batches do not make up the global batch.
    """
    return load_json_file(path, Plan, kind="plan", schema=SCHEMA, remedy="plan again", other_kind=_other_kind)


def _other_kind(content: Mapping[str, object]) -> str | None:
    return None if "replicas" in content else 'it has no "replicas"; `colossal-hetero plan --out` writes one'


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write a plan, atomically."""
    write_json(plan.model_dump(mode="json", by_alias=True), path, fill=True)
