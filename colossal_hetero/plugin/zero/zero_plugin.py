"""ZeRO with a batch fitted to each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import OptimizerWrapper
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ... import accelerator  # noqa: F401  (completes Colossal-AI on a CPU before anything of it is used)
from ...data_parallel.attach import BatchSetup, attach_batches, profile_for
from ...data_parallel.batch_balancer import BatchBalancer
from ...data_parallel.config import BatchConfig
from ...planner.batches.allocation import Allocation
from ...profiling.batches.rank_profiler import describe
from ..uneven_batches import UnevenLoaders
from .lowest_zero_stage import configure_lowest
from .zero_checkpoints import StageCheckpointIO
from .zero_stages import PRECISIONS, STAGES, Configured, options_by_stage, plugin_of_stage, synchronizer

__all__ = ["HeteroZeroPlugin"]


class HeteroZeroPlugin(UnevenLoaders, DPPluginBase):
    """ZeRO, or plain data parallelism, over devices that are not alike: each gets the batch that it can chew.

    A training loop for ``LowLevelZeroPlugin`` or ``TorchDDPPlugin`` stays as it is. The loader hands out
    micro-batches; the optimizer steps once per global batch, with the mean gradient over its samples, however they
    are divided.

    Args:
        stage: of ZeRO. 0 shards nothing (over ``TorchDDPPlugin``), 1 optimizer states, 2 gradients too (both over
            ``LowLevelZeroPlugin``), 3 parameters too (over ``TorchFSDPPlugin``). ``"auto"``: the lowest at which every
            device holds a sample.
        global_batch_size: samples per optimizer step, over all ranks.
        precision: ``fp32``, ``bf16`` or, below stage 3, ``fp16``.
        max_norm: clip gradients to that 2-norm; 0 does not.
        method, accumulation, profile, max_micro_batch, reallocate_above, check_every, training_step: see
            :class:`~colossal_hetero.data_parallel.config.BatchConfig`.
        options: go to the stage's plugin; with ``"auto"``, to those of the stages' plugins that have them.

    Raises:
        TypeError: an option is none of the stage's plugin.
        ValueError: an argument's value cannot be; the message says what can.
    """

    def __init__(
        self,
        stage: int | str,
        global_batch_size: int,
        *,
        precision: str = "fp32",
        max_norm: float = 0.0,
        method: str = "exact",
        accumulation: str = "shared",
        profile: str | Path | None = None,
        max_micro_batch: int | None = None,
        reallocate_above: float = 0.1,
        check_every: int | None = None,
        training_step: Callable | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        chosen = {"training_step": training_step} if training_step is not None else {}
        self.batches: BatchConfig = BatchConfig(
            global_batch_size=global_batch_size,
            method=method,
            accumulation=accumulation,
            profile=profile,
            max_micro_batch=max_micro_batch,
            reallocate_above=reallocate_above,
            check_every=check_every,
            **chosen,
        )
        if not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm} must be 0 (no clipping) or above")
        self.stage = stage
        self.precision = precision
        self.max_norm = max_norm
        self.balancer: BatchBalancer | None = None
        self._plain = {}
        self._checkpoint_io: tuple[DPPluginBase, CheckpointIO] | None = None
        self._stages = stages_to_try(stage, precision, self.batches.accumulation)
        self._options = options_by_stage(self._stages, options)
        self._inner = self._plugin_of(self._stages[0])

    @property
    def allocation(self) -> Allocation | None:
        """How a full global batch is divided; None before ``booster.boost``."""
        return None if self.balancer is None else self.balancer.allocation

    def _plugin_of(self, stage: int) -> DPPluginBase:
        return plugin_of_stage(stage, self.precision, self.max_norm, self._options[stage])

    def _replica(self) -> tuple[int, int]:
        return self.rank, self.world_size

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Configured:
        """See ``Plugin.configure``; called by ``Booster.boost``. Measures the devices unless a profile is there."""
        if optimizer is None:
            return self._inner.configure(model, optimizer, criterion, dataloader, lr_scheduler)
        loader = self.loader_to_train_with(dataloader)
        description = describe(model)
        self.stage, self._inner, (model, optimizer, criterion, _, lr_scheduler) = configure_lowest(
            self._stages,
            self.precision,
            self._plugin_of,
            self.batches.training_step,
            model,
            optimizer,
            criterion,
            loader,
            lr_scheduler,
        )
        setup = BatchSetup(
            config=self.batches,
            stage=self.stage,
            precision=self.precision,
            replica_of=range(self.world_size),
            synchronize=synchronizer(self.stage, model, optimizer),
            max_norm=self.max_norm if self.stage in (0, 3) else 0.0,  # ZeRO's optimizer clips as it steps
        )
        profile = profile_for(setup, description, model, optimizer, criterion, loader)
        self.balancer = attach_batches(setup, profile, model, optimizer, loader, lr_scheduler)
        return model, optimizer, criterion, loader, lr_scheduler

    # What the stage's plugin knows ------------------------------------------------------------------------------

    def support_no_sync(self) -> bool:
        return False

    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper) -> Iterator[None]:
        raise RuntimeError("gradients are accumulated by the plugin itself, as many micro-batches as each rank has")

    def support_lora(self) -> bool:
        return self._inner.support_lora()

    def enable_lora(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return self._inner.enable_lora(model, *args, **kwargs)

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


def stages_to_try(stage: int | str, precision: str, accumulation: str) -> list[int]:
    """The stages that ``stage`` may come to, in ascending order.

    Raises ``ValueError`` for a stage that does not exist, or one that the other arguments cannot be had with.
    """
    if isinstance(stage, bool) or stage not in (*STAGES, "auto"):
        raise ValueError(f'stage={stage!r} is not a stage of ZeRO; there are 0, 1, 2, 3 and "auto"')
    if precision not in PRECISIONS[0]:
        raise ValueError(f"precision={precision!r} is not one of {', '.join(PRECISIONS[0])}")
    stages = [each for each in STAGES if stage in (each, "auto")]
    if accumulation == "per_rank" and stages[0] > 1:
        raise ValueError(
            f'accumulation="per_rank" needs stage 0 or 1, not {stage}: stages 2 and 3 synchronize at every '
            'micro-batch, so all ranks must run the same number of them; use accumulation="shared"'
        )
    known = [each for each in stages if precision in PRECISIONS[each]]
    if not known:
        raise ValueError(f"precision={precision!r} is not available at stage {stage}; use {' or '.join(PRECISIONS[3])}")
    return known[:2] if accumulation == "per_rank" else known
