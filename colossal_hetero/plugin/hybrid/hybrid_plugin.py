"""Colossal-AI's hybrid-parallel plugin with balancing, of layers within and of batches among replicas."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.shardformer.policies.base_policy import Policy
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ... import accelerator
from ...balance.balancer import Balancer, attach_balancer
from ...balance.config import BalanceConfig
from ...balance.measure.clock import IterationClock, make_clock
from ...data_parallel.attach import BatchSetup, attach_batches, profile_for
from ...data_parallel.batch_balancer import BatchBalancer
from ...data_parallel.config import BatchConfig
from ...layers.policy import hetero_policy
from ...pipeline_parallel.config import PlanConfig
from ...pipeline_parallel.drift import DriftReport
from ...planner.plans.plan import Plan
from ...planner.profile.layer_profile import ModelProfile
from ...profiling.batches.rank_profiler import describe
from ..uneven_batches import UnevenLoaders
from . import plan_agreement
from .drift_watch import DriftWatch
from .plan_groups import groups_of, name_adapters
from .planned_mesh import MakeGroup, planned_meshes
from .unequal_chunks import give_chunks, take_chunks, unequal_chunks

__all__ = ["HeteroHybridParallelPlugin"]

DEFAULT_INTERVAL = 100
"""Iterations that are taken for an epoch where its length is unknown."""


class HeteroHybridParallelPlugin(UnevenLoaders, HybridParallelPlugin):
    """``HybridParallelPlugin`` whose tensor-parallel layers are balanced over unequal devices.

    Every argument of Colossal-AI's plugin, plus ``balance``, ``batches`` and ``plan``. Where no ``custom_policy`` is
    given the model's own policy is taken (Colossal-AI's, or ours for timm's ``VisionTransformer``); in any policy the
    parallel linear layers are replaced by ours. Checkpoints are Colossal-AI's.

    With a plan ``tp_size``, ``pp_size`` and the arguments of the pipeline schedule follow from it; any of them that is
    given as well must agree. Every rank takes the place that the plan gives it, whichever that is: ranks that follow
    each other need not be neighbors in a pipeline. Stages may hold different numbers of layers also with
    ``num_layers_per_stage`` alone, in any schedule; the interleaved and zero-bubble ones, in which a stage holds
    several chunks of the model, take one number per chunk, in the order of the model.

    Args:
        tp_size: ranks in a tensor-parallel group; may be left out with a plan. With ``plan="auto"`` only plans with
            this size are looked at, likewise with ``pp_size``.
        pp_size: stages; may be left out with a plan.
        balance: what to do about slow ranks within a tensor-parallel group; the default measures only.
        batches: how to divide global batches over replicas that are not equally fast (data parallelism); the default
            divides evenly, as Colossal-AI does. Not with pipelines, which cut their batch themselves.
        plan: which rank runs which layers: a plan, the path of a plan file (``colossal-hetero plan --out`` writes one),
            or "auto", to plan from ``planning`` now. All replicas must be cut alike. Rank 0's plan counts, so files
            need to be there only. A replica's batch is the plan's micro-batches together. Stages of a pipeline that
            take another time than planned are reported at the end of each epoch.
        planning: what to plan from, over which networks ranks communicate, and how much stages may drift.

    Raises:
        TypeError: ``balance`` is not a ``BalanceConfig``, ``batches`` not a ``BatchConfig``, ``plan`` or ``planning``
            no such thing; or there is neither a plan nor both sizes.
        ValueError: the world size does not fit ``tp_size * pp_size`` or the plan, an argument contradicts the plan, the
            plan's replicas are not alike, the plan is for another model, the model has no policy, or a layer has an
            option that the balance mode cannot be combined with.
    """

    def __init__(
        self,
        tp_size: int | None = None,
        pp_size: int | None = None,
        *args: Any,
        balance: BalanceConfig | None = None,
        batches: BatchConfig | None = None,
        plan: Plan | str | Path | None = None,
        planning: PlanConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(balance, BalanceConfig | None):
            raise TypeError(f"balance={balance!r} is not a BalanceConfig; write BalanceConfig(mode=...)")
        if not isinstance(batches, BatchConfig | None):
            raise TypeError(f"batches={batches!r} is not a BatchConfig; write BatchConfig(global_batch_size=...)")
        if not isinstance(planning, PlanConfig | None):
            raise TypeError(f"planning={planning!r} is not a PlanConfig; write PlanConfig(cluster=..., profile=...)")
        if plan is None and (tp_size is None or pp_size is None):
            missing = [name for name, size in (("tp_size", tp_size), ("pp_size", pp_size)) if size is None]
            raise TypeError(f"missing {' and '.join(missing)}; only a plan says them too")
        self.balance = balance or BalanceConfig()
        self.batches = batches
        self.plan: Plan | None = None
        self.planning = planning or PlanConfig()
        self._profile: ModelProfile | None = None
        self._watch: DriftWatch | None = None
        self.batch_balancer: BatchBalancer | None = None
        self._plain = {}
        self.custom_policy: Policy | None
        self.balancer: Balancer | None = None
        make_group = None
        arguments = plan_agreement.named(args, kwargs) | dict(tp_size=tp_size, pp_size=pp_size)
        if plan is not None:
            name_adapters(self.planning.adapters)
            agreed = plan_agreement.agree_on_plan(plan, self.planning, tp_size, pp_size)
            self.plan, self._profile = plan_agreement.runnable(agreed.plan), agreed.profile
            if agreed.topology is not None:
                make_group = groups_of(agreed.plan, agreed.topology, self.planning.adapters)
            arguments = plan_agreement.arguments_of(self.plan, arguments)
        check_world_size(arguments["tp_size"], arguments["pp_size"])
        arguments, layers_per_chunk = take_chunks(arguments)
        with self._meshes(arguments.get("dp_outside", True), make_group):
            super().__init__(**arguments)
        if layers_per_chunk is not None:
            give_chunks(self.stage_manager, layers_per_chunk)
        if self.plan is not None and self.stage_manager is not None:
            plan_agreement.check_num_layers(self.stage_manager, self.plan)
        if batches is not None:
            check_batches(batches, self)
            if self.plan is not None:
                plan_agreement.check_batches(self.plan, batches)
        if self.balance.mode != "off" and self.tp_size == 1:
            warnings.warn(f"balance mode {self.balance.mode!r} has nothing to balance with tp_size=1", stacklevel=2)

    def __del__(self) -> None:
        # The parent's needs what its constructor makes, which arguments that do not fit never reach.
        if hasattr(self, "pg_mesh"):
            super().__del__()

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        """See ``Plugin.configure``; called by ``Booster.boost``."""
        if self.batches is not None and optimizer is not None:
            loader = dataloader = self.loader_to_train_with(dataloader)
            description = describe(model)
        if self.plan is not None and optimizer is not None and self.batches is None:
            plan_agreement.check_loader(self.plan, getattr(dataloader, "batch_size", None))
        given_policy = self.custom_policy
        if not isinstance(model, ModelWrapper):
            if self.plan is not None and self.stage_manager is None:
                plan_agreement.check_blocks(model, self.plan)
            self.custom_policy = hetero_policy(given_policy or model)
        try:
            with unequal_chunks():
                model, optimizer, criterion, dataloader, lr_scheduler = super().configure(
                    model, optimizer, criterion, dataloader, lr_scheduler
                )
        finally:
            # The next model may be another.
            self.custom_policy = given_policy
        if optimizer is not None:
            if self.batches is not None:
                # Before anything follows the model's passes: trials belong to no iteration.
                setup = self._batch_setup(model, optimizer)
                profile = profile_for(setup, description, model, optimizer, criterion, loader)
            clock = make_clock(accelerator.get_accelerator().get_current_device())
            self.balancer = attach_balancer(
                model,
                self.balance,
                clock,
                self.tp_group,
                self._interval(dataloader),
                functools.partial(self._is_last_pass, model, optimizer),
            )
            if self.plan is not None and self.scheduler is not None and self.planning.drift_threshold < math.inf:
                self._watch_stages(dataloader)
            _begin_on_forward(model, self.balancer)
            # Zero-bubble schedules have other passes; their layers can neither be balanced nor timed.
            if hasattr(self.scheduler, "backward_step"):
                _wait_between_passes(self.scheduler, optimizer, clock)
            _tick_on_step(optimizer, self.balancer)
            _drop_gradients_with_others(optimizer, self.balancer)
            if self.batches is not None:
                # Last, so that between the micro-batches of a global batch nothing ticks.
                self.batch_balancer = attach_batches(setup, profile, model, optimizer, loader, lr_scheduler)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def prepare_dataloader(
        self, dataset: Dataset, batch_size: int | None = None, *args: Any, **kwargs: Any
    ) -> DataLoader:
        """See ``HybridParallelPlugin.prepare_dataloader``; with a plan ``batch_size`` may be left out."""
        if self.plan is not None and batch_size is None and self.batches is None:
            batch_size = plan_agreement.valid_batches(self.plan)[0]
        return super().prepare_dataloader(dataset, batch_size, *args, **kwargs)

    def execute_pipeline(
        self, data_iter: Iterator, model: ModelWrapper, criterion: Callable, *args: Any, **kwargs: Any
    ) -> dict:
        """See ``PipelinePluginBase.execute_pipeline``; called by ``Booster.execute_pipeline``."""
        if not torch.is_grad_enabled():
            # No gradients are due, and those of weights that stages share may be gone since the last step.
            with model.no_sync(), nullcontext() if self.plan is None else plan_agreement.sizes_kept(self.scheduler):
                return super().execute_pipeline(data_iter, model, criterion, *args, **kwargs)
        if self.plan is None:
            return super().execute_pipeline(data_iter, model, criterion, *args, **kwargs)
        batches = plan_agreement.sized_batches(data_iter, self.plan)
        result = super().execute_pipeline(batches, model, criterion, *args, **kwargs)
        if self._watch is not None:
            self._watch.tick()
        return result

    def enable_lora(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """See ``HybridParallelPlugin.enable_lora``.

        Raises:
            ValueError: rank 0, which writes adapters, is not in the first stage, where they are gathered.
        """
        if self.plan is not None:
            plan_agreement.check_lora(self.plan)
        return super().enable_lora(model, *args, **kwargs)

    def get_checkpoint_io(self) -> CheckpointIO:
        """See ``Plugin.get_checkpoint_io``; called by ``Booster``."""
        checkpoint_io = super().get_checkpoint_io()
        load_model = checkpoint_io.load_model

        @functools.wraps(load_model)
        def load_and_tell(*args: Any, **kwargs: Any) -> Any:
            result = load_model(*args, **kwargs)
            if self.balancer is not None:
                self.balancer.weights_changed()
            return result

        checkpoint_io.load_model = load_and_tell
        return checkpoint_io

    @property
    def drift(self) -> DriftReport | None:
        """The last epoch's stages against the plan; None before the first one ends, and without a pipeline or a plan.

        An epoch has as many iterations as the dataloader given to ``booster.boost`` has batches, or else 100.
        """
        return None if self._watch is None else self._watch.report

    def _meshes(self, dp_outside: bool, make_group: MakeGroup | None) -> AbstractContextManager[None]:
        """A context in which the parent's constructor builds the mesh that the plan says."""
        return nullcontext() if self.plan is None else planned_meshes(self.plan.rank_order, dp_outside, make_group)

    def _replica(self) -> tuple[int, int]:
        return dist.get_group_rank(self.dp_group, dist.get_rank()), self.dp_group.size()

    def _batch_setup(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> BatchSetup:
        assert self.batches is not None
        replica_of: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(replica_of, self._replica()[0])

        def synchronize(due: bool) -> None:
            model.require_grad_sync = due
            if isinstance(model.module, nn.parallel.DistributedDataParallel):
                model.module.require_backward_grad_sync = due
            if self.zero_stage == 1:
                optimizer.require_grad_sync = due

        return BatchSetup(
            config=self.batches,
            stage=self.zero_stage,
            precision=self.precision,
            replica_of=replica_of,
            synchronize=synchronize,
        )

    def _watch_stages(self, dataloader: DataLoader | None) -> None:
        assert self.plan is not None
        if self._watch is None:
            self._watch = DriftWatch(
                self.scheduler, self.plan, self.planning.drift_threshold, self._profile, epoch_length(dataloader)
            )
        else:
            # Another model with the same schedule.
            self._watch.interval = epoch_length(dataloader)

    def _interval(self, dataloader: DataLoader | None) -> int:
        return self.balance.priority_interval or epoch_length(dataloader)

    def _is_last_pass(self, model: ModelWrapper, optimizer: OptimizerWrapper, passes: int) -> bool:
        """Whether a layer's n-th backward pass is the last before its gradients are summed over replicas."""
        if self.scheduler is not None:
            # Schedules name it differently.
            microbatches = getattr(self.scheduler, "num_microbatches", None) or self.scheduler.num_microbatch
            return passes >= microbatches
        return bool(getattr(optimizer, "require_grad_sync", True) and model.require_grad_sync)


def epoch_length(dataloader: DataLoader | None) -> int:
    """Iterations; where the length is unknown, how many are taken for an epoch."""
    try:
        return max(1, len(dataloader))  # type: ignore[arg-type]
    except TypeError:
        return DEFAULT_INTERVAL


def check_world_size(tp_size: int, pp_size: int) -> None:
    """Raise ValueError unless the ranks can be divided into tensor-parallel groups and pipeline stages."""
    world = torch.distributed.get_world_size()
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if world % (tp_size * pp_size) != 0:
        raise ValueError(
            f"{world} ranks cannot be divided by tp_size={tp_size} × pp_size={pp_size}; "
            f"start a multiple of {tp_size * pp_size} ranks, or choose sizes whose product divides {world}"
        )


def check_batches(batches: BatchConfig, plugin: HybridParallelPlugin) -> None:
    """Raise ValueError if global batches cannot be divided unevenly with the plugin's other arguments."""
    if plugin.pp_size > 1:
        raise ValueError(
            f"batches cannot be combined with pp_size={plugin.pp_size}: a pipeline cuts its batch into micro-batches "
            "itself; use pp_size=1, or leave batches out"
        )
    if plugin.sp_size > 1:
        raise ValueError(
            f"batches cannot be combined with sp_size={plugin.sp_size}: gradients are averaged over parts of sequences "
            "too; use sp_size=1, or leave batches out"
        )
    if batches.accumulation == "per_rank" and plugin.zero_stage > 1:
        raise ValueError(
            f'accumulation="per_rank" needs zero_stage 0 or 1, not {plugin.zero_stage}, which synchronizes at every '
            'micro-batch; use accumulation="shared"'
        )


def _begin_on_forward(model: ModelWrapper, balancer: Balancer) -> None:
    def begin(module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            balancer.begin()

    # The model inside, whose layers ask the same: it may be called and switched to training by itself, and runs within
    # the hooks by which ZeRO waits for weights that it gathers late.
    model.unwrap(unwrap_peft=False).register_forward_pre_hook(begin)


def _wait_between_passes(schedule: Any, optimizer: OptimizerWrapper, clock: IterationClock) -> None:
    """Count what a pipeline stage does between its forward and backward passes as communication.

    It is waiting for other stages, for the most part: the bubble, and what a slow stage adds to it, are no work of this
    rank's. The same goes for data-parallel replicas, whose gradients a pipeline sums after its last pass.
    """

    def apart(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            clock.mark("communication")
            result = function(*args, **kwargs)
            clock.mark("other")
            return result

        return run

    schedule.forward_step = apart(schedule.forward_step)
    schedule.backward_step = apart(schedule.backward_step)
    optimizer.step = apart(optimizer.step)


def _tick_on_step(optimizer: OptimizerWrapper, balancer: Balancer) -> None:
    step = optimizer.step

    @functools.wraps(step)
    def step_and_tick(*args: Any, **kwargs: Any) -> Any:
        balancer.before_step()
        result = step(*args, **kwargs)
        balancer.tick()
        return result

    optimizer.step = step_and_tick


def _drop_gradients_with_others(optimizer: OptimizerWrapper, balancer: Balancer) -> None:
    """What is kept of gradients until they return goes when all others go."""
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def drop(*args: Any, **kwargs: Any) -> Any:
        balancer.drop_gradients()
        return zero_grad(*args, **kwargs)

    optimizer.zero_grad = drop
