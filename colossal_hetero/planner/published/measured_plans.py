"""Plans whose iterations were measured, and what the cost model makes of them.

The file ``measured_iterations.json`` of the tables that ``gpu_profiles.py`` reads: Megatron-DeepSpeed on GH200 nodes
with 4 GPUs, by the authors of Sailor. :func:`predict` takes layer times, bandwidths and the plan, nothing of what was
measured of plans. Blocks, stages and replicas go through ``pipeline.evaluate``; what it assumes, and why:

- An activation and its gradient are cut among the tensor-parallel ranks, each rank sends its part to its counterpart,
  and the receiving ranks gather the parts inside their node: DeepSpeed's pipeline does so (``pipe_partitioned``). All
  ranks of a node send at once, so the measured rate of that many GPUs together holds.
- The gradient of each micro-batch after the first is added to what is there: two arrays are read and one written, of
  the seven that Adam's step reads or writes. Layers were timed with one micro-batch per step, which adds nothing. So
  backward takes 3/7 of the layer's step more, in K − 1 of K micro-batches.
- Gradients are summed in a ring over the stage's replicas, each tensor-parallel rank in a ring of its own, all at once,
  after the last backward pass; the slowest stage counts. Then comes the optimizer's step.
- Parameters, gradients and Adam's moments are in fp32, without ZeRO; stage s of S keeps activations of up to S − s
  micro-batches. CUDA's context, NCCL's buffers and what the allocator keeps are not in the prediction; ``nvidia-smi``'s
  figure, which was measured, holds them.

Left out because nothing independent measures them: loading data, waiting for the slowest of several replicas (the
maximum of noise), what launching from Python costs between layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ...io.json_files import errors_in_words, read_json
from ...io.schema import FilePart
from ..cluster.topology import Channel
from ..profile.layer_costs import LayerCosts
from ..profile.layer_profile import ModelProfile
from ..stages.pipeline import Pipeline, PipelineCost, Slot, Split, evaluate
from .sailor_tables import GpuChannels

__all__ = ["MeasuredPlan", "PlanPrediction", "load_measured_plans", "measured_pipeline", "predict"]

ADDED_SHARE = 3 / 7
"""Memory traffic of adding one array to another, as a share of that of Adam's step."""


class _LenientPart(FilePart, extra="ignore"):
    """Fields that are not used here are skipped."""


class _Replica(_LenientPart):
    gpu: str
    tensor_parallel: Annotated[int, Field(ge=1)]


class _Stage(_LenientPart):
    layers: tuple[int, int]
    replicas: Annotated[tuple[_Replica, ...], Field(min_length=1)]


class MeasuredPlan(_LenientPart):
    """A plan, and what it took; replicas are alike."""

    name: str
    model: str
    nodes: int
    micro_batch: Annotated[int, Field(ge=1)]
    global_batch: Annotated[int, Field(ge=1)]
    stages: Annotated[tuple[_Stage, ...], Field(min_length=1)]
    """Layers ``[a, b)``, embedding and head counted."""
    iteration_seconds: Annotated[float, Field(alias="measured_iteration_seconds", gt=0)]
    gradient_seconds: Annotated[float, Field(alias="measured_gradient_reduction_seconds", ge=0)]
    memory_bytes: Annotated[int, Field(alias="measured_max_memory_bytes", gt=0)]

    @property
    def replicas(self) -> int:
        """Data-parallel degree."""
        return len(self.stages[0].replicas)

    @property
    def micro_batches(self) -> int:
        """Per replica and iteration."""
        return self.global_batch // (self.micro_batch * self.replicas)

    def bounds(self, profile: ModelProfile) -> tuple[int, ...]:
        """Of stages, in blocks."""
        ends = [stage.layers[1] - profile.before for stage in self.stages[:-1]]
        return (0, *ends, profile.blocks)


@dataclass(frozen=True)
class PlanPrediction:
    """What the cost model says of a plan."""

    pipeline: PipelineCost
    gradient_seconds: float
    memory_bytes: float
    """Of the fullest device."""

    @property
    def iteration_seconds(self) -> float:
        """Pipeline, with the optimizer's step, and gradient reduction."""
        return self.pipeline.seconds + self.gradient_seconds


def load_measured_plans(folder: Path | str) -> list[MeasuredPlan]:
    """All of ``measured_iterations.json``.

    Raises:
        ValueError: no such file, not JSON, or fields that are wrong or missing.
    """
    path = Path(folder) / "measured_iterations.json"
    _, content = read_json(path)
    if not isinstance(content, list):
        raise ValueError(f"{path} is not a list of plans")
    plans = []
    for number, each in enumerate(content):
        try:
            plans.append(MeasuredPlan.model_validate(each))
        except ValidationError as error:
            names = [field.alias or name for name, field in MeasuredPlan.model_fields.items()]
            raise ValueError(f"{path}, plan {number}: {errors_in_words(error, names)}") from None
    return plans


def measured_pipeline(
    plan: MeasuredPlan, profile: ModelProfile, channels: Mapping[str, GpuChannels]
) -> tuple[Pipeline, Split]:
    """One replica of ``plan``, one stage per node.

    Args:
        profile: of the plan's model, with times on its GPUs at its degrees and micro-batch.
        channels: by kind of GPU.

    Raises:
        ValueError: a GPU, degree or micro-batch was not measured, or replicas differ.
    """
    slots, links = [], []
    for number, stage in enumerate(plan.stages):
        if len(set(stage.replicas)) > 1 or len(stage.replicas) != plan.replicas:
            raise ValueError(f"{plan.name}: replicas of stage {number} differ; only equal ones can be predicted")
        replica = stage.replicas[0]
        costs = profile.costs(replica.gpu, replica.tensor_parallel, plan.micro_batch)
        slots.append(Slot(f"stage {number} on {replica.gpu}", _accumulating(costs, plan.micro_batches), math.inf))
        links.append((_channels(plan, stage, channels), replica.tensor_parallel))
    rows = tuple(
        tuple(_link(one, other, float(slot.costs.output_bytes[0])) for other in links)
        for one, slot in zip(links, slots, strict=True)
    )
    return Pipeline(tuple(slots), rows, plan.micro_batches), Split(tuple(range(len(slots))), plan.bounds(profile))


def predict(plan: MeasuredPlan, profile: ModelProfile, channels: Mapping[str, GpuChannels]) -> PlanPrediction:
    """What the cost model says of ``plan``; arguments and errors as :func:`measured_pipeline`."""
    pipeline, split = measured_pipeline(plan, profile, channels)
    cost = evaluate(pipeline, split)
    gradient_seconds = []
    for number, stage in enumerate(plan.stages):
        part = slice(split.bounds[number], split.bounds[number + 1])
        gradient_bytes = float(pipeline.slots[number].costs.gradient_bytes[part].sum())
        degree = stage.replicas[0].tensor_parallel
        gradient_seconds.append(_ring_seconds(gradient_bytes, plan.replicas, _channels(plan, stage, channels), degree))
    return PlanPrediction(cost, max(gradient_seconds), max(cost.memory_bytes))


def _channels(plan: MeasuredPlan, stage: _Stage, channels: Mapping[str, GpuChannels]) -> GpuChannels:
    gpu, degree = stage.replicas[0].gpu, stage.replicas[0].tensor_parallel
    if gpu not in channels or degree not in channels[gpu].between:
        raise ValueError(f"{plan.name}: no bandwidth of {degree} {gpu} that send to another node")
    return channels[gpu]


def _accumulating(costs: LayerCosts, micro_batches: int) -> LayerCosts:
    """With what it takes to add each micro-batch's gradient to the sum of those before."""
    added = ADDED_SHARE * costs.update_seconds * (micro_batches - 1) / micro_batches
    return replace(costs, backward_seconds=costs.backward_seconds + added)


def _link(sender: tuple[GpuChannels, int], receiver: tuple[GpuChannels, int], message_bytes: float) -> Channel:
    """Between nodes, for activations of just this size: all parts at once, then the gathering at the receiver."""
    degree = min(sender[1], receiver[1])
    part = message_bytes / degree
    slower = min((side[0].between[degree] for side in (sender, receiver)), key=lambda each: each.bandwidth(part))
    seconds = degree * slower.seconds(part)
    if receiver[1] > 1:
        # Each rank gets the other parts in a ring, one step for each.
        seconds += (receiver[1] - 1) * receiver[0].inside[2].seconds(message_bytes / receiver[1])
    return Channel(slower.kind, message_bytes / seconds)


def _ring_seconds(gradient_bytes: float, replicas: int, channels: GpuChannels, degree: int) -> float:
    """A ring for each tensor-parallel rank, all at once, one replica a node."""
    if replicas == 1:
        return 0.0
    return 2 * (replicas - 1) * degree * channels.between[degree].seconds(gradient_bytes / replicas)
