"""The plugin of Colossal-AI that each ZeRO stage is built on, and how to accumulate gradients with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster.mixed_precision import FP16TorchMixedPrecision
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
from colossalai.booster.plugin.torch_fsdp_plugin import FSDPOptimizerWrapper, TorchFSDPModel
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.optim import Optimizer

from ...colossalai_support.accelerator import get_accelerator
from ...colossalai_support.gpu_over_gloo import is_gpu_over_gloo
from ...common.methods import wrap_method
from ...data_parallel.unsummed_steps import refuse_unfinished_sums
from ...profiling.preserved_state import inner_optimizer
from .overlapped_optimizer import overlapped_optimizers
from .zero_checkpoints import ShardedCheckpointIO

STAGES = (0, 1, 2, 3)
PRECISIONS = dict.fromkeys((0, 1, 2), ("fp32", "fp16", "bf16")) | {3: ("fp32", "bf16")}
"""Precisions of each stage. FSDP in fp16 would need a loss scaler for shards, which Colossal-AI does not have."""

_PLUGINS: dict[int, type] = {0: TorchDDPPlugin, 1: LowLevelZeroPlugin, 2: LowLevelZeroPlugin, 3: TorchFSDPPlugin}
_OURS = {"stage", "precision", "max_norm"}  # HeteroZeroPlugin has its own arguments for them

Configured = tuple[Any, ...]  # the five objects of ``Plugin.configure``


class _AutocastModel(ModelWrapper):
    """A model whose forward pass runs in bfloat16 where that is safe; parameters stay in fp32."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with get_accelerator().autocast(dtype=torch.bfloat16):
            return self.module(*args, **kwargs)

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        return self.module.unwrap(unwrap_peft)


class _ShardedOptimizer(FSDPOptimizerWrapper):
    """FSDP's optimizer, which clips by the norm over all shards. Parameters that no rank has used have no gradient, as
    in one process; FSDP gives them zeros."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer, model)
        self._used: set[tuple[int, int]] = set()
        self._handles = fsdp_handles(model)
        self._places: list[tuple[int, int]] = []  # number of the handle, and of a parameter in its flat parameter
        for number, handle in enumerate(self._handles):
            wrap_method(handle, "_get_unflat_views", partial(self._views, number))
            self._places += [(number, index) for index in range(handle.flat_param._num_params)]

    def _views(self, number: int, get_views: Callable[..., Any], *args: Any) -> list[torch.Tensor]:
        found, used = list(get_views(*args)), self._used
        for index, view in enumerate(found):
            if view.requires_grad:
                view.register_hook(lambda _, place=(number, index): used.add(place))
        return found

    def step(self, *args: Any, **kwargs: Any) -> Any:
        used = torch.tensor([place in self._used for place in self._places], dtype=torch.int32)
        used = used.to(get_accelerator().get_current_device())
        dist.all_reduce(used, dist.ReduceOp.MAX)
        for (number, index), is_used in zip(self._places, used.tolist(), strict=True):
            flat = self._handles[number].flat_param
            if is_used or not flat.requires_grad:
                continue
            assert flat._params is not None  # FSDP keeps the parameters of the model
            flat._params[index].grad = None
        return super().step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        self._used.clear()

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        norm = self.model.module.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the gradients' norm is {norm.item()}: they cannot be clipped")
        return norm


class _Replicas(TorchDDPPlugin):
    """Stage 0: Colossal-AI's DDP plugin with mixed precision inside, which otherwise the ``Booster`` adds around it.
    The loss has to be multiplied by the weight of its gradient before the loss scaler."""

    def __init__(self, precision: str, **options: Any) -> None:
        super().__init__(**options)
        self.precision = precision

    def configure(self, *objects: Any) -> Configured:
        model, optimizer, criterion, dataloader, lr_scheduler = objects
        if get_accelerator().name == "cpu" or is_gpu_over_gloo():
            # The parent's method converts BatchNorm to SyncBatchNorm, which runs only on GPUs, so that in a job with
            # GPUs and CPUs some ranks would wait for others that do not take part.
            model = TorchDDPModel(model.to(get_accelerator().get_current_device()), **self.ddp_kwargs)
            if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
                optimizer = OptimizerWrapper(optimizer)
        else:
            model, optimizer, criterion, dataloader, lr_scheduler = super().configure(*objects)
        if optimizer is not None:
            refuse_unfinished_sums(model.module, optimizer)
        if self.precision == "bf16":
            model = _AutocastModel(model)
        elif self.precision == "fp16":
            # Without the parent's wrapper: loading a sharded checkpoint unwraps only once.
            bare: Any = inner_optimizer(optimizer) if optimizer is not None else None
            model, optimizer, criterion = FP16TorchMixedPrecision().configure(model, bare, criterion)
            if isinstance(optimizer, OptimizerWrapper):
                optimizer.clip_grad_by_norm = MethodType(_clip_unscaled, optimizer)  # type: ignore[method-assign]
        return model, optimizer, criterion, dataloader, lr_scheduler


class _ShardedStates(LowLevelZeroPlugin):
    """Stages 1 and 2: Colossal-AI's ZeRO plugin, whose communication overlaps with computation on every device."""

    def __init__(self, *, overlap_allgather: bool = False, **options: Any) -> None:
        # Groups of groups and 8-bit messages are left to Colossal-AI's optimizer.
        self._is_overlapped = options.get("extra_dp_size", 1) == 1 and not options.get("fp8_communication", False)
        self._gathers_late = overlap_allgather and self._is_overlapped
        super().__init__(overlap_allgather=overlap_allgather and not self._is_overlapped, **options)

    def configure(self, *objects: Any) -> Configured:
        with overlapped_optimizers(self._gathers_late) if self._is_overlapped else nullcontext():
            return super().configure(*objects)


def _clip_unscaled(optimizer: OptimizerWrapper, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``clip_grad_by_norm`` with a loss scale; Colossal-AI's does not return the norm."""
    optimizer.unscale_grad()
    return OptimizerWrapper.clip_grad_by_norm(optimizer, *args, **kwargs)


class _ShardedParameters(TorchFSDPPlugin):
    """Stage 3: Colossal-AI's FSDP plugin, on any device, with the precision given by its name."""

    def __init__(self, precision: str, **options: Any) -> None:
        if precision == "bf16":
            options.setdefault("mixed_precision", MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16))
        super().__init__(**options)

    def configure(self, model: nn.Module, optimizer: Optimizer | None = None, *others: Any) -> Configured:
        if any(value.is_meta for value in model.parameters()):
            raise ValueError(
                "the model is on the meta device, where FSDP would replace its parameters by new ones, which the "
                "optimizer does not have; create the model on a device"
            )
        device = get_accelerator().get_current_device()
        sharded = TorchFSDPModel(model, device_id=device, use_orig_params=True, **self.fsdp_kwargs)
        if optimizer is not None and not isinstance(optimizer, FSDPOptimizerWrapper):
            optimizer.state.clear()
            optimizer = _ShardedOptimizer(optimizer, sharded)
        return sharded, optimizer, *others

    def get_checkpoint_io(self) -> CheckpointIO:
        return ShardedCheckpointIO()


def options_by_stage(stages: Sequence[int], options: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The options that the plugin of each stage has; ``TypeError`` if none has one of them."""
    known = {stage: set(inspect.signature(_PLUGINS[stage]).parameters) - _OURS for stage in stages}
    unknown = set(options).difference(*known.values())
    if unknown:
        plugins = " or ".join(dict.fromkeys(_PLUGINS[stage].__name__.split("_")[0] for stage in stages))
        raise TypeError(
            f"{', '.join(sorted(unknown))}: neither an argument of HeteroZeroPlugin nor an option of {plugins} "
            "(give settings of batches as batches=BatchConfig(...))"
        )
    return {stage: {name: options[name] for name in options if name in known[stage]} for stage in stages}


def plugin_of_stage(stage: int, precision: str, max_norm: float, options: dict[str, Any]) -> DPPluginBase:
    if stage == 0:
        return _Replicas(precision, **options)
    if stage == 3:
        return _ShardedParameters(precision, **options)
    return _ShardedStates(stage=stage, precision=precision, max_norm=max_norm, **options)


def fsdp_handles(model: nn.Module) -> list[Any]:
    shards: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    return [shard._handle for shard in shards if shard._handle is not None]


def synchronizer(stage: int, model: ModelWrapper, optimizer: OptimizerWrapper) -> Callable[[bool], None]:
    """A function that sets if the next backward pass of a boosted model sums its gradients over ranks. In stages 2 and
    3 all do: gradients are kept in shards, to which each micro-batch adds."""
    if stage == 0:
        replica = next(module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel))
        return partial(setattr, replica, "require_backward_grad_sync")
    return partial(setattr, optimizer, "require_grad_sync") if stage == 1 else lambda due: None
