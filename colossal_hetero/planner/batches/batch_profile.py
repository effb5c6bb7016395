"""The profile file of uneven batches: what each device can hold, and how long it takes.

The file is JSON, made to be read, reused and edited. Devices that are alike need one entry: ``kinds`` describes them,
``ranks`` says which kind each rank is. Times and bytes carry their unit in the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from ...io.json_files import check_units, write_json
from ...io.schema import FilePart, load_json_file
from ...io.text import spans
from ..cluster.link import MeasuredLink
from .time_curve import Curve

__all__ = [
    "SCHEMA",
    "BatchProfile",
    "DeviceProfile",
    "ModelIdentity",
    "Point",
    "load_profile",
    "save_profile",
    "state_bytes",
]

SCHEMA = 1
"""Version of the file's layout."""

UNITS = {"seconds": "s", "bytes": "B", "batch": "samples", "flops": "FLOP/s", "bytes_per_second": "B/s"}

PASSES = (2, 2, 1, 3)
"""How often the model's bytes cross the network in one synchronization, by stage (ZeRO, section 7): an all-reduce is
two passes, the reduce-scatter of gradients one; stage 3 gathers the parameters for forward and for backward as well.
What stage 2 gathers once per global batch is the same for every allocation and is left out."""

MAX_PREDICTED = 65_536
"""Largest micro-batch, in samples, that is predicted for a stage that was not measured."""

Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Stage = Annotated[int, Field(ge=0, le=3)]


class Point(FilePart):
    """How long one micro-batch took, forward and backward, the time inside collectives left out."""

    batch: Annotated[int, Field(ge=1)]
    """Samples."""
    seconds: Seconds
    forward_seconds: Seconds | None = None
    """The part of ``seconds`` that went into forward."""

    @model_validator(mode="after")
    def _forward_is_a_part(self) -> Point:
        if self.forward_seconds is not None and self.forward_seconds > self.seconds:
            raise ValueError(f"forward_seconds={self.forward_seconds} is more than seconds={self.seconds}, its whole")
        return self


class DeviceProfile(FilePart):
    """One kind of device: its memory and its measured times."""

    device: Annotated[str, Field(min_length=1)]
    """Name, e.g. "NVIDIA A100-SXM4-40GB" or "cpu"."""
    host: str = ""
    memory_bytes: Annotated[int, Field(ge=1)]
    """What the process may use."""
    state_bytes: Bytes
    """Used before a micro-batch: parameters, gradients and optimizer state at the profile's stage."""
    sample_bytes: Bytes
    """More per sample of a micro-batch."""
    max_batch: Annotated[int, Field(ge=0)]
    """Largest micro-batch that ran; 0: not even one sample fits. May be lowered by hand."""
    memory_bound: bool
    """True: one sample more ran out of memory; False: the search ended at the global batch size."""
    points: tuple[Point, ...]
    """By ascending batch."""
    flops: Annotated[float, Field(gt=0)] | None = None
    """Nominal or measured FLOP/s, for method ``flops``."""
    protocols: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = ("gloo",)
    """What it communicates by; ("nccl", "gloo") for a GPU."""

    @field_validator("points")
    @classmethod
    def _ascending(cls, points: tuple[Point, ...]) -> tuple[Point, ...]:
        batches = [point.batch for point in points]
        twice = sorted({batch for batch in batches if batches.count(batch) > 1})
        if twice:
            raise ValueError(f"batch {twice[0]} is there twice; keep one time for each size")
        return tuple(sorted(points, key=lambda point: point.batch))

    @model_validator(mode="after")
    def _measured(self) -> DeviceProfile:
        if self.max_batch > 0 and not self.points:
            raise ValueError(f"max_batch={self.max_batch}, but there are no points; measure at least two sizes")
        return self

    @property
    def measured_batch(self) -> int:
        """Largest micro-batch that was timed; beyond it the curve is a straight line."""
        return self.points[-1].batch if self.points else 0

    def curve(self, max_batch: int) -> Curve:
        """Seconds by samples, up to ``max_batch``.

        Raises:
            ValueError: the points make no curve; the message names the device, the points and the remedy.
        """
        if max_batch == 0:
            return Curve(np.ones(1))  # of a device that never runs
        try:
            longest = max(self.measured_batch, max_batch)
            return Curve.through({point.batch: point.seconds for point in self.points}, longest).limited(max_batch)
        except ValueError as error:
            raise ValueError(f"device {self.device}: {error}") from None


class ModelIdentity(FilePart):
    """The model that was measured, unsharded."""

    name: str
    parameters: Annotated[int, Field(ge=1)]
    """How many."""
    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    digest: str
    """Of the names, shapes and dtypes of its parameters."""


class BatchProfile(FilePart):
    """What each rank can hold and how long it takes for it, for one model at one stage of ZeRO."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    units: dict[str, str] = Field(default_factory=lambda: dict(UNITS))
    """For readers of the file."""
    stage: Stage
    precision: str
    model: ModelIdentity
    communication_seconds: Annotated[float, Field(ge=0)]
    """Of one synchronization at this stage: once per global batch at stages 0 and 1, per micro-step at 2 and 3."""
    kinds: Annotated[tuple[DeviceProfile, ...], Field(min_length=1)]
    ranks: Annotated[tuple[int, ...], Field(min_length=1)]
    """Index into ``kinds``, by rank."""
    links: tuple[MeasuredLink, ...] = ()

    @field_validator("units")
    @classmethod
    def _units_as_read(cls, units: dict[str, str]) -> dict[str, str]:
        check_units(units, UNITS)
        return units

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
        """Names of the devices, by rank."""
        return [self.kinds[kind].device for kind in self.ranks]

    @property
    def flops(self) -> list[float] | None:
        """FLOP/s by rank; None unless every rank's are known."""
        values = [self.kinds[kind].flops for kind in self.ranks]
        known = [value for value in values if value is not None]
        return known if len(known) == len(values) else None

    def communication(self, stage: int | None = None) -> float:
        """Seconds of one synchronization at ``stage``; scaled by :data:`PASSES` where another one was measured."""
        stage = self._checked(stage)
        return self.communication_seconds * PASSES[stage] / PASSES[self.stage]

    def state_bytes(self, stage: int | None = None, taking_part: int | None = None) -> list[int]:
        """Bytes used before a micro-batch, by kind; at another stage or with fewer ranks as ZeRO shards.

        Args:
            stage: None is the profile's.
            taking_part: how many ranks share the state; None is all.
        """
        stage = self._checked(stage)
        count = len(self.ranks)
        taking_part = count if taking_part is None else taking_part
        change = state_bytes(self.model, stage, taking_part) - state_bytes(self.model, self.stage, count)
        return [max(kind.state_bytes + change, 0) for kind in self.kinds]

    def kind_max_batches(
        self, stage: int | None = None, largest: int | None = None, taking_part: int | None = None
    ) -> list[int]:
        """Largest micro-batch by kind: as measured, or predicted from memory at another stage or with fewer ranks.

        Where memory was the limit, the prediction is corrected by how far it is off at the profile's stage.

        Args:
            stage: None is the profile's.
            largest: no more than that many, e.g. the global batch size.
            taking_part: how many ranks share the state; None is all.
        """
        stage = self._checked(stage)
        batches = []
        for kind, state in zip(self.kinds, self.state_bytes(stage, taking_part), strict=True):
            batch = kind.max_batch
            if state != kind.state_bytes and kind.sample_bytes > 0:
                fits = (kind.memory_bytes - state) // kind.sample_bytes
                if kind.memory_bound:
                    # What arithmetic misses as measured, it misses elsewhere.
                    fits += batch - max((kind.memory_bytes - kind.state_bytes) // kind.sample_bytes, 0)
                elif state <= kind.state_bytes:
                    fits = max(fits, batch)
                batch = min(max(fits, 0), MAX_PREDICTED)
            batches.append(batch if largest is None else min(batch, largest))
        return batches

    def max_batches(self, stage: int | None = None, largest: int | None = None) -> list[int]:
        """:meth:`kind_max_batches`, by rank."""
        batches = self.kind_max_batches(stage, largest)
        return [batches[kind] for kind in self.ranks]

    def curves(
        self,
        stage: int | None = None,
        largest: int | None = None,
        *,
        taking_part: int | None = None,
        allow_none: bool = False,
    ) -> list[Curve]:
        """A curve per rank, one object for all ranks of a kind.

        Args:
            stage: of ZeRO; None is the profile's.
            largest: micro-batches need not be larger than that, e.g. the global batch size.
            taking_part: how many ranks share the state; None is all.
            allow_none: give a device that holds no sample a curve with ``max_batch == 0`` instead of raising.

        Raises:
            ValueError: a device holds no sample at that stage, or its points make no curve.
        """
        stage = self._checked(stage)
        used = set(self.ranks)
        batches = self.kind_max_batches(stage, largest, taking_part)
        for kind in sorted(used):
            if batches[kind] < 1 and not allow_none:
                raise ValueError(self._does_not_fit(kind, stage))
        curves = {kind: self.kinds[kind].curve(batches[kind]) for kind in sorted(used)}
        return [curves[kind] for kind in self.ranks]

    def check_fits(
        self, devices: Sequence[str], model_digest: str, *, stage: int | None = None, precision: str | None = None
    ) -> None:
        """Whether the profile was made of this model on these devices.

        Args:
            devices: names, by rank.
            model_digest: of the model that is to be trained.
            stage: None does not compare it, likewise ``precision``.

        Raises:
            ValueError: it was not; the message says what differs and what to do.
        """
        if len(devices) != len(self.ranks):
            raise ValueError(f"the profile is of {len(self.ranks)} ranks, these are {len(devices)}; {REPROFILE}")
        for rank, (here, there) in enumerate(zip(devices, self.devices, strict=True)):
            if here != there:
                raise ValueError(f"the profile is of other devices: rank {rank} was {there}, is {here}; {REPROFILE}")
        if model_digest != self.model.digest:
            raise ValueError(
                f"the profile is of another model ({self.model.name}, {self.model.parameters:,} parameters, digest "
                f"{self.model.digest}; this one's is {model_digest}); {REPROFILE}"
            )
        for name, wanted, value in (("stage", stage, self.stage), ("precision", precision, self.precision)):
            if wanted is not None and wanted != value:
                raise ValueError(f"the profile was made at {name} {value}, not {wanted}; {REPROFILE}")

    def _checked(self, stage: int | None) -> int:
        if stage is None:
            return self.stage
        if stage not in range(len(PASSES)):
            raise ValueError(f"there is no stage {stage} of ZeRO; stages are 0, 1, 2 and 3")
        return stage

    def _does_not_fit(self, kind: int, stage: int) -> str:
        device = self.kinds[kind]
        own = [rank for rank, each in enumerate(self.ranks) if each == kind]
        names = (
            f"ranks {spans(own)} ({device.device}) hold" if len(own) > 1 else f"rank {own[0]} ({device.device}) holds"
        )
        used = set(self.ranks)
        better = [
            other
            for other in range(stage + 1, len(PASSES))
            if all(batch > 0 for own, batch in enumerate(self.kind_max_batches(other)) if own in used)
        ]
        remedy = f"stage {better[0]} would hold one" if better else "no higher stage holds one either"
        return (
            f"{names} no sample at stage {stage}: of {device.memory_bytes / 2**30:.2f} "
            f"GiB the state takes {self.state_bytes(stage)[kind] / 2**30:.2f} GiB and a sample "
            f"{device.sample_bytes / 2**30:.2f} GiB; {remedy}, or leave that device out"
        )


REPROFILE = "make a new profile, or give the profile that belongs to them"


def state_bytes(model: ModelIdentity, stage: int, ranks: int) -> int:
    """Bytes of parameters P, gradients G and optimizer state O on one of N ranks (ZeRO, Fig. 1), rounded up.

    Stage 0: P + G + O; 1: P + G + O/N; 2: P + (G + O)/N; 3: (P + G + O)/N.
    """
    parts = (model.optimizer_bytes, model.gradient_bytes, model.parameter_bytes)
    return sum(parts[stage:]) - (-sum(parts[:stage]) // ranks)


def load_profile(path: Path | str) -> BatchProfile:
    """Read a profile.

    Raises:
        ValueError: no such file, not JSON, of another schema, or fields that are wrong, missing or unknown; all of
            them are named.
    """
    return load_json_file(path, BatchProfile, kind="profile", schema=SCHEMA, remedy="make a new profile")


def save_profile(profile: BatchProfile, path: Path | str) -> None:
    """Write a profile; the file is there as a whole or not at all."""
    write_json(profile.model_dump(mode="json", by_alias=True), path)
