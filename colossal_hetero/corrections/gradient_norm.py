"""Clipping of gradients: by the norm of the whole model, also with fused layers, and also before the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelNaiveOptimizer
from colossalai.tensor.d_tensor.api import is_customized_distributed_tensor, is_distributed_tensor
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import Tensor

__all__ = ["correct"]


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Whether each tensor-parallel rank holds its own part of ``parameter``.

    The plugin's optimizers divide the squared norm of all other gradients by the number of ranks, because the sum over
    ranks counts them once per rank. The weights and biases of fused layers (``FusedLinear1D_Col``, GPT-2's layers) are
    sharded in a way of their own and have no layout, by which Colossal-AI tells sharded parameters.
    """
    return is_distributed_tensor(parameter) or is_customized_distributed_tensor(parameter)


def _with_other_stages(compute: Callable[..., float]) -> Callable[..., float]:
    """``compute``, which also takes part in the sums of other ranks if this stage has no gradient."""

    @wraps(compute)
    def run(optimizer: Any, *arguments: Any, **named: Any) -> float:
        # ZeRO's optimizer is given its data-parallel group first.
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
    """Limit the norm of all gradients of the model, and return it. Called by all ranks at once.

    Gradients whose norm is not finite stay as they are, so that a step in fp16 is left out.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
        ValueError: it is another norm than the 2-norm.
    """
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


def correct() -> None:
    """Let the optimizers of Colossal-AI's plugins clip by the gradients of the whole model, or refuse to clip."""
    hybrid_parallel_plugin.is_distributed_tensor = _is_sharded
    for name in ("HybridParallelNaiveOptimizer", "HybridParallelAMPOptimizer", "HybridParallelZeroOptimizer"):
        kind: Any = getattr(hybrid_parallel_plugin, name)
        kind._compute_grad_norm = _with_other_stages(kind._compute_grad_norm)
    naive: Any = hybrid_parallel_plugin.HybridParallelNaiveOptimizer
    half: Any = hybrid_parallel_plugin.HybridParallelAMPOptimizer
    zero: Any = LowLevelZeroOptimizer
    naive.clip_grad_by_norm = half.clip_grad_by_norm = clip_grad_by_norm
    half.clip_grad_by_value = clip_grad_by_value
    zero.clip_grad_by_norm = zero.clip_grad_by_value = _refuse_to_clip
