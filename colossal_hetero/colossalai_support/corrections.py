"""Corrections of errors in Colossal-AI 0.5.0 on every device, described in ``docs/colossalai-corrections.md``.

:mod:`.accelerator` applies them on import, so they also hold for Colossal-AI's own plugins.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelNaiveOptimizer
from colossalai.checkpoint_io import hybrid_parallel_checkpoint_io
from colossalai.shardformer.layer import _operation, attn, loss, qkv_fused_linear
from colossalai.tensor.d_tensor.api import is_customized_distributed_tensor, is_distributed_tensor
from colossalai.tensor.d_tensor.layout_converter import LayoutConverter
from colossalai.tensor.padded_tensor import api
from colossalai.utils.multi_tensor_apply.multi_tensor_apply import MultiTensorApply
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import Tensor
from torch.autograd import Function


def without_second_derivatives(function: Any) -> Any:
    """The class ``function`` of the autograd engine, whose backward pass refuses to be differentiated."""
    backward = function.backward

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True does not work through tensor-parallel layers: the sums over ranks in their backward "
                "passes have no derivative in Colossal-AI, so second derivatives would be wrong. Train with tp_size=1, "
                "or without gradients of gradients"
            )
        return backward(ctx, *gradients)

    function.backward = staticmethod(run)
    return function


def correct_second_derivatives() -> None:
    for module in (_operation, attn, loss, qkv_fused_linear):
        for each in vars(module).values():
            if isinstance(each, type) and issubclass(each, Function) and each.__module__ == module.__name__:
                without_second_derivatives(each)


def is_sharded(parameter: torch.Tensor) -> bool:
    """True if each tensor-parallel rank holds its own part of ``parameter``. Fused layers (``FusedLinear1D_Col``) have
    no layout, so Colossal-AI would divide their squared norms by the number of ranks, as those of whole parameters."""
    return is_distributed_tensor(parameter) or is_customized_distributed_tensor(parameter)


def _with_other_stages(compute: Callable[..., float]) -> Callable[..., float]:
    """``compute``, which also takes part in the sums of other ranks if this stage has no gradient."""

    @wraps(compute)
    def run(optimizer: Any, *arguments: Any, **named: Any) -> float:
        *groups, gradients = *arguments, *named.values()
        if gradients:
            return compute(optimizer, *arguments, **named)
        total = torch.zeros(1, device=hybrid_parallel_plugin.get_accelerator().get_current_device())
        for group in (*groups, optimizer.tp_pg, optimizer.pp_pg):
            if group is not None and dist.get_world_size(group) > 1:
                dist.all_reduce(total, group=group)
        return total.item() ** 0.5

    return run


def _gradients(optimizer: Any) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """The model's parameters with their gradients, and the loss scale. Masters have no gradients before the step."""
    parameters = getattr(optimizer, "working_to_master_map", optimizer.parameters)
    scale = getattr(getattr(optimizer, "mixed_precision", None), "loss_scale", 1.0)
    return [(each, each.grad) for each in parameters if each.grad is not None], scale


@torch.no_grad()
def clip_grad_by_norm(
    optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **kwargs: Any
) -> Tensor:
    """Limit the norm of all gradients of the model, and return it; collective. Gradients whose norm is not finite stay
    as they are, so that a step in fp16 is left out."""
    if norm_type != 2.0:
        raise ValueError(f"norm_type={norm_type} is not available in the hybrid plugin, which clips by the 2-norm")
    pairs, scale = _gradients(optimizer)
    norm = HybridParallelNaiveOptimizer._compute_grad_norm(optimizer, pairs) / scale
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the gradients' norm is {norm}: they cannot be clipped")
    factor = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and factor < 1:
        for _, gradient in pairs:
            gradient.mul_(factor)
    return torch.tensor(norm, device=hybrid_parallel_plugin.get_accelerator().get_current_device())


@torch.no_grad()
def clip_grad_by_value(optimizer: Any, clip_value: float, *args: Any, **kwargs: Any) -> None:
    """Limit the elements of the gradients of mixed precision, which fp16 multiplies by a loss scale."""
    pairs, scale = _gradients(optimizer)
    for _, gradient in pairs:
        limit = min(clip_value * scale, torch.finfo(gradient.dtype).max)
        limited = gradient.clamp(-limit, limit)
        if gradient.dtype == torch.float16:
            # Infinite elements stay, so that the step is left out.
            limited = limited.where(gradient.isfinite(), gradient)
        gradient.copy_(limited)


def _refuse_to_clip(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "gradients cannot be clipped before the step with extra_dp_size, with fp8_communication, or in ZeRO of "
        "Colossal-AI's own plugins, because their optimizer keeps them in shards; give the plugin max_norm"
    )


def correct_gradient_norm() -> None:
    """Let the optimizers of Colossal-AI's plugins clip by the gradients of the whole model, or refuse to clip."""
    hybrid_parallel_plugin.is_distributed_tensor = is_sharded
    for name in ("HybridParallelNaiveOptimizer", "HybridParallelAMPOptimizer", "HybridParallelZeroOptimizer"):
        kind: Any = getattr(hybrid_parallel_plugin, name)
        kind._compute_grad_norm = _with_other_stages(kind._compute_grad_norm)
    naive: Any = hybrid_parallel_plugin.HybridParallelNaiveOptimizer
    half: Any = hybrid_parallel_plugin.HybridParallelAMPOptimizer
    zero: Any = LowLevelZeroOptimizer
    naive.clip_grad_by_norm = half.clip_grad_by_norm = clip_grad_by_norm
    half.clip_grad_by_value = clip_grad_by_value
    zero.clip_grad_by_norm = zero.clip_grad_by_value = _refuse_to_clip


def _restore_detach_and_clone(tensor: Any) -> torch.Tensor:
    """``_hijack_back_detach_and_clone`` that accepts copies of a padded tensor. These have the sizes of the padding, so
    that they count as padded, but the methods of a normal tensor."""
    if hasattr(tensor, "_unpad_detach"):
        tensor.detach, tensor.clone = tensor._unpad_detach, tensor._unpad_clone
        del tensor._unpad_detach, tensor._unpad_clone
    return tensor


def tp_partition_dim(current_shape: Sequence[int], original_shape: Sequence[int], tp_size: int) -> int | None:
    """``search_tp_partition_dim`` that accepts padded parameters: the axis that is sharded, or None."""
    for axis, (current, original) in enumerate(zip(current_shape, original_shape, strict=True)):
        if original > current:
            if original > tp_size * current:
                raise ValueError(
                    f"{tp_size} tensor-parallel ranks with parts of shape {tuple(current_shape)} cannot hold a "
                    f"parameter of shape {tuple(original_shape)}; load it with as many ranks as the model was made for"
                )
            return axis
    return None


def correct_padded_vocabulary() -> None:
    api._hijack_back_detach_and_clone = _restore_detach_and_clone
    hybrid_parallel_checkpoint_io.search_tp_partition_dim = tp_partition_dim


def correct_layout_cache() -> None:
    """Let the converter of layouts forget what it knows when it is asked for other process groups."""
    find: Any = LayoutConverter.layout_converting

    @wraps(find)
    def find_for_groups(converter: Any, source: Any, target: Any) -> Any:
        by_rank = source.device_mesh._process_group_dict
        groups = [group.group_name for by_axis in by_rank.values() for group in by_axis.values()]
        if getattr(converter, "groups", groups) != groups:
            converter.cached_solution.clear()
        converter.groups = groups
        return find(converter, source, target)

    LayoutConverter.layout_converting = find_for_groups


def correct_empty_groups() -> None:
    """Leave out kernels that would be given no tensor: they raise an error."""
    applier: Any = MultiTensorApply
    apply = applier.__call__

    @wraps(apply)
    def run(self: Any, op: Any, buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        return apply(self, op, buffer, tensor_lists, *args) if tensor_lists[0] else None

    applier.__call__ = run


def correct_launch() -> None:
    """Say what to do where a script was not started by a launcher; Colossal-AI only names the missing variable."""
    launch = colossalai.launch_from_torch

    @functools.wraps(launch)
    def launch_or_explain(*args: Any, **kwargs: Any) -> Any:
        if "RANK" not in os.environ:
            raise RuntimeError(
                "this script was started as one process without a launcher (RANK is not set); start it with torchrun, "
                f"as in: torchrun --standalone --nproc-per-node 2 {Path(sys.argv[0]).name or 'train.py'}"
            )
        return launch(*args, **kwargs)

    colossalai.launch_from_torch = launch_or_explain


@cache
def correct_colossalai() -> None:
    correct_launch()
    correct_padded_vocabulary()
    correct_gradient_norm()
    correct_layout_cache()
    correct_second_derivatives()
    correct_empty_groups()


class ModuleProxy:
    """``module`` with some names ``replaced``, for one module of Colossal-AI."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """In the block, these attributes of ``target``, a module or another object, have these values."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


# User hooks: those that neither this package nor Colossal-AI has registered.

OWN_PACKAGES = ("colossal_hetero", "colossalai")


def is_from(function: Any, packages: tuple[str, ...]) -> bool:
    """True if one of ``packages`` defines ``function``; a ``functools.partial`` counts as what it calls."""
    while hasattr(function, "func"):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] in packages


def user_hooks(parameter: Tensor) -> Iterator[tuple[Callable[..., Any], bool]]:
    """The user's hooks on the gradient of ``parameter``, each with True if it runs after accumulation."""
    for hooks, is_late in ((parameter._backward_hooks, False), (parameter._post_accumulate_grad_hooks, True)):
        for hook in (hooks or {}).values():
            if not is_from(hook, OWN_PACKAGES):
                yield hook, is_late
