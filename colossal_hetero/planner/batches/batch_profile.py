"""The batch profile, a file with each device's memory, its largest micro-batch and its time by micro-batch size.

Equal devices share one entry: ``kinds`` describes the kinds of device, ``ranks`` gives the kind of each rank. Names of
times and sizes end with their unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field, field_validator, model_validator

from ...common.files import (
    ByteCount,
    FilePart,
    Flops,
    NonNegative,
    PositiveCount,
    PositiveSeconds,
    Seconds,
    check_units,
    first_repeated,
    load_json_file,
    write_json,
)
from ...common.text import spans
from ..cluster.topology import MeasuredLink
from .time_curve import Curve

SCHEMA = 1
UNITS = {"seconds": "s", "bytes": "B", "batch": "samples", "flops": "FLOP/s", "bytes_per_second": "B/s"}
PASSES = (2, 1, 1, 3)
"""Passes of the model's bytes over the network in one synchronization, by stage (ZeRO, section 7). An all-reduce takes
two, the reduce-scatter of gradients one; stage 3 also gathers the parameters for forward and for backward (not for
backward, if FSDP has the whole model in one unit, without an ``auto_wrap_policy``). Stages 1 and 2 gather the
parameters after the step; that takes the same time for every division of the batch, and is left out."""
MAX_PREDICTED = 65_536  # largest micro-batch, in samples, of a curve, unless a larger global batch is to be divided

Stage = Annotated[int, Field(ge=0, le=3)]


class TimedBatch(FilePart):
    """Measured time of one micro-batch, forward and backward, without the time inside collectives."""

    batch: PositiveCount
    seconds: PositiveSeconds


class DeviceProfile(FilePart):
    """One kind of device: its memory and its measured times."""

    device: Annotated[str, Field(min_length=1)]
    """Name, e.g. "NVIDIA A100-SXM4-40GB" or "cpu"."""
    host: str = ""
    memory_bytes: Annotated[ByteCount, Field(ge=1)]
    """Memory that the process may use for training, without the reserve that is kept free."""
    state_bytes: ByteCount
    """Memory used before a micro-batch runs: parameters, gradients and optimizer state at the profile's stage."""
    sample_bytes: ByteCount
    max_batch: NonNegative
    """Largest micro-batch that ran; 0 if not even ``min_batch`` samples fit. May be lowered by hand."""
    memory_bound: bool
    """True if one more sample ran out of memory; False if the search ended there."""
    min_batch: PositiveCount = 1
    """Samples of the smallest micro-batch; 2 if a batch normalization has one value per sample and channel."""
    points: tuple[TimedBatch, ...]
    step_seconds: Seconds | None = None
    """Time of the optimizer's step at the profile's stage, without collectives; None if it was not measured."""
    flops: Flops | None = None
    protocols: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = ("gloo",)

    @field_validator("points")
    @classmethod
    def _ascending(cls, points: tuple[TimedBatch, ...]) -> tuple[TimedBatch, ...]:
        if (duplicate := first_repeated([point.batch for point in points])) is not None:
            raise ValueError(f"duplicate batch {duplicate}; keep one time for each size")
        return tuple(sorted(points, key=lambda point: point.batch))

    @model_validator(mode="after")
    def _measured(self) -> DeviceProfile:
        if self.max_batch > 0 and not self.points:
            raise ValueError(f"max_batch={self.max_batch}, but there are no points; measure at least two sizes")
        return self

    @property
    def measured_batch(self) -> int:
        """Largest micro-batch that was timed; above it the curve is extrapolated by a straight line."""
        return self.points[-1].batch if self.points else 0

    def curve(self, max_batch: int) -> Curve:
        if max_batch < self.min_batch:
            return Curve(np.ones(1), self.min_batch)  # the device never runs
        try:
            points = {point.batch: point.seconds for point in self.points}
            return Curve.through(points, max_batch, self.min_batch)
        except ValueError as error:
            raise ValueError(f"device {self.device}: {error}") from None


class ModelIdentity(FilePart):
    """The measured model; all sizes are those of the unsharded model."""

    name: str
    parameters: Annotated[ByteCount, Field(ge=1)]
    parameter_bytes: ByteCount
    gradient_bytes: ByteCount
    optimizer_bytes: ByteCount
    """Bytes of the optimizer's state, including fp32 copies of the parameters."""
    digest: str
    """Hash of the names, shapes and dtypes of its parameters."""


class BatchProfile(FilePart):
    """Memory limits and times of every rank, for one model at one stage of ZeRO."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    units: Annotated[dict[str, str], AfterValidator(partial(check_units, read=UNITS))] = Field(
        default_factory=lambda: dict(UNITS)
    )
    stage: Stage
    precision: str
    """``fp32``, ``fp16`` or ``bf16``."""
    model: ModelIdentity
    communication_seconds: Seconds
    """Time of a synchronization: one per global batch at stages 0 and 1, one per micro-step at stages 2 and 3."""
    kinds: Annotated[tuple[DeviceProfile, ...], Field(min_length=1)]
    ranks: Annotated[tuple[int, ...], Field(min_length=1)]
    links: tuple[MeasuredLink, ...] = ()

    @model_validator(mode="after")
    def _indices(self) -> BatchProfile:
        for rank, kind in enumerate(self.ranks):
            if not 0 <= kind < len(self.kinds):
                raise ValueError(f"ranks[{rank}] is kind {kind}, but kinds are numbered 0 to {len(self.kinds) - 1}")
        for index, link in enumerate(self.links):
            if max(link.ranks) >= len(self.ranks):
                raise ValueError(
                    f"links[{index}] joins ranks {link.ranks[0]} and {link.ranks[1]}, "
                    f"but ranks are numbered 0 to {len(self.ranks) - 1}"
                )
        return self

    @property
    def devices(self) -> list[str]:
        return [self.kinds[kind].device for kind in self.ranks]

    @property
    def flops(self) -> list[float] | None:
        return self._known(kind.flops for kind in self.kinds)

    def step_seconds(self, stage: int) -> list[float] | None:
        """Time of the optimizer's step by rank; from stage 1 on, a rank steps with its part of the parameters."""
        part, measured = (len(self.ranks) if each else 1 for each in (stage, self.stage))
        known = self._known(kind.step_seconds for kind in self.kinds)
        return known and [seconds * measured / part for seconds in known]

    def _known(self, by_kind: Iterable[float | None]) -> list[float] | None:
        values = list(by_kind)
        by_rank = [values[kind] for kind in self.ranks]
        return None if None in by_rank else by_rank  # type: ignore[return-value]

    def communication(self, stage: int) -> float:
        """Seconds of one synchronization at ``stage``; if another stage was measured, scaled by :data:`PASSES`."""
        return self.communication_seconds * PASSES[stage] / PASSES[self.stage]

    def state_bytes(self, stage: int, sharing_ranks: int | None = None) -> list[int]:
        """Bytes used before a micro-batch runs, by kind, at any stage and with any number of ranks."""
        count = len(self.ranks)
        change = state_bytes(self.model, stage, sharing_ranks or count) - state_bytes(self.model, self.stage, count)
        return [max(kind.state_bytes + change, 0) for kind in self.kinds]

    def kind_max_batches(self, stage: int, largest: int = MAX_PREDICTED, sharing_ranks: int | None = None) -> list[int]:
        """Largest micro-batch by kind: as measured, or predicted from memory at another stage or with fewer ranks."""
        batches = []
        for kind, state in zip(self.kinds, self.state_bytes(stage, sharing_ranks), strict=True):
            batch = kind.max_batch
            if state != kind.state_bytes and kind.sample_bytes > 0:
                fits = (kind.memory_bytes - state) // kind.sample_bytes
                if kind.memory_bound:
                    # If memory was the limit, the measured error of this arithmetic is assumed here too.
                    fits += batch - max((kind.memory_bytes - kind.state_bytes) // kind.sample_bytes, 0)
                elif state <= kind.state_bytes:
                    fits = max(fits, batch)
                batch = max(fits, 0)
            batches.append(min(batch, largest))
        return batches

    def curves(
        self, stage: int, largest: int = MAX_PREDICTED, *, sharing_ranks: int | None = None, allow_empty: bool = False
    ) -> list[Curve]:
        """The time curve of each rank up to a micro-batch of ``largest``; ranks of a kind share one object."""
        batches = self.kind_max_batches(stage, largest, sharing_ranks)
        curves = {}
        for kind in sorted(set(self.ranks)):
            if batches[kind] < self.kinds[kind].min_batch and not allow_empty:
                raise ValueError(self._does_not_fit(kind, stage))
            curves[kind] = self.kinds[kind].curve(batches[kind])
        return [curves[kind] for kind in self.ranks]

    def of_ranks(self, ranks: Sequence[int], communication_seconds: float) -> BatchProfile:
        """The profile if only ``ranks`` train, numbered anew in this order; memory is predicted if they are fewer."""
        number = {rank: index for index, rank in enumerate(ranks)}
        states, batches = (
            self.state_bytes(self.stage, len(ranks)),
            self.kind_max_batches(self.stage, sharing_ranks=len(ranks)),
        )
        parts = len(self.ranks) / len(ranks) if self.stage else 1.0
        kinds = tuple(
            kind.model_copy(
                update={
                    "state_bytes": state,
                    "max_batch": batch,
                    "step_seconds": kind.step_seconds and kind.step_seconds * parts,
                }
            )
            for kind, state, batch in zip(self.kinds, states, batches, strict=True)
        )
        links = tuple(
            link.model_copy(update={"ranks": tuple(number[rank] for rank in link.ranks)})
            for link in self.links
            if all(rank in number for rank in link.ranks)
        )
        return self.model_copy(
            update={
                "communication_seconds": communication_seconds,
                "kinds": kinds,
                "ranks": tuple(self.ranks[rank] for rank in ranks),
                "links": links,
            }
        )

    def check_fits(self, devices: Sequence[str], model_digest: str, *, stage: int, precision: str) -> None:
        if len(devices) != len(self.ranks):
            raise ValueError(f"the profile is of {len(self.ranks)} ranks, but there are {len(devices)}; {REPROFILE}")
        for rank, (here, there) in enumerate(zip(devices, self.devices, strict=True)):
            if here != there:
                raise ValueError(
                    f"the profile is of other devices: rank {rank} was {there}, now it is {here}; {REPROFILE}"
                )
        if model_digest != self.model.digest:
            raise ValueError(
                f"the profile is of another model ({self.model.name}, {self.model.parameters:,} parameters, digest "
                f"{self.model.digest}; the digest of this model is {model_digest}); {REPROFILE}"
            )
        for name, wanted, value in (("stage", stage, self.stage), ("precision", precision, self.precision)):
            if wanted != value:
                raise ValueError(f"the profile was made at {name} {value}, not {wanted}; {REPROFILE}")

    def _does_not_fit(self, kind: int, stage: int) -> str:
        device = self.kinds[kind]
        ranks = [rank for rank, each in enumerate(self.ranks) if each == kind]
        few, fit = ("one sample", "fits") if device.min_batch == 1 else (f"{device.min_batch} samples", "fit")
        remedy = "at higher stages no sample fits either"
        for higher in range(stage + 1, len(PASSES)):
            batches = self.kind_max_batches(higher)
            if min(batches[each] for each in self.ranks) >= device.min_batch:
                remedy = f"at stage {higher} {few} {fit}"
                break
        return (
            f"{'ranks' if len(ranks) > 1 else 'rank'} {spans(ranks)} ({device.device}) cannot hold {few} at stage "
            f"{stage}: of {device.memory_bytes / 2**30:.2f} GiB, the state takes "
            f"{self.state_bytes(stage)[kind] / 2**30:.2f} GiB and a sample {device.sample_bytes / 2**30:.2f} GiB; "
            f"{remedy}; otherwise leave that device out"
        )


REPROFILE = "make a new profile, or give the profile of this model and these devices"


def state_bytes(model: ModelIdentity, stage: int, ranks: int) -> int:
    """Bytes of parameters P, gradients G and optimizer state O on each of N ranks (ZeRO, Fig. 1), rounded up.

    Stage 0: P + G + O; 1: P + G + O/N; 2: P + (G + O)/N; 3: (P + G + O)/N.
    """
    if stage not in range(len(PASSES)):
        raise ValueError(f"ZeRO has no stage {stage}; its stages are 0, 1, 2 and 3")
    parts = (model.optimizer_bytes, model.gradient_bytes, model.parameter_bytes)
    return sum(parts[stage:]) - (-sum(parts[:stage]) // ranks)


def load_profile(path: Path | str) -> BatchProfile:
    return load_json_file(path, BatchProfile, kind="profile", schema=SCHEMA, remedy="make a new profile")


def save_profile(profile: BatchProfile, path: Path | str) -> None:
    write_json(profile.model_dump(mode="json", by_alias=True), path)
