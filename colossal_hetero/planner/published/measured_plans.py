"""Plans whose iterations were measured by others, and the cost model's predictions for them.

The measurements are in the file ``measured_iterations.json``, beside the tables that ``sailor_tables.py`` reads: the
authors of Sailor ran Megatron-DeepSpeed on GH200 nodes of 4 GPUs. :func:`predict` uses layer times, bandwidths and the
plan, but no measurement of a plan. Stages are evaluated by ``planner/stages/pipeline.py``, with these assumptions:

- An activation and its gradient are divided among the tensor-parallel ranks. Each rank sends its part to its
  counterpart, and the receiving ranks gather the parts inside their node, as DeepSpeed's pipeline does
  (``pipe_partitioned``). All ranks of a node send at once, so the bandwidth measured for that many GPUs together holds.
- The gradient of each micro-batch after the first is added to the sum of those before. That reads two arrays and writes
  one, where Adam's step reads or writes seven. Layers were timed with one micro-batch per step, without such a sum.
  Therefore the backward pass takes 3/7 of the layer's optimizer step longer, in K − 1 of K micro-batches.
- After the last backward pass, gradients are reduced in a ring over the stage's replicas. Each tensor-parallel rank has
  its own ring, all rings run at once, and the slowest stage counts. The optimizer's step follows.
- Parameters, gradients and Adam's moments are in fp32, without ZeRO. Stage s of S keeps activations of up to S − s
  micro-batches. The measured figure, from ``nvidia-smi``, also contains CUDA's context, NCCL's buffers and the
  allocator's reserve, which are not predicted.

Not predicted, because there is no independent measurement of it: loading data, waiting for the slowest of several
replicas because of noise, and the time that Python needs to launch layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ...io.json_files import errors_in_words, read_json
from ...io.quantities import PositiveCount
from ...io.schema import FilePart
from ..cluster.topology import Channel
from ..profile.layer_costs import LayerCosts
from ..profile.layer_profile import ModelProfile
from ..stages.pipeline import Pipeline, PipelineCost, Slot, Split, evaluate
from .sailor_tables import GpuChannels

__all__ = ["MeasuredPlan", "PlanPrediction", "load_measured_plans", "measured_pipeline", "predict"]

ADDED_SHARE = 3 / 7
"""Memory traffic of adding one array to another, as a share of the memory traffic of Adam's step."""


class _LenientPart(FilePart, extra="ignore"):
    """A part of the file whose further fields are ignored."""


class _Replica(_LenientPart):
    gpu: str
    tensor_parallel: PositiveCount


class _Stage(_LenientPart):
    layers: tuple[int, int]
    replicas: Annotated[tuple[_Replica, ...], Field(min_length=1)]


class MeasuredPlan(_LenientPart):
    """A plan that was run, and its measurements. All replicas are alike."""

    name: str
    model: str
    nodes: int
    micro_batch: PositiveCount
    global_batch: PositiveCount
    stages: Annotated[tuple[_Stage, ...], Field(min_length=1)]
    """Each stage has the layers ``[a, b)``; embedding and head are counted as layers."""
    iteration_seconds: Annotated[float, Field(alias="measured_iteration_seconds", gt=0)]
    gradient_seconds: Annotated[float, Field(alias="measured_gradient_reduction_seconds", ge=0)]
    memory_bytes: Annotated[int, Field(alias="measured_max_memory_bytes", gt=0)]

    @property
    def replicas(self) -> int:
        """Data-parallel degree."""
        return len(self.stages[0].replicas)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per replica and iteration."""
        return self.global_batch // (self.micro_batch * self.replicas)

    def bounds(self, profile: ModelProfile) -> tuple[int, ...]:
        """Bounds of the stages in blocks: stage s has the blocks ``[bounds[s], bounds[s + 1])``."""
        ends = [stage.layers[1] - profile.before for stage in self.stages[:-1]]
        return (0, *ends, profile.blocks)


@dataclass(frozen=True)
class PlanPrediction:
    """The cost model's prediction for a plan."""

    pipeline: PipelineCost
    """Time and memory of one replica, with the optimizer's step."""
    gradient_seconds: float
    """Seconds of gradient reduction in the slowest stage."""
    memory_bytes: float
    """Bytes used on the device that uses most."""

    @property
    def iteration_seconds(self) -> float:
        """Seconds of the pipeline, the optimizer's step and the gradient reduction."""
        return self.pipeline.seconds + self.gradient_seconds


def load_measured_plans(folder: Path | str) -> list[MeasuredPlan]:
    """All plans in ``measured_iterations.json`` of ``folder``.

    Raises:
        ValueError: The file does not exist, is not JSON, or has wrong or missing fields.
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
    """The pipeline of one replica of ``plan`` with one stage per node, and its split into stages.

    Args:
        plan: A plan with replicas that are alike.
        profile: The profile of the plan's model, with times for the plan's GPUs, tensor-parallel degrees and
            micro-batch.
        channels: Bandwidths by kind of GPU.

    Raises:
        ValueError: A GPU, degree or micro-batch was not measured, or replicas differ.
    """
    slots, links = [], []
    for number, stage in enumerate(plan.stages):
        if len(set(stage.replicas)) > 1 or len(stage.replicas) != plan.replicas:
            raise ValueError(f"{plan.name}: replicas of stage {number} differ; a prediction needs equal replicas")
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
    """The cost model's prediction for ``plan``. Arguments and errors are those of :func:`measured_pipeline`."""
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
        raise ValueError(
            f"{plan.name}: no bandwidth was measured for {degree} {gpu} of a node that send to another node at once"
        )
    return channels[gpu]


def _accumulating(costs: LayerCosts, micro_batches: int) -> LayerCosts:
    """``costs`` with the time to add a micro-batch's gradient to the earlier sum, averaged over micro-batches."""
    added = ADDED_SHARE * costs.update_seconds * (micro_batches - 1) / micro_batches
    return replace(costs, backward_seconds=costs.backward_seconds + added)


def _link(sender: tuple[GpuChannels, int], receiver: tuple[GpuChannels, int], message_bytes: float) -> Channel:
    """The channel between two stages for messages of exactly this size: all parts are sent at once, then gathered."""
    degree = min(sender[1], receiver[1])
    part = message_bytes / degree
    slower = min((side[0].between[degree] for side in (sender, receiver)), key=lambda each: each.bandwidth(part))
    seconds = degree * slower.seconds(part)
    if receiver[1] > 1:
        # Each rank receives the other parts in a ring, one part per step.
        seconds += (receiver[1] - 1) * receiver[0].inside[2].seconds(message_bytes / receiver[1])
    return Channel(slower.kind, message_bytes / seconds)


def _ring_seconds(gradient_bytes: float, replicas: int, channels: GpuChannels, degree: int) -> float:
    """Seconds of gradient reduction: one ring per tensor-parallel rank, all at once, one replica per node."""
    if replicas == 1:
        return 0.0
    return 2 * (replicas - 1) * degree * channels.between[degree].seconds(gradient_bytes / replicas)
