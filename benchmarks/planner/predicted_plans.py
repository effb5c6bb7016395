"""Plans whose iterations were measured by others, and the cost model's predictions for them.

The measurements are in the file ``measured_iterations.json``, beside the tables that ``sailor_tables.py`` reads: the
authors of Sailor ran Megatron-DeepSpeed on nodes of several GPUs. :func:`predict` uses layer times, bandwidths and the
plan, but no measurement of a plan. Stages are evaluated by ``planner/stages/pipeline.py``, with these assumptions:

- GPUs are numbered by stage, replica and place in the tensor-parallel group, as DeepSpeed's topology does, and fill
  nodes in this order. A node has GPUs of one kind, and nodes have as many GPUs as the plan's number of nodes says.
- All replicas work at the same time, each with its own GPUs and tensor-parallel degrees, and the slowest counts.
- An activation and its gradient are divided among the tensor-parallel ranks. Each rank sends its part to its
  counterpart, and the receiving ranks gather the parts inside their node, as DeepSpeed's pipeline does
  (``pipe_partitioned``). All ranks of a node that send to another node do so at once, so the bandwidth measured for
  that many GPUs together holds.
- DeepSpeed's schedule sends activations and gradients one after the other (``TrainSchedule``: each waits until its
  counterpart has received), so that in steady state each cut takes two messages of a stage's time. Colossal-AI sends
  both at the same time, which is what ``evaluate`` counts.
- The gradient of each micro-batch after the first is added to the sum of those before. That reads two arrays and writes
  one, where Adam's step reads or writes seven. Layers were timed with one micro-batch per step, without such a sum.
  Therefore the backward pass takes 3/7 of the layer's optimizer step longer, in K − 1 of K micro-batches.
- After the last backward pass, gradients are reduced in a ring over the stage's replicas. Each tensor-parallel rank has
  its own ring, all rings of all stages run at once, and the slowest link of a ring and the slowest stage count. If
  replicas have different degrees, each rank sends its own share of the stage.
- Memory is state, kept activations, what passes need for a moment (``LayerSizes.temporaries``) and the usual reserve of
  the kind of GPU (``gpu_catalog.py``). Stage s of S keeps activations of up to S − s micro-batches. The measured figure
  is from ``nvidia-smi``.

Not predicted, because there is no independent measurement of it: loading data, waiting for the slowest of several
replicas because of noise, and the time that Python needs to launch layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter

from benchmarks.planner.sailor_tables import GpuChannels
from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cluster.topology import Channel
from colossal_hetero.planner.profile.layer_costs import LayerCosts
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.stages.pipeline import PipelineCost, Slot, evaluate

ADDED_SHARE = 3 / 7
"""Memory traffic of adding one array to another, as a share of the memory traffic of Adam's step."""


class _Replica(BaseModel):
    gpu: str
    tensor_parallel: int


class _Stage(BaseModel):
    layers: tuple[int, int]
    replicas: tuple[_Replica, ...]


class MeasuredPlan(BaseModel):
    """A plan that was run, and its measurements."""

    name: str
    model: str
    nodes: int
    micro_batch: int
    global_batch: int
    stages: tuple[_Stage, ...]
    """Each stage has the layers ``[a, b)``; embedding and head are counted as layers. Its replicas may differ in GPU
    and tensor-parallel degree. Replica r of the plan consists of replica r of every stage."""
    iteration_seconds: Annotated[float, Field(alias="measured_iteration_seconds")]
    gradient_seconds: Annotated[float, Field(alias="measured_gradient_reduction_seconds")]
    memory_bytes: Annotated[int, Field(alias="measured_max_memory_bytes")]

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

    pipelines: tuple[PipelineCost, ...]
    """By replica: time, and memory of the blocks' state and activations, with the optimizer's step."""
    gradient_seconds: float
    """Seconds of gradient reduction in the slowest stage."""
    memory_bytes: float
    """Bytes used on the device that uses most."""

    @property
    def pipeline(self) -> PipelineCost:
        """The slowest replica."""
        return max(self.pipelines, key=lambda cost: cost.seconds)

    @property
    def iteration_seconds(self) -> float:
        """Seconds of the pipelines, the optimizer's step and the gradient reduction."""
        return self.pipeline.seconds + self.gradient_seconds


def load_measured_plans(folder: Path) -> list[MeasuredPlan]:
    """All plans in ``measured_iterations.json`` of ``folder``."""
    return TypeAdapter(list[MeasuredPlan]).validate_json((folder / "measured_iterations.json").read_bytes())


def predict(plan: MeasuredPlan, profile: ModelProfile, channels: Mapping[str, GpuChannels]) -> PlanPrediction:
    """The cost model's prediction for ``plan``.

    Args:
        plan: The plan.
        profile: The profile of the plan's model, with times for the plan's GPUs, tensor-parallel degrees and
            micro-batch.
        channels: Bandwidths by kind of GPU.
    """
    prediction = _Prediction(plan, profile, channels)
    replicas = [prediction.pipeline(replica) for replica in range(plan.replicas)]
    costs = [evaluate(slots, hops, plan.micro_batches, plan.bounds(profile)) for slots, hops in replicas]
    memory = [
        used + slot.costs.temporary_bytes + GPUS[stage.replicas[number].gpu].memory_reserve_bytes
        for number, ((slots, _), cost) in enumerate(zip(replicas, costs, strict=True))
        for slot, stage, used in zip(slots, plan.stages, cost.memory_bytes, strict=True)
    ]
    return PlanPrediction(
        tuple(_one_message_after_the_other(cost, plan.micro_batches) for cost in costs),
        prediction.gradient_seconds([slots for slots, _ in replicas]),
        max(memory),
    )


def _one_message_after_the_other(cost: PipelineCost, micro_batches: int) -> PipelineCost:
    """``cost`` if in steady state a stage sends activations and gradients over each of its cuts in turn."""
    at_once = max(cost.stage_seconds)
    in_turn = max(one + hops for one, hops in zip(cost.stage_seconds, cost.transfer_seconds, strict=True))
    return replace(cost, seconds=cost.seconds + (micro_batches - 1) * (in_turn - at_once))


Place = tuple[int, int]
"""Stage and replica."""


class _Prediction:
    """A plan with its GPUs in nodes."""

    def __init__(self, plan: MeasuredPlan, profile: ModelProfile, channels: Mapping[str, GpuChannels]) -> None:
        self._plan = plan
        self._profile = profile
        self._channels = channels
        self._nodes = self._fill_nodes()
        stages, replicas = range(len(plan.stages)), range(plan.replicas)
        hops = [((s, r), (s + 1, r)) for s in stages[:-1] for r in replicas]
        rings = [((s, r), (s, (r + 1) % plan.replicas)) for s in stages for r in replicas if plan.replicas > 1]
        self._hop_senders = self._senders(hops)
        self._ring_senders = self._senders(rings)

    def pipeline(self, replica: int) -> tuple[list[Slot], list[Channel]]:
        """The slots of one replica, and the channels between neighbors."""
        plan = self._plan
        slots = []
        for number, stage in enumerate(plan.stages):
            own = stage.replicas[replica]
            costs = self._profile.costs(own.gpu, own.tensor_parallel, plan.micro_batch)
            slots.append(Slot(f"stage {number} on {own.gpu}", _accumulating(costs, plan.micro_batches), math.inf))
        message_bytes = float(slots[0].costs.output_bytes[0])
        return slots, [
            self._link((sender, replica), (sender + 1, replica), message_bytes) for sender in range(len(slots) - 1)
        ]

    def gradient_seconds(self, pipelines: Sequence[Sequence[Slot]]) -> float:
        """Seconds until every stage has reduced its gradients over its replicas, all at the same time."""
        replicas, bounds = self._plan.replicas, self._plan.bounds(self._profile)
        if replicas == 1:
            return 0.0
        slowest = 0.0
        for stage, (start, stop) in enumerate(pairwise(bounds)):
            # A step of the ring: each rank passes on one of as many parts of its gradients as there are replicas.
            parts = [float(each[stage].costs.gradient_bytes[start:stop].sum()) / replicas for each in pipelines]
            for replica in range(replicas):
                place, following = (stage, replica), (stage, (replica + 1) % replicas)
                if self._nodes[place] == self._nodes[following]:
                    step = self._of(place).inside[2].seconds(parts[replica])
                else:
                    step = max(self._between(end, parts[end[1]], self._ring_senders) for end in (place, following))
                slowest = max(slowest, 2 * (replicas - 1) * step)
        return slowest

    def _fill_nodes(self) -> dict[Place, int]:
        gpus = sum(replica.tensor_parallel for stage in self._plan.stages for replica in stage.replicas)
        per_node = math.ceil(gpus / self._plan.nodes)
        nodes: dict[Place, int] = {}
        node, kind, left = -1, "", 0
        for stage, each in enumerate(self._plan.stages):
            for number, replica in enumerate(each.replicas):
                if replica.gpu != kind or left < replica.tensor_parallel:
                    node, kind = node + 1, replica.gpu
                    left = max(min(per_node, max(self._channels[kind].inside)), replica.tensor_parallel)
                nodes[stage, number] = node
                left -= replica.tensor_parallel
        return nodes

    def _senders(self, links: Sequence[tuple[Place, Place]]) -> Counter[int]:
        """By node, the number of GPUs that send over these links to another node."""
        outside = {end for one, other in links if self._nodes[one] != self._nodes[other] for end in (one, other)}
        senders: Counter[int] = Counter()
        for place in outside:
            senders[self._nodes[place]] += self._degree(place)
        return senders

    def _link(self, sender: Place, receiver: Place, message_bytes: float) -> Channel:
        """The channel between two stages for messages of exactly this size: parts are sent at once, then gathered."""
        part = message_bytes / min(self._degree(sender), self._degree(receiver))
        if self._nodes[sender] == self._nodes[receiver]:
            seconds = self._of(sender).inside[2].seconds(part)
        else:
            seconds = max(self._between(end, part, self._hop_senders) for end in (sender, receiver))
        gathering = self._degree(receiver)
        if gathering > 1:
            # Each rank receives the other parts in a ring, one part per step.
            seconds += (gathering - 1) * self._of(receiver).inside[2].seconds(message_bytes / gathering)
        return Channel(self._of(sender).between[1].kind, message_bytes / seconds)

    def _between(self, place: Place, message_bytes: float, senders: Counter[int]) -> float:
        """Seconds in which each of the GPUs of this node that send to other nodes has sent a message of this size."""
        count, measured = senders[self._nodes[place]], self._of(place).between
        known = max((each for each in measured if each <= count), default=min(measured))
        return count * measured[known].seconds(message_bytes)

    def _of(self, place: Place) -> GpuChannels:
        return self._channels[self._plan.stages[place[0]].replicas[place[1]].gpu]

    def _degree(self, place: Place) -> int:
        return self._plan.stages[place[0]].replicas[place[1]].tensor_parallel


def _accumulating(costs: LayerCosts, micro_batches: int) -> LayerCosts:
    """``costs`` with the time to add a micro-batch's gradient to the earlier sum, averaged over micro-batches."""
    added = ADDED_SHARE * costs.update_seconds * (micro_batches - 1) / micro_batches
    return replace(costs, backward_seconds=costs.backward_seconds + added)
