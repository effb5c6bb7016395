"""Colossal-AI's hybrid-parallel plugin with balanced layers, uneven batches over replicas, and planned runs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.shardformer.policies.base_policy import Policy
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ...balance.balancer import Balancer
from ...balance.config import BalanceConfig
from ...checkpoint.config import CheckpointConfig
from ...checkpoint.layer_checkpoint import Start
from ...checkpoint.run_states import Training
from ...colossalai_support.gpu_over_gloo import support_gpus_over_gloo
from ...common.ranks import check_launched, of_every_rank
from ...data_parallel.batch_balancer import BatchBalancer
from ...data_parallel.config import BatchConfig, BatchSetup
from ...data_parallel.loader import HeteroDataLoader
from ...data_parallel.resumable_loader import ResumableDataLoader, make_even_loader
from ...data_parallel.unsummed_steps import refuse_unfinished_sums, replica_of
from ...elastic.config import ElasticConfig
from ...elastic.held_layers import HeldLayers, Recoveries, Recovery
from ...planner.cost.plan import Plan
from ..checkpoint_part import CheckpointMethods, Checkpoints, PresentCheckpointIO
from ..elastic.elastic_run import ElasticRun
from ..elastic.planning import SHARD_COPIES, check_elastic, seated
from ..elastic.restart_run import elastic_run_of
from ..plan_config import PlanConfig
from ..replicas.unequal_replicas import ReplicaCheckpointIO, why_layer_sums
from ..report import OnReport, Report, Reports
from ..training_objects import TrainingObjects, check_option
from ..uneven_batches import PipelineBatches, UnevenBatches
from ..zero.elementwise_updates import check_sharding
from ..zero.overlapped_optimizer import split_off_overlap
from . import plugin_arguments
from .drift import DriftReport
from .layer_balancing import LayerBalancing
from .live_plan import LivePlan, PlanChange, follows
from .passes import PassesPlugin, no_layers
from .plan_agreement import agree_on_next_plan
from .planned_run import PlannedRun

DEFAULT_BALANCE = BalanceConfig(reshard_after=None, head=False)
"""Where the user asks for nothing, no parameter changes its shape, and logits are those of Colossal-AI's head."""


class HeteroHybridParallelPlugin(CheckpointMethods, PassesPlugin):
    """``HybridParallelPlugin`` whose tensor-parallel layers are balanced over unequal devices.

    It takes every argument of Colossal-AI's plugin, plus ``balance``, ``batches``, ``plan``, ``planning``,
    ``checkpoints`` and ``elastic``. Without a ``custom_policy`` the model's own policy is used (Colossal-AI's, or ours
    for timm's ``VisionTransformer``). In any policy, our layers replace the parallel linear layers. ``Booster`` saves
    and loads checkpoints of Colossal-AI's format.

    With a plan, ``tp_size``, ``pp_size`` and the schedule's arguments follow from it; one that is given as well must
    agree. Every rank takes the place that the plan gives it: neighboring stages need not have neighboring ranks.
    Without a plan, ``num_layers_per_stage`` may still give stages different numbers of layers, in any schedule; in the
    interleaved and zero-bubble ones, whose stages hold several chunks of the model, it has one number per chunk.

    Args:
        tp_size: ranks in a tensor-parallel group; may be left out with a plan. With ``plan="auto"`` only plans with
            this size are considered, and the same holds for ``pp_size``.
        pp_size: pipeline stages; may be left out with a plan. With ``plan="auto"`` it asks for equal replicas.
        balance: what to do about slow ranks within a tensor-parallel group. By default their work is migrated, which
            does not change the result (dropout inside blocks draws other units); what cannot be balanced is only
            measured.
        batches: how to divide global batches over replicas that are not equally fast (data parallelism); by default
            evenly. For pipelines a plan does it.
        plan: which rank computes which layers: a plan, the path of a plan file (``colossal-hetero plan --out`` writes
            one), or "auto", which makes a plan from ``planning``. Only rank 0 needs the files. In 1F1B, replicas may
            differ in stages and batches; if stages take other times than planned, layers move to other ranks with
            "auto", and otherwise it is reported at the end of each epoch. A replica's batch is all its micro-batches.
            One training loop (:meth:`execute_pipeline`) fits every plan.
        planning: what to plan from, over which networks ranks communicate, and how much stage times may differ.
        checkpoints: where :meth:`save` saves layer checkpoints, from which :meth:`resume` continues with any plan.
        elastic: goes on when processes die or join; see ``docs/elastic.md``. The constructor then forms the group of
            processes, in place of ``colossalai.launch_from_torch``.
        on_report: called on rank 0 with the numbers of :meth:`report` when ranks have exchanged them: after 4, 8, 16,
            … optimizer steps, and then after every ``report_every``.
        report_every: at least 1, the same on all ranks.

    Raises:
        TypeError: one of the package's own arguments has another type, or without a plan a size is missing.
        ValueError: the world size does not fit ``tp_size * pp_size`` or the plan, an argument contradicts the plan or
            cannot be combined with replicas that are not alike, the plan is for another model, the model has no policy,
            or a layer has an option that cannot be combined with the balance mode.
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
        checkpoints: CheckpointConfig | None = None,
        elastic: ElasticConfig | None = None,
        on_report: OnReport | None = None,
        report_every: int = 50,
        **kwargs: Any,
    ) -> None:
        arguments = plugin_arguments.arguments_by_name(HeteroHybridParallelPlugin, tp_size, pp_size, *args, **kwargs)
        arguments |= dict(balance=balance, batches=batches, plan=plan, planning=planning, checkpoints=checkpoints)
        self._elastic: ElasticRun | None = None
        self._reports = Reports(on_report, report_every)
        self._live: LivePlan | None = None
        self._loaders = WeakSet[HeteroDataLoader | ResumableDataLoader]()
        if elastic is not None:
            check_elastic(elastic, arguments)
        check_option("planning", planning, PlanConfig, "cluster=..., profile=...")
        if follows(planning or PlanConfig(), arguments, elastic is not None):
            self._live = LivePlan(self, arguments)
        if elastic is None:
            check_launched()
            self._build(**arguments)
            return
        self._elastic = elastic_run_of(self, arguments, elastic)
        self._elastic.start()

    def build_again(
        self, arguments: Mapping[str, Any], planning: PlanConfig, held: Sequence[HeldLayers | None], size: int | None
    ) -> Plan:
        """Build the plugin for another world of an elastic run; returns its plan, which keeps layers where they are
        ``held``. Called by all ranks."""
        self.give_up_saves()
        agreed = agree_on_next_plan(planning, arguments["tp_size"], size)
        assert agreed.topology is not None and agreed.profile is not None
        plan = seated(agreed.plan, agreed.topology, agreed.profile, held)
        self.rebuild(**{**arguments, "planning": planning, "plan": plan})
        return plan

    def rebuild(self, **arguments: Any) -> None:
        """Build the plugin anew with other arguments. Called by all ranks."""
        kept = {name: vars(self)[name] for name in ("_elastic", "_live", "_reports", "_loaders")}
        self.__dict__.clear()
        self.__dict__.update(kept)
        self._build(**arguments)

    def _build(
        self,
        balance: BalanceConfig | None,
        batches: BatchConfig | None,
        plan: Plan | str | Path | None,
        planning: PlanConfig | None,
        checkpoints: CheckpointConfig | None,
        **arguments: Any,
    ) -> None:
        """Make the parent and the parts; ``arguments`` are those of the parent."""
        check_option("balance", balance, BalanceConfig, "mode=...")
        check_option("checkpoints", checkpoints, CheckpointConfig, "shared=...")
        check_option("batches", batches, BatchConfig, "global_batch_size=...")
        plugin_arguments.check_sizes_given(arguments, plan)
        self.balance = balance or DEFAULT_BALANCE
        self.batches = batches
        self.planning = planning or PlanConfig()
        self.custom_policy: Policy | None
        if arguments.get("use_fp8"):
            self.balance = plugin_arguments.balance_in_fp8(balance)
        self._planned = None if plan is None else PlannedRun(plan, self.planning, arguments, batches, self._live)
        if self._planned is not None:
            arguments = self._planned.arguments
        layers_move, reports = self._elastic is not None, self._reports
        if self._live is not None and self._planned is not None:
            layers_move = self._planned.is_watched
        on_report = reports.callback(self.report)
        self._balancing = LayerBalancing(self.balance, layers_move, balance is None, reports.every, on_report)
        self._unequal = None if self._planned is None else self._planned.unequal
        self._uneven_batches: UnevenBatches | None = None
        if batches is not None:
            plugin_arguments.check_uneven_batches(batches, arguments)
            self._uneven_batches = UnevenBatches(batches)
        elif self._unequal is not None:
            self._uneven_batches = PipelineBatches(self._unequal.plan)
        is_broken = None if self._elastic is None else self._elastic.is_broken
        changed, ordinary = self._balancing.weights_changed, self._balancing.ordinary_shards
        self._checkpoints = None if checkpoints is None else Checkpoints(checkpoints, changed, is_broken, ordinary)
        if self._unequal is None:
            plugin_arguments.check_world_size(arguments["tp_size"], arguments["pp_size"])
        support_gpus_over_gloo()
        arguments, layers_per_chunk = plugin_arguments.split_off_layers_per_chunk(arguments)
        arguments, self._optimizers = split_off_overlap(arguments)
        if self._unequal is not None:
            self._unequal.shard_copies = SHARD_COPIES if self._elastic is not None else 1
            self._optimizers = functools.partial(self._unequal.optimizers, arguments)
        with nullcontext() if self._planned is None else self._planned.mesh(arguments.get("dp_outside", True)):
            super().__init__(**arguments)
        self._one_stage = self._make_one_stage(arguments)
        if self._unequal is not None:
            # The constructor has seen one replica.
            self.dp_size = len(self._unequal.plan.replicas)
        if layers_per_chunk is not None:
            plugin_arguments.set_layers_per_chunk(self.stage_manager, layers_per_chunk, self.plan)
        if balance is not None and self.balance.mode != "off" and self.tp_size == 1:
            warnings.warn(f"balance mode {self.balance.mode!r} has nothing to balance with tp_size=1", stacklevel=2)

    def _plan_in_words(self) -> str:
        zero = f", ZeRO stage {self.zero_stage}" if self.zero_stage else ""
        return f"dp {self.dp_size}, pp {self.pp_size}, tp {self.tp_size}{zero}"

    def __del__(self) -> None:
        # The parent's method needs an attribute that its constructor sets, which is not reached after an error.
        if hasattr(self, "pg_mesh"):
            super().__del__()

    @property
    def plan(self) -> Plan | None:
        """The plan that is run, with ranks as they were launched; None without a plan."""
        return None if self._planned is None else self._planned.plan

    def report(self) -> Report:
        """Which ranks were slow lately, what was done about it, and what an iteration takes: ``print()`` it, or use
        :meth:`.Report.as_dict`. One rank may ask for it: the numbers are those of the last exchange."""
        balancer, batches = self._balancing.balancer, self._uneven_batches
        balance = None if balancer is None else balancer.report()  # which may take in newer numbers
        iterations = self.version or (0 if balancer is None else balancer.iterations)
        recoveries = Recoveries(self.recoveries) if self.recoveries else None
        return Report(iterations, balance, None if batches is None else batches.report(), self.drift, recoveries)

    @property
    def plan_changes(self) -> tuple[PlanChange, ...]:
        """Moves of layers to other ranks, where the plan follows speeds (``follow_speed`` of ``PlanConfig``)."""
        return () if self._live is None else tuple(self._live.changes)

    @property
    def drift(self) -> DriftReport | None:
        """Stage times against the plan, of the last epoch, or where the plan follows speeds, of the last iterations;
        None before, and without a planned 1F1B pipeline. An epoch has as many iterations as the boosted dataloader
        has batches, or 100 if that is unknown."""
        return None if self._planned is None else self._planned.drift

    @property
    def balancer(self) -> Balancer | None:
        """Balances the layers of the model that was boosted last; None before ``booster.boost``."""
        return self._balancing.balancer

    @property
    def batch_balancer(self) -> BatchBalancer | None:
        """Divides the global batches; None before ``booster.boost`` and without ``batches``."""
        return None if self._uneven_batches is None else self._uneven_batches.balancer

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        objects = TrainingObjects(model, optimizer, criterion, dataloader, lr_scheduler)
        if self._elastic is None:
            return self._configure(objects)
        return self._elastic.configure(self._configure, objects)

    def _configure(self, objects: TrainingObjects) -> TrainingObjects:
        is_trained = objects.optimizer is not None
        if self._checkpoints is not None and is_trained:
            self._checkpoints.note(objects)
        if self._planned is not None:
            self._planned.check_objects(self, objects)
        if self._uneven_batches is not None and is_trained:
            objects = self._uneven_batches.before_configure(self, objects)
        for follower in (self._elastic, self._live):
            if follower is not None:
                follower.note(objects)
        if self.zero_stage and is_trained:
            check_sharding(objects.optimizer, "zero_stage", self.zero_stage, distributed=self._unequal is None)
        with (
            plugin_arguments.naming_sizes(objects.model, self.tp_size),
            self._balancing.hetero_layers(self, objects.model),
            plugin_arguments.unequal_layer_counts(),
            self._optimizers(),
            plugin_arguments.zero_in_fp32(self),
            no_layers(self, objects) if self._is_idle else nullcontext(),
        ):
            objects = TrainingObjects(*super().configure(*objects))
        if self._planned is not None:
            self._planned.recompute(objects)
        if not is_trained:
            return objects
        replica = replica_of(objects.model, objects.optimizer)
        if replica is not None:
            refuse_unfinished_sums(replica, objects.optimizer)
        if self._uneven_batches is not None:
            self._uneven_batches.measure(self, objects)  # before anything counts the trials as iterations
        # Each attaches around those before it. The plan's clock times only the passes. Balancing ends an iteration when
        # the optimizer steps; uneven batches, around it, step once per global batch.
        for part in (
            self._checkpoints,
            self._planned,
            self._balancing,
            self._uneven_batches,
            self._elastic,
            self._live,
        ):
            if part is not None:
                part.attach(self, objects)
        if not self._is_idle:
            self._refuse_unsummed_steps(objects.model, objects.optimizer)
        return objects

    def prepare_dataloader(
        self, dataset: Dataset, batch_size: int | None = None, *args: Any, **kwargs: Any
    ) -> DataLoader:
        """Make a loader that can continue in an epoch. ``batch_size`` may be left out with ``batches`` and with a plan.
        ``seed`` is also that of the order, as in all loaders of the package; by default it is Colossal-AI's."""
        make_loader = super().prepare_dataloader
        if self._uneven_batches is not None:
            if self._elastic is not None and batch_size is None:
                # Samples are seeded one by one, and data sets with __getitems__ are asked for whole batches.
                kwargs.setdefault("seeds_samples", not hasattr(dataset, "__getitems__"))
            loader = self._uneven_batches.prepare_dataloader(self, make_loader, dataset, batch_size, *args, **kwargs)
        else:
            if self._planned is not None and batch_size is None:
                batch_size = self._planned.batch_size
            loader = make_even_loader(make_loader, dataset, batch_size, *args, **kwargs)
        if isinstance(loader, HeteroDataLoader | ResumableDataLoader):
            self._loaders.add(loader)
        return loader

    def enable_lora(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """See ``HybridParallelPlugin.enable_lora``. Raises ``ValueError`` if layers are tensor parallel, or rank 0,
        which writes adapters, is not in the first stage, where they are gathered."""
        if self.tp_size > 1:
            raise ValueError(
                f"LoRA with tp_size={self.tp_size} is not possible: Colossal-AI has no tensor-parallel layers with "
                "adapters; use tp_size=1"
            )
        if self._unequal is not None:
            form, remedy = why_layer_sums(self._unequal.plan)
            raise ValueError(f"{form}, and then LoRA is not possible; {remedy}")
        if self.plan is not None:
            plugin_arguments.check_lora(self.plan)
        return super().enable_lora(model, *args, **kwargs)

    @property
    def version(self) -> int:
        """Optimizer steps that are done in elastic training, by all processes; 0 without ``elastic``."""
        return 0 if self._elastic is None else self._elastic.version

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """The changes of the world that this process has gone through; () without ``elastic``."""
        return () if self._elastic is None else tuple(self._elastic.recoveries)

    def save(self, model: Any, *args: Any, **kwargs: Any) -> bool:
        save = functools.partial(super().save, model, *args, **kwargs)
        return save() if self._elastic is None else self._elastic.guarded(save, False)

    def resume(
        self, model: Any, optimizer: Any, lr_scheduler: Any = None, dataloader: Any = None, *, step: int | None = None
    ) -> Start:
        """See ``CheckpointMethods.resume``. In elastic training, a process that joins gets the state of the others."""
        load = functools.partial(super().resume, model, optimizer, lr_scheduler, dataloader, step=step)
        if self._elastic is None:
            return load()
        if self._checkpoints is None:
            return self._elastic.resume(lr_scheduler, dataloader, Start, lambda: None)
        saved_step = functools.partial(self._checkpoints.files.newest_step, step)
        return self._elastic.resume(lr_scheduler, dataloader, load, saved_step)

    def finish(self) -> None:
        """End elastic training; every process calls it at the end of the script. Later processes and spares then
        end."""
        if self._elastic is not None:
            self._elastic.finish()

    def save_last(self, training: Training, step: int) -> bool:
        """Save a layer checkpoint before all processes end, whatever ``save_every`` is; returns True if it is saved."""
        if self._checkpoints is None:
            return False
        epoch = int(training.loader.state_dict()["epoch"])
        self._checkpoints.save(training, step, epoch, self._plan_in_words(), always=True)
        self._checkpoints.files.wait()
        return True

    def adopt(self, model: ModelWrapper, dataloader: Any) -> None:
        """Let the script's model be that of this plugin, which was made again, and all loaders draw this rank's samples
        from now on."""
        for loader in {dataloader, *self._loaders}:
            if isinstance(loader, ResumableDataLoader):
                loader.continue_as(*self.replica())
            elif isinstance(self._uneven_batches, PipelineBatches) and isinstance(loader, HeteroDataLoader):
                self._uneven_batches.continue_loader(self, loader)
        if self._checkpoints is not None:
            self._checkpoints.adopt(model)

    def get_checkpoint_io(self) -> CheckpointIO:
        stays = self._elastic is None and self._live is None
        return self._checkpoint_io() if stays else PresentCheckpointIO(self._checkpoint_io)

    def _checkpoint_io(self) -> CheckpointIO:
        checkpoint_io = super().get_checkpoint_io()
        if self._unequal is not None:
            groups = self.mixed_dp_group, self.pp_group, self.tp_group, self.sp_group
            checkpoint_io = ReplicaCheckpointIO(self._unequal.index == 0, *groups, self.zero_stage)
        self._balancing.attach_to(checkpoint_io)
        return checkpoint_io

    def replica(self) -> tuple[int, int]:
        if self._unequal is not None:  # an idle rank draws the samples of the first replica, and does not use them
            return 0 if self._is_idle else self._unequal.index, len(self._unequal.plan.replicas)
        return dist.get_group_rank(self.dp_group, dist.get_rank()), self.dp_group.size()

    def batch_setup(self, objects: TrainingObjects) -> BatchSetup:
        assert self.batches is not None
        model, optimizer = objects.model, objects.optimizer

        def synchronize(due: bool) -> None:
            model.require_grad_sync = due
            if isinstance(model.module, nn.parallel.DistributedDataParallel):
                model.module.require_backward_grad_sync = due
            if self.zero_stage == 1:
                optimizer.require_grad_sync = due

        replicas = of_every_rank(self.replica()[0])
        return BatchSetup(self.batches, self.zero_stage, self.precision, replicas, synchronize)
