"""ZeRO and plain data parallelism with a batch that fits the speed and memory of each device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from colossalai.checkpoint_io import CheckpointIO
from colossalai.cluster import DistCoordinator
from colossalai.interface import OptimizerWrapper
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ...checkpoint.config import CheckpointConfig
from ...colossalai_support.accelerator import get_accelerator
from ...colossalai_support.gpu_over_gloo import is_gpu_over_gloo, support_gpus_over_gloo
from ...common.ranks import check_launched, from_rank_0, on_every_rank, print_on_rank_0, world_timeout
from ...common.text import duration, print_words, spans
from ...data_parallel.batch_balancer import BatchBalancer
from ...data_parallel.config import BatchConfig, BatchSetup
from ...planner.batches.adapt import AdaptPlan, adapt_profile, with_cluster_links
from ...planner.batches.allocation import Allocation
from ...planner.batches.batch_profile import BatchProfile, load_profile
from ...planner.cluster.cluster_file import load_cluster
from ..checkpoint_part import CheckpointMethods, Checkpoints
from ..report import OnReport, Report, Reports
from ..training_objects import TrainingObjects, check_option
from ..uneven_batches import UnevenBatches
from . import zero_stages
from .elementwise_updates import can_be_sharded, check_sharding
from .lowest_zero_stage import configure_lowest_stage
from .zero_checkpoints import StageCheckpointIO, check_owned, name_groups, parameter_names


@dataclass(frozen=True)
class RankDevice:
    kind: str  # name of the accelerator, such as ``cuda`` or ``cpu``
    over_gloo: bool  # its tensors are sent over Gloo


def device_of_this_rank() -> RankDevice:
    kind = get_accelerator().name
    return RankDevice(kind, kind == "cpu" or is_gpu_over_gloo())


def stages_for(stages: Sequence[int], devices: Sequence[RankDevice]) -> list[int]:
    """Stages among ``stages`` that can run on these devices, which are given by rank."""
    kinds = sorted({device.kind for device in devices})
    if len(kinds) == 1:
        return list(stages)
    shown = " and ".join(kinds)
    apart = [rank for rank, device in enumerate(devices) if not device.over_gloo]
    if apart:
        raise ValueError(
            f"the ranks have devices of the kinds {shown}, and rank {apart[0]} does not communicate over Gloo, which "
            'alone connects them; start all ranks with torch.distributed.init_process_group("gloo")'
        )
    # FSDP (stage 3) gathers parameters in an order that depends on the kind of the device.
    possible = [stage for stage in stages if stage < 3]
    if not possible:
        raise ValueError(
            f"stage {stages[0]} needs devices of one kind, but the ranks have {shown}; use stage 0, 1 or 2"
        )
    return possible


class HeteroZeroPlugin(CheckpointMethods, DPPluginBase):
    """ZeRO, or plain data parallelism, over unequal devices: each gets a batch that fits its speed and memory. At
    stages 0 to 2 and over Gloo, some ranks may have a GPU and others a CPU (see ``docs/data-parallel.md``).

    A training loop for ``LowLevelZeroPlugin`` or ``TorchDDPPlugin`` needs no change. The loader returns micro-batches.
    The optimizer steps once per global batch, with the mean gradient over its samples, however these are divided.

    Args:
        stage: ZeRO stage. 0 shards nothing (uses ``TorchDDPPlugin``), 1 shards optimizer states, 2 also gradients (both
            use ``LowLevelZeroPlugin``), 3 also parameters (uses ``TorchFSDPPlugin``). ``"auto"``: the lowest stage at
            which every device can train with one sample.
        global_batch_size: samples per optimizer step, over all ranks; short for
            ``batches=BatchConfig(global_batch_size=...)``.
        batches: how to measure the devices and divide global batches.
        precision: ``fp32``, ``bf16`` or, below stage 3, ``fp16``.
        max_norm: clip gradients to this 2-norm; 0 for no clipping.
        checkpoints: where :meth:`save` saves layer checkpoints, from which :meth:`resume` continues; stages 0 to 2.
        on_report: called on rank 0 every ``report_every`` optimizer steps with the numbers of :meth:`report`.
        report_every: at least 1.
        options: further arguments of the stage's plugin; with ``"auto"``, of the plugins of all stages that have them.

    Raises:
        TypeError: the stage's plugin does not have an option, or not exactly one of ``global_batch_size`` and
            ``batches`` is given.
        ValueError: an argument has an impossible value; the message lists the possible ones.
    """

    def __init__(
        self,
        stage: int | str,
        global_batch_size: int | None = None,
        *,
        batches: BatchConfig | None = None,
        precision: str = "fp32",
        max_norm: float = 0.0,
        checkpoints: CheckpointConfig | None = None,
        on_report: OnReport | None = None,
        report_every: int = 50,
        **options: Any,
    ) -> None:
        check_launched()
        if (global_batch_size is None) == (batches is None):
            raise TypeError("give one of global_batch_size and batches=BatchConfig(global_batch_size=..., ...)")
        if global_batch_size is not None:
            batches = BatchConfig(global_batch_size=global_batch_size)
        check_option("batches", batches, BatchConfig, "global_batch_size=...")
        check_option("checkpoints", checkpoints, CheckpointConfig, "shared=...")
        assert batches is not None
        self.batches = batches
        self._stages = stages_to_try(stage, precision, self.batches.accumulation)
        self._options = zero_stages.options_by_stage(self._stages, options)
        if not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm} must be 0 (no clipping) or above")
        self._adapted = adapt_world(self.batches)
        super().__init__()
        support_gpus_over_gloo()
        self._reports = Reports(on_report, report_every)
        self._checkpoints = None if checkpoints is None else Checkpoints(checkpoints)
        self.stage, self.precision, self.max_norm = stage, precision, max_norm
        self._checkpoint_io: tuple[DPPluginBase, CheckpointIO] | None = None
        self._uneven_batches = UnevenBatches(self.batches)
        self._inner = self._plugin_of(self._stages[0])

    @property
    def batch_balancer(self) -> BatchBalancer | None:
        """Divides the global batches; None before ``booster.boost``."""
        return self._uneven_batches.balancer

    @property
    def allocation(self) -> Allocation | None:
        """Division of a full global batch; None before ``booster.boost``."""
        return None if self.batch_balancer is None else self.batch_balancer.allocation

    def report(self) -> Report:
        """How global batches are divided, and each rank's latest times: ``print()`` it, or use
        :meth:`.Report.as_dict`. Ranks exchange times when they check them, at the end of an epoch or every
        ``BatchConfig.check_every`` global batches; one rank alone may ask for the report."""
        return Report(batches=self._uneven_batches.report())

    def _yes(self) -> bool:
        return True

    support_no_sync = support_lora = control_precision = control_device = control_checkpoint_io = _yes

    def _plan_in_words(self) -> str:
        return f"dp {self.world_size}, ZeRO stage {self.stage}"

    def _plugin_of(self, stage: int) -> DPPluginBase:
        return zero_stages.plugin_of_stage(stage, self.precision, self.max_norm, self._options[stage])

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> zero_stages.Configured:
        if optimizer is None:
            return self._inner.configure(model, optimizer, criterion, dataloader, lr_scheduler)
        objects = TrainingObjects(model, optimizer, criterion, dataloader, lr_scheduler)
        objects = self._uneven_batches.before_configure(self, objects)
        devices = on_every_rank(device_of_this_rank, "asking for the device of each rank")
        self._stages = stages_for(shardable_stages(self._stages, optimizer), devices)
        if self._checkpoints is not None:
            self._checkpoints.note(objects)
        names = parameter_names(model, optimizer)
        check_owned(model, optimizer, self._stages)
        self.stage, self._inner, objects = configure_lowest_stage(
            self._stages, self.precision, self._plugin_of, self.batches.training_step, objects
        )
        name_groups(objects.optimizer, names, int(self.stage))
        self._uneven_batches.measure(self, objects)
        objects.optimizer.zero_grad()
        self._uneven_batches.attach(self, objects)
        if self._checkpoints is not None:
            self._checkpoints.attach(self, objects)
        self._reports.attach(objects.optimizer, self.report)
        return objects

    def prepare_dataloader(
        self, dataset: Dataset, batch_size: int | None = None, *args: Any, **kwargs: Any
    ) -> DataLoader:
        """See :meth:`.UnevenBatches.prepare_dataloader`; the other arguments are those of Colossal-AI's plugins."""
        make_loader = super().prepare_dataloader
        return self._uneven_batches.prepare_dataloader(self, make_loader, dataset, batch_size, *args, **kwargs)

    def replica(self) -> tuple[int, int]:
        return self.rank, self.world_size

    def batch_setup(self, objects: TrainingObjects) -> BatchSetup:
        return BatchSetup(
            config=self.batches,
            stage=int(self.stage),
            precision=self.precision,
            replica_of=range(self.world_size),
            synchronize=zero_stages.synchronizer(int(self.stage), objects.model, objects.optimizer),
            leaves=[handle.flat_param for handle in zero_stages.fsdp_handles(objects.model)],
            max_norm=self.max_norm if self.stage in (0, 3) else 0.0,  # ZeRO's optimizer clips in its step
            profile=self._adapted,
        )

    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper) -> AbstractContextManager[None]:
        """Changes nothing: gradients are summed over ranks once per global batch, in stages 2 and 3 in every pass. A
        loop that accumulates several global batches gets the same result."""
        return nullcontext()

    def enable_lora(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """See ``TorchDDPPlugin.enable_lora``; the same at stages 0 to 2."""
        self._stages = [stage for stage in self._stages if stage < 3]
        if not self._stages:
            raise ValueError("LoRA at stage 3 is not possible, as in TorchFSDPPlugin; use stage 0, 1 or 2")
        return TorchDDPPlugin().enable_lora(model, *args, **kwargs)

    def supported_precisions(self) -> list[str]:
        return list(zero_stages.PRECISIONS[self._stages[-1]])

    def supported_devices(self) -> list[str]:
        return ["cuda", "npu", "cpu"]

    def get_checkpoint_io(self) -> CheckpointIO:
        return StageCheckpointIO(self._checkpoint_io_of_stage)

    def _checkpoint_io_of_stage(self) -> CheckpointIO:
        if self._checkpoint_io is None or self._checkpoint_io[0] is not self._inner:
            self._checkpoint_io = self._inner, self._inner.get_checkpoint_io()
        return self._checkpoint_io[1]


def shardable_stages(stages: Sequence[int], optimizer: Optimizer) -> list[int]:
    """Stages among ``stages`` at which ``optimizer`` updates parameters exactly; ``ValueError`` if there are none."""
    possible = [stage for stage in stages if stage == 0 or can_be_sharded(optimizer, distributed=stage < 3)]
    if not possible:
        check_sharding(optimizer, "stage", stages[0], distributed=stages[0] < 3)
    return possible


def stages_to_try(stage: int | str, precision: str, accumulation: str) -> list[int]:
    """ZeRO stages that ``stage`` allows, ascending; ``ValueError`` if it does not exist or fit the other arguments."""
    if isinstance(stage, bool) or stage not in (*zero_stages.STAGES, "auto"):
        raise ValueError(f'stage={stage!r} is not a ZeRO stage; use 0, 1, 2, 3 or "auto"')
    if precision not in zero_stages.PRECISIONS[0]:
        raise ValueError(f"precision={precision!r} is not one of {', '.join(zero_stages.PRECISIONS[0])}")
    stages = [each for each in zero_stages.STAGES if stage in (each, "auto")]
    if accumulation == "per_rank" and stages[0] > 1:
        raise ValueError(
            f'accumulation="per_rank" needs stage 0 or 1, not {stage}: the others synchronize at every micro-batch, '
            'so all ranks must run the same number of them; use accumulation="shared"'
        )
    known = [each for each in stages if precision in zero_stages.PRECISIONS[each]]
    if not known:
        raise ValueError(
            f"precision={precision!r} is not available at stage {stage}; use {' or '.join(zero_stages.PRECISIONS[3])}"
        )
    return known[:2] if accumulation == "per_rank" else known


# ADAPT ----------------------------------------------------------------------------------------------------------------
# ADAPT (chapter 5) in training: devices that slow down the others are left out, and ranks numbered in ring order.


_former: list[dist.ProcessGroup] = []
"""Groups of all ranks that were launched. They stay open: an idle rank ends when rank 0's connection closes."""


def adapt_world(config: BatchConfig) -> BatchProfile | None:
    """With method ``adapt``, the profile of the ranks that train, which are numbered anew; None with another method, or
    without links in an existing profile. A rank that is left out does not return: it waits until the others have ended,
    and then ends with exit code 0. Called by all ranks, before groups are made."""
    if config.method != "adapt":
        return None
    path = Path(config.profile or "")
    profile = from_rank_0(lambda: _read(path, config.cluster) if path.is_file() else None)
    if profile is None or not profile.links:
        print_on_rank_0("all devices take part: leaving devices out needs the profile of an earlier run, and a cluster")
        return None
    if len(profile.ranks) != dist.get_world_size():
        raise ValueError(
            f"profile={str(config.profile)!r} is of {len(profile.ranks)} ranks, but {dist.get_world_size()} were "
            "started; start one rank for each device of the profile, in the same order"
        )
    plan = adapt_profile(profile, config.global_batch_size, profile.stage, config.accumulation)
    if plan.ring != tuple(range(len(profile.ranks))):
        _renumber(plan)
    return profile.of_ranks(plan.ring, plan.allocation.communication_seconds)


def _read(path: Path, cluster: str | Path | None) -> BatchProfile:
    profile = load_profile(path)
    return profile if cluster is None else with_cluster_links(profile, load_cluster(cluster))


def _renumber(plan: AdaptPlan) -> None:
    """Make a default group of the ranks in ``plan.ring``, in this order."""
    rank, limit, first = dist.get_rank(), world_timeout(), plan.ring[0]
    backend, store = dist.get_backend_config(), distributed_c10d._get_default_store()
    if rank == first:
        print_words(_in_words(plan))
    former = dist.new_group(timeout=timedelta(days=365), backend="gloo")
    assert isinstance(former, dist.ProcessGroup)
    dist.destroy_process_group()
    if rank not in plan.ring:
        _idle(former, first, rank)
    _former.append(former)
    new = plan.ring.index(rank)
    distributed_c10d._world.group_count = 0  # torch numbers groups, and an idle rank does not count on
    dist.init_process_group(
        backend, store=dist.PrefixStore("adapt", store), rank=new, world_size=len(plan.ring), timeout=limit
    )
    os.environ.update(RANK=str(new), WORLD_SIZE=str(len(plan.ring)))
    DistCoordinator().__init__()  # type: ignore[misc]  # Colossal-AI has one coordinator, which knows the former rank


def _idle(former: dist.ProcessGroup, first: int, rank: int) -> None:
    """Wait until the process with the former rank ``first`` has ended, and end this one."""

    def wait() -> None:
        with suppress(RuntimeError):  # the connection is closed
            former.recv([torch.empty(1)], first, 0).wait()

    # In a thread, because torch does not react to an interrupt while it waits.
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while waiting.is_alive():
        waiting.join(1.0)
    raise SystemExit(0)


def _in_words(plan: AdaptPlan) -> str:
    before, after = (duration(seconds) for seconds in (plan.steps[0].cost_seconds, plan.cost_seconds))
    reasons = "; ".join(step.reason for step in plan.steps if step.kept and step.without)
    words = f"numbered as in the fastest ring, these ranks train: {' → '.join(map(str, plan.ring))}"
    if not plan.dropped:
        return words
    names = f"rank {spans(plan.dropped)} idles" if len(plan.dropped) == 1 else f"ranks {spans(plan.dropped)} idle"
    return f"{names}: a global batch takes {after} instead of {before} ({reasons}); {words}"
