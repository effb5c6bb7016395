"""The profile file of a model's layers: how long each takes on each kind of device, and how much memory.

JSON, made to be read, reused and edited. Times and bytes carry their unit in the name.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from .pipeline import LayerCosts

__all__ = ["LayerSizes", "LayerTimes", "ModelProfile"]

UNITS = {"seconds": "s", "bytes": "B", "micro_batch": "samples"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class LayerTimes(_Part):
    """Seconds per layer on one kind of device, for one tensor-parallel degree and micro-batch."""

    device: Annotated[str, Field(min_length=1)]
    """Kind, as in the cluster file."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    micro_batch: Annotated[int, Field(ge=1)]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]


class LayerSizes(_Part):
    """Bytes per layer and device, for one tensor-parallel degree; activations per sample."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    parameter_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]


class ModelProfile(_Part):
    """A model's layers in order; the first ``before`` and the last ``after`` are no blocks (embedding, head)."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    units: dict[str, str] = Field(default_factory=lambda: dict(UNITS))
    name: str
    precision: str = "fp32"
    before: Annotated[int, Field(ge=0)] = 1
    after: Annotated[int, Field(ge=0)] = 1
    state_factor: Annotated[float, Field(gt=0)] = 4.0
    """Bytes of parameters, gradients and optimizer state together, per byte of parameters: 4 for Adam in fp32."""
    gradient_factor: Annotated[float, Field(gt=0)] = 1.0
    """Bytes that replicas sum per byte of parameters."""
    times: Annotated[tuple[LayerTimes, ...], Field(min_length=1)]
    sizes: Annotated[tuple[LayerSizes, ...], Field(min_length=1)]

    @property
    def layers(self) -> int:
        """All of them, embedding and head included."""
        return len(self.sizes[0].parameter_bytes)

    @property
    def blocks(self) -> int:
        """Layers between which the model can be cut."""
        return self.layers - self.before - self.after

    def costs(self, device: str, tensor_parallel: int, micro_batch: int, speed: float = 1.0) -> LayerCosts:
        """Per block, for a device that reaches ``speed`` of its kind's speed.

        Raises:
            ValueError: that kind, degree or micro-batch was not measured; the message says what was.
        """
        times = next(
            each
            for each in self.times
            if (each.device, each.tensor_parallel, each.micro_batch) == (device, tensor_parallel, micro_batch)
        )
        sizes = next(each for each in self.sizes if each.tensor_parallel == tensor_parallel)
        parameters = self._by_block(sizes.parameter_bytes)
        return LayerCosts(
            forward_seconds=self._by_block(times.forward_seconds) / speed,
            backward_seconds=self._by_block(times.backward_seconds) / speed,
            update_seconds=self._by_block(times.update_seconds) / speed,
            state_bytes=parameters * self.state_factor,
            gradient_bytes=parameters * self.gradient_factor,
            activation_bytes=self._by_block(sizes.activation_bytes) * micro_batch,
            output_bytes=self._by_block(sizes.output_bytes, ends=False) * micro_batch,
        )

    def _by_block(self, values: tuple[float, ...], ends: bool = True) -> NDArray[np.float64]:
        """Layers to blocks; what comes before and after is added to the first and the last."""
        array = np.asarray(values, dtype=float)
        stop = len(array) - self.after
        blocks = array[self.before : stop].copy()
        if ends:
            blocks[0] += array[: self.before].sum()
            blocks[-1] += array[stop:].sum()
        return blocks
