"""ZeRO and plain data parallelism with a batch that fits the speed and memory of each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import OptimizerWrapper
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ...checkpoint.config import CheckpointConfig
from ...colossalai_support.accelerator import get_accelerator
from ...colossalai_support.gpu_over_gloo import is_gpu_over_gloo, support_gpus_over_gloo
from ...common.ranks import check_launched, on_every_rank
from ...data_parallel.batch_balancer import BatchBalancer
from ...data_parallel.config import BatchConfig, BatchSetup
from ...planner.batches.allocation import Allocation
from ..checkpoint_part import CheckpointMethods, Checkpoints
from ..report import OnReport, Report, Reports
from ..training_objects import TrainingObjects, check_option
from ..uneven_batches import UnevenBatches
from .adapt_world import adapt_world
from .elementwise_updates import can_be_sharded, check_sharding
from .lowest_zero_stage import configure_lowest_stage
from .zero_checkpoints import StageCheckpointIO, check_owned, name_groups, parameter_names
from .zero_stages import (
    PRECISIONS,
    STAGES,
    Configured,
    flat_parameters,
    options_by_stage,
    plugin_of_stage,
    synchronizer,
)

# Mixed devices -------------------------------------------------------------------------------------------------------


LAST_MIXED_STAGE = 2  # FSDP (stage 3) gathers parameters in an order that depends on the kind of the device


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
    possible = [stage for stage in stages if stage <= LAST_MIXED_STAGE]
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
        self._options = options_by_stage(self._stages, options)
        if not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm} must be 0 (no clipping) or above")
        self._adapted = adapt_world(self.batches)
        super().__init__()
        support_gpus_over_gloo()
        self._reports = Reports(on_report, report_every)
        self._checkpoints = None if checkpoints is None else Checkpoints(checkpoints)
        self.stage = stage
        self.precision = precision
        self.max_norm = max_norm
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

    def _plan_in_words(self) -> str:
        return f"dp {self.world_size}, ZeRO stage {self.stage}"

    def _plugin_of(self, stage: int) -> DPPluginBase:
        return plugin_of_stage(stage, self.precision, self.max_norm, self._options[stage])

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Configured:
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

    # For uneven batches ------------------------------------------------------------------------------------------

    def replica(self) -> tuple[int, int]:
        return self.rank, self.world_size

    def batch_setup(self, objects: TrainingObjects) -> BatchSetup:
        return BatchSetup(
            config=self.batches,
            stage=int(self.stage),
            precision=self.precision,
            replica_of=range(self.world_size),
            synchronize=synchronizer(int(self.stage), objects.model, objects.optimizer),
            leaves=flat_parameters(objects.model),
            max_norm=self.max_norm if self.stage in (0, 3) else 0.0,  # ZeRO's optimizer clips in its step
            profile=self._adapted,
        )

    # Answers of the stage's plugin -------------------------------------------------------------------------------

    def support_no_sync(self) -> bool:
        return True

    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper) -> AbstractContextManager[None]:
        """Changes nothing: gradients are summed over ranks once per global batch, and in stages 2 and 3 in every pass,
        in which they become shards. A loop that accumulates several global batches gets the same result."""
        return nullcontext()

    def support_lora(self) -> bool:
        return True

    def enable_lora(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """See ``TorchDDPPlugin.enable_lora``; the same at stages 0 to 2."""
        self._stages = [stage for stage in self._stages if stage < 3]
        if not self._stages:
            raise ValueError("LoRA at stage 3 is not possible, as in TorchFSDPPlugin; use stage 0, 1 or 2")
        return TorchDDPPlugin().enable_lora(model, *args, **kwargs)

    def control_precision(self) -> bool:
        return True

    def supported_precisions(self) -> list[str]:
        return list(PRECISIONS[self._stages[-1]])

    def control_device(self) -> bool:
        return True

    def supported_devices(self) -> list[str]:
        return ["cuda", "npu", "cpu"]

    def control_checkpoint_io(self) -> bool:
        return True

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
    if isinstance(stage, bool) or stage not in (*STAGES, "auto"):
        raise ValueError(f'stage={stage!r} is not a ZeRO stage; use 0, 1, 2, 3 or "auto"')
    if precision not in PRECISIONS[0]:
        raise ValueError(f"precision={precision!r} is not one of {', '.join(PRECISIONS[0])}")
    stages = [each for each in STAGES if stage in (each, "auto")]
    if accumulation == "per_rank" and stages[0] > 1:
        raise ValueError(
            f'accumulation="per_rank" needs stage 0 or 1, not {stage}: the others synchronize at every micro-batch, '
            'so all ranks must run the same number of them; use accumulation="shared"'
        )
    known = [each for each in stages if precision in PRECISIONS[each]]
    if not known:
        raise ValueError(f"precision={precision!r} is not available at stage {stage}; use {' or '.join(PRECISIONS[3])}")
    return known[:2] if accumulation == "per_rank" else known
