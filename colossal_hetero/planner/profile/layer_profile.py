"""The profile file (JSON) of a model's layers: their time on each kind of device, and their memory.

Between two measured micro-batches, times are interpolated linearly. If a smaller micro-batch took longer than a larger
one, its time is replaced by the shortest one of all larger ones, so that the planner does not choose by noise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from ...common.files import (
    ByteCount,
    Factor,
    FilePart,
    NonNegative,
    PositiveCount,
    Seconds,
    check_units,
    first_repeated,
    load_json_file,
    write_json,
)
from .layer_costs import LayerCosts

SCHEMA = 1

TEMPORARY_SHARE = 2.0
"""Bytes that a layer's backward pass needs for a moment, per byte that it keeps: gradients of activations, and memory
that the allocator cannot reuse. Iterations on GH200 needed this (``benchmarks/planner/measured_plans.py``)."""

UNITS = {"seconds": "s", "bytes": "B", "micro_batch": "samples"}
Units = Annotated[dict[str, str], AfterValidator(partial(check_units, read=UNITS))]
"""Units of the numbers in profiles of layers and in plans."""


class _ByLayer(FilePart):
    """Lists with one value per layer; optional ones may be empty."""

    @model_validator(mode="after")
    def _equally_long(self) -> _ByLayer:
        by_layer = {name: values for name, values in self if isinstance(values, tuple)}
        required = {name for name, field in type(self).model_fields.items() if field.is_required()}
        lengths = {name: len(values) for name, values in by_layer.items() if values or name in required}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{length} {name}" for name, length in lengths.items())
            raise ValueError(f"there are {counts}; all lists have one value per layer")
        return self


class LayerTimes(_ByLayer):
    """Seconds per layer on one kind of device, for one tensor-parallel degree and micro-batch."""

    device: Annotated[str, Field(min_length=1)]
    tensor_parallel: PositiveCount = 1
    micro_batch: PositiveCount
    forward_seconds: tuple[Seconds, ...]
    backward_seconds: tuple[Seconds, ...]
    update_seconds: tuple[Seconds, ...]
    relative_error: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Standard error of the times of all layers together, as a share of them, from repeated passes. 0: unknown."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.device, self.tensor_parallel, self.micro_batch

    @property
    def layers(self) -> int:
        return len(self.forward_seconds)


class LayerSizes(_ByLayer):
    """Bytes per layer and device, for one tensor-parallel degree."""

    tensor_parallel: PositiveCount = 1
    parameter_bytes: tuple[ByteCount, ...]
    activation_bytes: tuple[ByteCount, ...]
    output_bytes: tuple[ByteCount, ...]
    """By layer: passed on to the next layer, per sample."""
    temporary_bytes: tuple[ByteCount, ...] = ()
    """By layer: needed for a moment beside what is kept, per sample. Empty: :data:`TEMPORARY_SHARE` of activations."""
    fixed_temporary_bytes: tuple[ByteCount, ...] = ()
    """By layer: needed for a moment in addition, for any micro-batch, such as gradients before they are added."""
    forward_sums: tuple[ByteCount, ...] = ()
    """By layer: sums in a forward pass that ``times`` do not contain, each of the largest of ``output_bytes``."""
    backward_sums: tuple[ByteCount, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.parameter_bytes)

    def temporaries(self, micro_batch: int) -> NDArray[np.float64]:
        """Bytes that each layer needs for a moment, measured or estimated, ``[layers]``."""
        if self.temporary_bytes:
            per_sample = np.asarray(self.temporary_bytes, dtype=float)
        else:
            per_sample = TEMPORARY_SHARE * np.asarray(self.activation_bytes, dtype=float)
        fixed = np.asarray(self.fixed_temporary_bytes or 0, dtype=float)
        return np.asarray(per_sample * micro_batch + fixed)


class ModelProfile(FilePart):
    """Times and sizes of a model's layers, in their order. The model is cut into stages between its blocks."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    units: Units = Field(default_factory=lambda: dict(UNITS))
    name: str
    precision: str = "fp32"
    before: NonNegative = 1
    """Layers before the first block, such as the embedding."""
    after: NonNegative = 1
    """Layers after the last block, such as the head."""
    state_factor: Factor = 4.0
    """Bytes of parameters, gradients and optimizer state together, per byte of parameters: 4 for Adam in fp32."""
    master_copies: bool = False
    """True if ``state_factor`` counts fp32 copies of parameters in fp32 too; in half precision it always does."""
    gradient_factor: Factor = 1.0
    """Bytes of gradients that replicas sum, per byte of parameters."""
    source: str = ""
    rank_devices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Kind of device by rank, if the profile was measured by ranks; else empty."""
    context_bytes: dict[str, ByteCount] = Field(default_factory=dict)
    """By kind of device: memory in use beside the allocator's (context, libraries). Plans reserve at least this."""
    times: Annotated[tuple[LayerTimes, ...], Field(min_length=1)]
    sizes: Annotated[tuple[LayerSizes, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> ModelProfile:
        degrees = [sizes.tensor_parallel for sizes in self.sizes]
        if (duplicate := first_repeated(degrees)) is not None:
            raise ValueError(f"sizes has two entries of tensor_parallel {duplicate}; keep one")
        if (key := first_repeated([times.key for times in self.times])) is not None:
            raise ValueError(f"times has two entries of {_in_words(*key)}; keep one")
        named = [(f"sizes[{index}]", sizes.layers) for index, sizes in enumerate(self.sizes)]
        named += [(f"times[{index}]", times.layers) for index, times in enumerate(self.times)]
        for name, layers in named:
            if layers != self.layers:
                raise ValueError(
                    f"{name} has {layers} layers, sizes[0] has {self.layers}; all lists have one value per layer, "
                    "embedding and head included"
                )
        for index, times in enumerate(self.times):
            if times.tensor_parallel not in degrees:
                raise ValueError(
                    f"times[{index}] is at tensor_parallel {times.tensor_parallel}, but no sizes have that degree "
                    f"(sizes has {_listed(sorted(degrees))}); give both"
                )
        if self.blocks < 1:
            raise ValueError(
                f"{self.before} of {self.layers} layers are before the blocks and {self.after} after them, so "
                "there is no block; there must be at least one"
            )
        for what in ("rank_devices", "context_bytes"):
            unknown = next((device for device in getattr(self, what) if device not in self.devices), None)
            if unknown is not None:
                raise ValueError(f"{what} names {unknown}, but there are only times of {', '.join(self.devices)}")
        return self

    def __copy__(self) -> ModelProfile:
        # The copy may have other numbers, so it starts with empty caches.
        copied = super().__copy__()
        for name in ("_costs", "_measured", "devices"):
            copied.__dict__.pop(name, None)
        return copied

    @property
    def layers(self) -> int:
        return self.sizes[0].layers

    @property
    def blocks(self) -> int:
        return self.layers - self.before - self.after

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(times.device for times in self.times))

    def tensor_parallel_degrees(self, device: str) -> tuple[int, ...]:
        if device not in self.devices:
            close = get_close_matches(device, self.devices, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; measure it, or name one of these in the cluster file"
            raise ValueError(f"the profile has no times of device {device!r}, only of {', '.join(self.devices)}{hint}")
        return tuple(sorted({times.tensor_parallel for times in self.times if times.device == device}))

    def micro_batches(self, device: str, tensor_parallel: int) -> tuple[int, ...]:
        """Ascending; :meth:`costs` accepts all sizes from the first to the last."""
        return self._of(device, tensor_parallel).micro_batches

    def relative_error(self, device: str, tensor_parallel: int, micro_batch: int) -> float:
        """Standard error as a share of the times; between two measured micro-batches the larger one."""
        measured = self._of(device, tensor_parallel)
        return max(measured.times[place].relative_error for place in measured.around(micro_batch))

    def costs(
        self,
        device: str,
        tensor_parallel: int,
        micro_batch: int,
        speed: float = 1.0,
        *,
        recompute: bool = False,
        zero_shards: int = 1,
    ) -> LayerCosts:
        """Costs per block of a stage, on a device that reaches the share ``speed`` of its kind's speed.

        The optimizer's state is in ``zero_shards`` parts. Equal arguments return the same object, with read-only
        arrays, and the planner takes slots with the same object for interchangeable.
        """
        key = (device, tensor_parallel, micro_batch, speed, recompute, zero_shards)
        if key not in self._costs:
            if zero_shards > 1:
                made = self.costs(device, tensor_parallel, micro_batch, speed, recompute=recompute)
                # In fp32, ZeRO copies its part of the parameters, which a profile with master copies counts already.
                copies = self.precision == "fp32" and not self.master_copies
                made = made.sharded(zero_shards, self.state_factor, copies=copies)
            elif recompute:
                made = self.costs(device, tensor_parallel, micro_batch, speed).recomputed()
            else:
                made = self._make_costs(device, tensor_parallel, micro_batch, speed)
            for value in vars(made).values():
                if isinstance(value, np.ndarray):
                    value.flags.writeable = False
            self._costs[key] = made
        return self._costs[key]

    @cached_property
    def _costs(self) -> dict[object, LayerCosts]:
        return {}

    @cached_property
    def _measured(self) -> dict[tuple[str, int], _Measured]:
        return {}

    def _of(self, device: str, tensor_parallel: int) -> _Measured:
        key = (device, tensor_parallel)
        if key not in self._measured:
            degrees = self.tensor_parallel_degrees(device)
            if tensor_parallel not in degrees:
                raise ValueError(
                    f"{device} was not measured at tensor_parallel {tensor_parallel}; it was at {_listed(degrees)}"
                )
            found = [times for times in self.times if (times.device, times.tensor_parallel) == key]
            self._measured[key] = _Measured.of(sorted(found, key=lambda times: times.micro_batch))
        return self._measured[key]

    def _make_costs(self, device: str, tensor_parallel: int, micro_batch: int, speed: float) -> LayerCosts:
        if not speed > 0:
            raise ValueError(f"speed={speed}: must be above 0")
        measured = self._of(device, tensor_parallel)
        known = measured.micro_batches
        if not known[0] <= micro_batch <= known[-1]:
            valid = f"{known[0]} to {known[-1]}" if len(known) > 1 else known[0]
            raise ValueError(
                f"{_in_words(device, tensor_parallel, micro_batch)} is outside of what was measured "
                f"({_listed(known)}); use {valid}, or measure it"
            )
        seconds = measured.interpolated(micro_batch) / speed
        update, forward, backward = seconds.reshape(3, self.layers)
        sizes = next(each for each in self.sizes if each.tensor_parallel == tensor_parallel)
        parameters = self._by_block(sizes.parameter_bytes)
        activations = self._by_block(sizes.activation_bytes) * micro_batch
        temporaries = sizes.temporaries(micro_batch)
        inner = temporaries[self.before : self.layers - self.after].max()
        # The last stage holds one micro-batch, so what only its last layers need for a moment counts like activations.
        activations[-1] += max(temporaries[self.layers - self.after :].max(initial=0.0) - inner, 0.0)
        return LayerCosts(
            forward_seconds=self._by_block(forward),
            backward_seconds=self._by_block(backward),
            update_seconds=self._by_block(update),
            state_bytes=parameters * self.state_factor,
            gradient_bytes=parameters * self.gradient_factor,
            activation_bytes=activations,
            output_bytes=self._by_block(sizes.output_bytes, ends=False) * micro_batch,
            temporary_bytes=float(inner),
            # Buckets have the type of the parameters.
            bucket_bytes=float(parameters.sum()),
        )

    def _by_block(self, values: Sequence[float] | NDArray[np.float64], ends: bool = True) -> NDArray[np.float64]:
        """Values by block. With ``ends``, layers before and after the blocks are added to the outer blocks."""
        array = np.asarray(values, dtype=float)
        stop = len(array) - self.after
        blocks: NDArray[np.float64] = array[self.before : stop].copy()
        if ends:
            blocks[0] += array[: self.before].sum()
            blocks[-1] += array[stop:].sum()
        return blocks


class _Measured(NamedTuple):
    """Times of one kind of device at one tensor-parallel degree, by micro-batch, ascending."""

    times: tuple[LayerTimes, ...]
    micro_batches: tuple[int, ...]
    seconds: NDArray[np.float64]
    """Update, forward and backward by layer, ``[micro-batches, 3 layers]``. Apart from updates, they do not fall as
    micro-batches grow."""

    @classmethod
    def of(cls, times: Sequence[LayerTimes]) -> _Measured:
        passes = np.array([[*each.forward_seconds, *each.backward_seconds] for each in times])
        passes = np.minimum.accumulate(passes[::-1], axis=0)[::-1]
        updates = np.array([each.update_seconds for each in times])
        return cls(tuple(times), tuple(each.micro_batch for each in times), np.hstack([updates, passes]))

    def around(self, micro_batch: int) -> tuple[int, int]:
        """Places of the next smaller and the next larger measured micro-batch, the same one if it was measured."""
        above = min(bisect_left(self.micro_batches, micro_batch), len(self.times) - 1)
        return (above if self.micro_batches[above] <= micro_batch else max(above - 1, 0)), above

    def interpolated(self, micro_batch: int) -> NDArray[np.float64]:
        below, above = self.around(micro_batch)
        start, stop = self.micro_batches[below], self.micro_batches[above]
        share = (micro_batch - start) / max(stop - start, 1)
        return np.asarray(self.seconds[below] + share * (self.seconds[above] - self.seconds[below]))


def load_profile(path: Path | str) -> ModelProfile:
    def other_kind(content: Mapping[str, object]) -> str | None:
        is_of_batches = "kinds" in content and "times" not in content
        message = "it is a profile of batches; make a profile of layers with colossal-hetero profile"
        return message if is_of_batches else None

    words = {"kind": "profile of layers", "remedy": "make a new profile"}
    return load_json_file(path, ModelProfile, **words, schema=SCHEMA, other_kind=other_kind)


def save_profile(profile: ModelProfile, path: Path | str) -> None:
    write_json(profile.model_dump(mode="json", by_alias=True), path)


def _in_words(device: str, tensor_parallel: int, micro_batch: int) -> str:
    return f"micro-batch {micro_batch} on {device} at tensor_parallel {tensor_parallel}"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
