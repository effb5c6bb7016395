"""The plan file: which device runs which layers, in which groups, and what that is predicted to take.

JSON, made to be read and, with care, edited: what makes it a plan (blocks, groups, samples) is checked, the
predictions in it are taken as they are.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator

from ...io.json_files import check_units, errors_in_words, read_json, write_json
from ...io.schema import FilePart
from ...io.text import count

__all__ = ["SCHEMA", "Plan", "Replica", "StagePlan", "load_plan", "save_plan"]

SCHEMA = 1
"""Version of the file's layout."""

UNITS = {"seconds": "s", "bytes": "B", "micro_batch": "samples"}

Seconds = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]


class StagePlan(FilePart):
    """A stage of a pipeline: consecutive blocks on one tensor-parallel group."""

    blocks: tuple[Annotated[int, Field(ge=0)], int]
    """``[a, b)``: block numbers; embedding and head go with the first and the last block."""
    device: Name
    """Kind."""
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    """Of its tensor-parallel group: numbers of the devices as in the cluster file, which are the ranks as launched
    when all of them are."""
    node: str
    forward_seconds: Seconds
    """Per micro-batch."""
    backward_seconds: Seconds
    transfer_seconds: Seconds
    """Per micro-batch in steady state: one way over each of its two cuts."""
    update_seconds: Seconds
    """Optimizer step, once per iteration."""
    memory_bytes: Seconds
    """Predicted, of each of its devices."""
    memory_available_bytes: Seconds

    @field_validator("blocks")
    @classmethod
    def _some_blocks(cls, blocks: tuple[int, int]) -> tuple[int, int]:
        if blocks[0] >= blocks[1]:
            raise ValueError(f"[{blocks[0]}, {blocks[1]}) has no block; a stage [a, b) needs at least one, so a < b")
        return blocks


class Replica(FilePart):
    """One pipeline that holds the whole model; replicas are data-parallel."""

    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]
    micro_batches: Annotated[int, Field(ge=1)]
    """K, per iteration."""
    pipeline_seconds: Seconds
    """Predicted, without synchronization."""

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
        """What a micro-batch takes over each cut, one way; recovered from what each stage has at both its cuts."""
        hops: list[float] = []
        for stage in self.stages[:-1]:
            hops.append(max(stage.transfer_seconds - (hops[-1] if hops else 0.0), 0.0))
        return tuple(hops)

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """By stage, the share of ``pipeline_seconds`` in which it waits, by the closed form."""
        total = self.pipeline_seconds
        busy = (
            self.micro_batches * (stage.forward_seconds + stage.backward_seconds + stage.transfer_seconds)
            + stage.update_seconds
            for stage in self.stages
        )
        return tuple(min(max(1.0 - each / total, 0.0), 1.0) if total > 0 else 0.0 for each in busy)


class Plan(FilePart):
    """Everything that training needs, and what it is predicted to take."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    units: dict[str, str] = Field(default_factory=lambda: dict(UNITS))
    """For readers of the file."""
    model: str
    cluster: str = ""
    """Name of the cluster file that it was made for."""
    profile: str = ""
    """Name of the profile that it was made from."""
    precision: str = "fp32"
    """That the layers were timed in."""
    blocks: Annotated[int, Field(ge=1)]
    method: str
    """How the stages were split."""
    schedule: Literal["1f1b"] = "1f1b"
    tensor_parallel: Annotated[int, Field(ge=1)]
    micro_batch: Annotated[int, Field(ge=1)]
    """Samples."""
    global_batch: Annotated[int, Field(ge=1)]
    """Samples per optimizer step, over all replicas."""
    iteration_seconds: Annotated[float, Field(gt=0)]
    """Predicted."""
    synchronization_seconds: Seconds = Field(
        validation_alias=AliasChoices("synchronization_seconds", "synchronisation_seconds")  # as 0.1 wrote it
    )
    """Of gradients over replicas, per iteration; a part of ``iteration_seconds``."""
    uniform_seconds: Annotated[float, Field(gt=0)] | None = None
    """Predicted of the best plan whose stages all have equally many layers; None where there is none, or it was not
    looked for."""
    notes: tuple[str, ...] = ()
    """What was decided and why, for readers."""
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
                            else f"rank {rank} is twice in {place}; a group has different ranks"
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
        """Ranks in use."""
        return sum(len(stage.ranks) for replica in self.replicas for stage in replica.stages)

    @property
    def samples_per_second(self) -> float:
        """Predicted."""
        return self.global_batch / self.iteration_seconds

    @property
    def symmetric(self) -> bool:
        """Whether all replicas cut the model alike and run equally many micro-batches: what the plugin can run."""
        shapes = {(replica.micro_batches, tuple(stage.blocks for stage in replica.stages)) for replica in self.replicas}
        return len(shapes) == 1

    @property
    def rank_order(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Ranks by replica, stage and place in the tensor-parallel group; numbered as in the cluster file."""
        return tuple(tuple(stage.ranks for stage in replica.stages) for replica in self.replicas)

    @property
    def launched_order(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """:attr:`rank_order` when the plan's devices alone are launched: ranks are then 0 … ``world_size`` − 1.

        The same where the plan uses every device of its cluster file.
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
        ValueError: no such file, not JSON, of another schema, fields that are wrong, missing or unknown (all of them
            are named), or a plan that cannot be: blocks that no stage or two stages hold, a rank in two places,
            groups of another size than ``tensor_parallel``, micro-batches that are not the global batch.
    """
    text, content = read_json(path)
    if not isinstance(content, dict) or "schema" not in content:
        raise ValueError(f'{path} is not a plan: it has no "schema"')
    if content["schema"] != SCHEMA or isinstance(content["schema"], bool):
        raise ValueError(f"{path} has schema {content['schema']!r}, this version reads schema {SCHEMA}; plan again")
    if "replicas" not in content:
        raise ValueError(f'{path} is not a plan: it has no "replicas"; `colossal-hetero plan --out` writes one')
    try:
        return Plan.model_validate_json(text, strict=True)
    except ValidationError as error:
        names = {name for part in (StagePlan, Replica, Plan) for name in part.model_fields}
        raise ValueError(f"{path}: {errors_in_words(error, sorted(names))}") from None


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write a plan; the file is there as a whole or not at all."""
    write_json(plan.model_dump(mode="json", by_alias=True), path, fill=True)
