"""The part of the hybrid plugin that runs a plan: who computes what, over which networks, and whether times agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.interface import ModelWrapper
from colossalai.pipeline.schedule import InterleavedSchedule

from ...data_parallel.config import BatchConfig
from ...pipeline_parallel.config import PlanConfig
from ...pipeline_parallel.drift import DriftReport
from ...pipeline_parallel.recomputation import find_recomputable_blocks, recompute_blocks
from ...planner.plans.plan import Plan
from ..part import PluginPart, TrainingObjects
from ..unequal.unequal_replicas import UnequalReplicas, check_arguments, why_not_unequal
from .drift_watch import DriftWatch
from .plan_agreement import agree_on_plan, as_launched
from .plan_checks import (
    batches_to_evaluate,
    check_batch_size,
    check_global_batch,
    check_model,
    check_model_at_division,
    checked_batches,
    valid_batch_sizes,
)
from .plan_groups import plan_groups, set_adapter_variables
from .planned_mesh import ordered_group, planned_mesh
from .plugin_arguments import arguments_from_plan

__all__ = ["PlannedRun", "training_sizes_kept"]


class PlannedRun(PluginPart):
    """Runs the plan that all ranks agree on. Made by all ranks at once, before the plugin's process groups.

    Args:
        plan: a plan, the path of a plan file, or "auto".
        planning: what to plan from, over which networks ranks communicate, and how much stages may drift.
        arguments: of Colossal-AI's plugin. "auto" is limited to their ``tp_size`` and ``pp_size``, unless these are
            None, and to equal replicas if there is a ``pp_size`` or an argument that needs them.
        batches: how global batches are divided unevenly; None if they are not.

    Raises:
        TypeError, ValueError: see :func:`~.plan_agreement.agree_on_plan` and :func:`~.plan_agreement.as_launched`.
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        planning: PlanConfig,
        arguments: Mapping[str, Any],
        batches: BatchConfig | None,
    ) -> None:
        set_adapter_variables(planning.adapters)
        tp_size, pp_size = arguments.get("tp_size"), arguments.get("pp_size")
        unequal = pp_size is None and why_not_unequal(arguments, batches is not None) is None
        agreed = agree_on_plan(plan, planning, tp_size, pp_size, unequal=unequal)
        self.plan = as_launched(agreed.plan)
        """With ranks as they were launched."""
        self._planning = planning
        self._profile = agreed.profile
        self._batches = batches
        self._watch: DriftWatch | None = None
        self._recomputed: str | None = None
        self._make_group = (
            None if agreed.topology is None else plan_groups(agreed.plan, agreed.topology, planning.adapters)
        )
        layer_sums = planning.layer_sums or not self.plan.symmetric
        self.unequal = UnequalReplicas(self.plan, self._make_group or ordered_group) if layer_sums else None
        """Runs replicas that are not alike; None if Colossal-AI runs the plan."""

    @property
    def batch_size(self) -> int:
        """Samples of a replica's batch."""
        return valid_batch_sizes(self.plan)[0]

    @property
    def drift(self) -> DriftReport | None:
        """The last epoch's stages against the plan; None before the first epoch ends, and without a pipeline."""
        return None if self._watch is None else self._watch.report

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See :func:`~.plugin_arguments.arguments_from_plan`."""
        if self.unequal is None:
            return arguments_from_plan(self.plan, self.plan.replicas[0], given)
        check_arguments(self.plan, given, self._batches is not None)
        return arguments_from_plan(self.plan, self.unequal.replica, given)

    def mesh(self, dp_outside: bool) -> AbstractContextManager[None]:
        """A context in which Colossal-AI's constructor puts every rank in the place that the plan gives it."""
        if self.unequal is not None:
            return self.unequal.mesh(dp_outside)
        return planned_mesh(self.plan.rank_order, dp_outside, self._make_group)

    def check_plugin(self, plugin: HybridParallelPlugin) -> None:
        """Check the constructed ``plugin`` now, and the number of a model's blocks when it divides them.

        Raises:
            ValueError: the global batch that is divided unevenly has another size than the plan's.
        """
        if plugin.stage_manager is not None:
            check_model_at_division(plugin.stage_manager, self.plan)
        if self._batches is not None:
            check_global_batch(self.plan, self._batches)

    def before_configure(self, plugin: HybridParallelPlugin, objects: TrainingObjects) -> TrainingObjects:
        """Check the data loader and the model; see ``PluginPart.before_configure``.

        Raises:
            ValueError: the loader's batch size, or the number of the model's blocks, does not fit the plan; or the
                plan has stages that recompute, which the model cannot do.
        """
        if objects.optimizer is not None and self._batches is None and self.unequal is None:
            check_batch_size(self.plan, getattr(objects.dataloader, "batch_size", None))
        if not isinstance(objects.model, ModelWrapper) and plugin.stage_manager is None:
            check_model(objects.model, self.plan)
        # All ranks, so that an error is one of all.
        stages = (stage for replica in self.plan.replicas for stage in replica.stages)
        if not isinstance(objects.model, ModelWrapper) and any(stage.recompute for stage in stages):
            self._recomputed = find_recomputable_blocks(objects.model)
        return objects

    def change_model(self, plugin: HybridParallelPlugin, objects: TrainingObjects) -> None:
        """Let the blocks of this rank's stage recompute, if the plan says so; see ``PluginPart.change_model``."""
        rank = dist.get_rank()
        if self._recomputed is not None and any(
            stage.recompute and rank in stage.ranks for replica in self.plan.replicas for stage in replica.stages
        ):
            recompute_blocks(objects.model.unwrap(), self._recomputed)

    def attach(self, plugin: HybridParallelPlugin, objects: TrainingObjects) -> None:
        """Time the passes of the stages of a 1F1B pipeline; see ``PluginPart.attach``."""
        pipelines = any(len(replica.stages) > 1 for replica in self.plan.replicas)
        if not pipelines or self.plan.schedule != "1f1b" or self._planning.drift_threshold == math.inf:
            return
        if self._watch is None:
            self._watch = DriftWatch(
                plugin.scheduler,
                self.plan,
                self._planning.drift_threshold,
                self._profile,
                objects.iterations_per_epoch,
            )
        else:
            # Another model with the same schedule.
            self._watch.interval = objects.iterations_per_epoch

    def checked_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """See :func:`~.plan_checks.checked_batches`."""
        return checked_batches(batches, self.plan) if self.unequal is None else batches

    def batches_to_evaluate(self, batches: Iterator[Any]) -> Iterator[Any]:
        """See :func:`~.plan_checks.batches_to_evaluate`."""
        return batches_to_evaluate(batches, self.plan)

    def after_passes(self) -> None:
        """The forward and backward passes of an iteration have ended."""
        if self._watch is not None:
            self._watch.tick()


@contextmanager
def training_sizes_kept(schedule: object) -> Iterator[None]:
    """Let a 1F1B or interleaved schedule evaluate batches of another size, and train on as before.

    The schedule keeps the number of micro-batches of what it evaluates for training, and asserts that all batches are
    as large as the last one.
    """
    number = "num_microbatch" if isinstance(schedule, InterleavedSchedule) else "num_microbatches"
    sizes = (number, "microbatch_size", "batch_size", "last_batch_size")
    shapes = ("send_tensor_metadata", "send_grad_metadata", "tensor_metadata_recv", "grad_metadata_recv")
    before = {name: getattr(schedule, name) for name in (*sizes, "enable_metadata_cache", *shapes)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(schedule, name, value)
