"""The part of the hybrid plugin that runs a plan: who computes what, over which networks, and whether times agree."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.interface import ModelWrapper
from colossalai.pipeline.schedule._utils import get_batch_size
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...common.text import count
from ...data_parallel.config import BatchConfig
from ...layers.chain import links_of
from ...layers.dropout import repeated_dropout
from ...planner.cluster.topology import Topology
from ...planner.cost.plan import Plan, StagePlan
from ...planner.solver.follow import WINDOW, Proposal, propose
from ...profiling.model_layers import find_block_row
from ..plan_config import PlanConfig
from ..replicas.unequal_replicas import UnequalReplicas, check_arguments, why_not_unequal
from ..training_objects import TrainingObjects
from .drift import DriftReport, DriftWatch
from .live_plan import LivePlan
from .plan_agreement import agree_on_plan, as_launched, launched_topology
from .planned_mesh import ordered_group, plan_groups, planned_mesh, set_adapter_variables
from .plugin_arguments import arguments_from_plan, check_model

# A stage that recomputes keeps only the input of each block, whose forward pass runs again in the backward pass. The
# switches of the models are not used: some checkpoints are always reentrant, which zero-bubble schedules cannot use,
# and none has the random state of tensor-parallel dropout.


def find_recomputable_blocks(model: nn.Module) -> str:
    """The name of the row of blocks of ``model`` that a stage can recompute, before Colossal-AI divides it."""
    kind = type(model).__name__
    if not getattr(model, "supports_gradient_checkpointing", False) and not hasattr(model, "set_grad_checkpointing"):
        raise ValueError(
            f"the plan has stages that recompute, but {kind} does not say that its blocks can run twice: it has "
            "neither supports_gradient_checkpointing = True (as models of transformers) nor set_grad_checkpointing (as "
            "models of timm); add one of them if no block changes its inputs in place, or plan without recomputation"
        )
    if links_of(model) is not None:
        raise ValueError(
            f"the plan has stages that recompute, but {kind} is cut as a chain of unlike modules, which do not; plan "
            "without recomputation"
        )
    try:
        return find_block_row(model).name
    except ValueError as error:
        raise ValueError(f"the plan has stages that recompute, but their blocks were not found: {error}") from error


def recompute_blocks(model: nn.Module, row: str) -> None:
    """Let all blocks that this rank has of ``model`` recompute in training, once Colossal-AI has divided it. A second
    call changes nothing. What the script has switched on for this is switched off, or blocks would repeat twice."""
    held = [block for block in model.get_submodule(row).children() if any(True for _ in block.parameters())]
    if any(isinstance(vars(block).get("forward"), _Recomputed) for block in held):
        return
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
    elif getattr(model, "grad_checkpointing", False):
        model.set_grad_checkpointing(False)
    for block in held:
        # Both have types in nn.Module that do not allow this.
        setattr(block, "forward", _Recomputed(block))  # noqa: B010
        setattr(block, "grad_checkpointing", True)  # noqa: B010  timm's name; measurements are told apart by it
    holder = model.get_submodule(row.rpartition(".")[0])
    if "use_cache" in inspect.signature(type(holder).forward).parameters:
        # A repeated block would append its keys and values to the cache again.
        holder.register_forward_pre_hook(_without_cache, with_kwargs=True)


class _Recomputed:
    """The forward pass of ``block``, of which backward keeps only the arguments."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._forward: Callable[..., Any] = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._block.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        context = partial(repeated_dropout, self._block)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=context, **kwargs)


def _without_cache(holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | ({"use_cache": False} if holder.training else {})


class PlannedRun:
    """Runs the plan that all ranks agree on. Made by all ranks at once. All arguments are checked before the first
    process group is made; ``arguments`` are those of Colossal-AI's plugin that run this rank's replica."""

    def __init__(
        self,
        plan: Plan | str | Path,
        planning: PlanConfig,
        arguments: Mapping[str, Any],
        batches: BatchConfig | None,
        live: LivePlan | None = None,
    ) -> None:
        set_adapter_variables(planning.adapters)
        tp_size, pp_size = arguments.get("tp_size"), arguments.get("pp_size")
        if "zero_stage" in arguments:
            planning = dataclasses.replace(planning, zero_stages=(0,))
        unequal = pp_size is None and why_not_unequal(arguments, batches is not None) is None
        agreed = agree_on_plan(plan, planning, tp_size=tp_size, pp_size=pp_size, unequal=unequal)
        self.idle = live.idle_ranks(agreed.plan) if live is not None else ()
        self.plan = agreed.plan if self.idle else as_launched(agreed.plan)
        self._planning, self._batches = planning, batches
        topology = agreed.topology if self.idle else launched_topology(agreed)
        self.topology, self.profile = topology, agreed.profile
        self._is_followed = live is not None
        self._idle_clock = None if live is None else live.idle_clock
        self._watch: DriftWatch | None = None
        self._recomputed: str | None = None
        self._make_group = None if topology is None else plan_groups(topology, planning.adapters)
        if live is not None:
            assert self._make_group is not None and topology is not None
            self._make_group = live.kept_groups(self._make_group, topology)
        layer_sums = planning.layer_sums or not self.plan.symmetric or bool(self.idle)
        self.arguments = self._checked_arguments(arguments, layer_sums)
        make_group = self._make_group or ordered_group
        self.unequal = UnequalReplicas(self.plan, make_group, self.idle) if layer_sums else None
        if planning.follow_speed and not self.is_watched:
            raise ValueError(
                f"follow_speed=True is not possible: this plan, of schedule {self.plan.schedule!r} and with at most "
                f"{count(max(len(each.stages) for each in self.plan.replicas), 'stage')}, has no layers that could "
                "move; they do in the schedule '1f1b' between stages, or with layer_sums=True between replicas"
            )

    @property
    def is_idle(self) -> bool:
        """True if the plan leaves this rank's device idle: it holds no layers, and follows the steps."""
        return dist.get_rank() in self.idle

    @property
    def batch_size(self) -> int:
        """Samples of a replica's batch: all its micro-batches."""
        return self.plan.micro_batch * self.plan.replicas[0].micro_batches

    @property
    def drift(self) -> DriftReport | None:
        """The last epoch's stages against the plan; None before the first epoch ends, and without a pipeline."""
        return None if self._watch is None else self._watch.report

    def _checked_arguments(self, given: Mapping[str, Any], layer_sums: bool) -> dict[str, Any]:
        replica = self.plan.replicas[0]
        if layer_sums:
            check_arguments(self.plan, given, self._batches is not None)
            rank = dist.get_rank()
            own = (each for each in self.plan.replicas if any(rank in stage.ranks for stage in each.stages))
            replica = next(own, replica.model_copy(update={"stages": replica.stages[:1]}))
        if self._batches is not None and self._batches.global_batch_size != self.plan.global_batch:
            batch, planned = self._batches.global_batch_size, self.plan.global_batch
            raise ValueError(
                f"global_batch_size={batch} in batches contradicts the plan, which has {planned}; use {planned}, or "
                f"make a plan for {batch}"
            )
        if self.is_idle:  # like a replica of one stage
            return arguments_from_plan(self.plan, replica, {**given, "pp_size": None}) | {"tp_size": 1}
        return arguments_from_plan(self.plan, replica, given)

    def mesh(self, dp_outside: bool) -> AbstractContextManager[None]:
        """A context in which Colossal-AI's constructor puts every rank in the place that the plan gives it."""
        if self.unequal is not None:
            return planned_mesh([self.unequal.own_order], dp_outside, self.unequal.group_of, self.unequal.made)
        return planned_mesh(self.plan.rank_order, dp_outside, self._make_group)

    def check_objects(self, plugin: HybridParallelPlugin, objects: TrainingObjects) -> None:
        if objects.optimizer is not None and self._batches is None and self.unequal is None:
            # Without a pipeline the training loop may accumulate gradients itself, on a loader of micro-batches.
            also_valid = () if len(self.plan.layers_per_stage) > 1 else (self.plan.micro_batch,)
            self._check_size(getattr(objects.dataloader, "batch_size", None), *also_valid)
        if not isinstance(objects.model, ModelWrapper) and plugin.stage_manager is None:
            check_model(objects.model, self.plan)
        # All ranks, so that an error is one of all.
        if not isinstance(objects.model, ModelWrapper) and any(stage.recompute for stage in self._stages()):
            self._recomputed = find_recomputable_blocks(objects.model)

    def recompute(self, objects: TrainingObjects) -> None:
        rank = dist.get_rank()
        if self._recomputed is not None and any(each.recompute and rank in each.ranks for each in self._stages()):
            recompute_blocks(objects.model.unwrap(), self._recomputed)

    def _stages(self) -> list[StagePlan]:
        return [stage for replica in self.plan.replicas for stage in replica.stages]

    def attach(self, plugin: HybridParallelPlugin, objects: TrainingObjects) -> None:
        if not self.is_watched:
            return
        interval = WINDOW if self._is_followed else objects.iterations_per_epoch
        if self._watch is None:
            schedule, threshold = plugin.scheduler or plugin._one_stage, self._planning.drift_threshold
            find = None if self._is_followed else self.propose
            passes = self._idle_clock or schedule
            self._watch = DriftWatch(passes, self.plan, self.topology, threshold, interval, find)
        else:
            self._watch.interval = interval  # another model with the same schedule

    @property
    def is_watched(self) -> bool:
        """True if stages are timed: in 1F1B, where the plan has something to change."""
        pipelines = any(len(replica.stages) > 1 for replica in self.plan.replicas)
        changeable = pipelines or self.idle or (self.unequal is not None and len(self.plan.replicas) > 1)
        return bool(changeable) and self.plan.schedule == "1f1b" and self._planning.drift_threshold != math.inf

    def propose(self, report: DriftReport, search: Callable[[Topology], Plan] | None = None) -> Proposal | None:
        """The best plan for the stages of ``report``; None without a cluster, a profile, or times of all stages."""
        if self.topology is None or self.profile is None or len(report.stages) < len(self._stages()):
            return None
        seconds = {stage.ranks: stage.measured.seconds for stage in report.stages}
        alike = self.unequal is None
        given = self.topology, self.profile, self.plan, seconds, report.links, report.idle
        return propose(*given, alike=alike, search=search)

    def checked_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass on a replica's ``batches``; raises ``ValueError`` if one does not have the size that the plan has."""
        for batch in batches:
            self._check_size(get_batch_size(batch))
            yield batch

    def batches_to_evaluate(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass on a replica's ``batches``; raises ``ValueError`` if the interleaved schedule cannot evaluate one. It
        takes micro-batches in groups, one for each stage, and mixes up those of a smaller group."""
        size, stages = self.plan.micro_batch, len(self.plan.layers_per_stage)
        for batch in batches:
            samples = get_batch_size(batch)
            if self.plan.schedule == "interleaved" and -(-samples // size) % stages:
                raise ValueError(
                    f"a batch of {count(samples, 'sample')} is {count(-(-samples // size), 'micro-batch')} of {size}, "
                    f"but the interleaved schedule needs a multiple of {stages}, the number of stages; evaluate a "
                    f"multiple of {stages * size} samples"
                )
            yield batch

    def _check_size(self, samples: int | None, *also_valid: int) -> None:
        valid = self.batch_size, *also_valid
        if samples is not None and samples not in valid:
            raise ValueError(
                f"a batch of {samples} samples does not fit the plan: each of its {len(self.plan.replicas)} replicas "
                f"takes {count(self.plan.replicas[0].micro_batches, 'micro-batch')} of {self.plan.micro_batch}; use "
                f"batch_size={' or '.join(map(str, valid))} (and drop_last=True)"
            )

    def after_passes(self) -> None:
        if self._watch is not None:
            self._watch.tick()
