"""The norm that gradients are clipped by: with fused layers, and with pipeline stages that have no gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.tensor.d_tensor.api import is_customized_distributed_tensor, is_distributed_tensor

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


def correct() -> None:
    """Let the hybrid plugin's optimizers count the gradients of fused layers in full, and those of all stages."""
    hybrid_parallel_plugin.is_distributed_tensor = _is_sharded
    for name in ("HybridParallelNaiveOptimizer", "HybridParallelAMPOptimizer", "HybridParallelZeroOptimizer"):
        kind: Any = getattr(hybrid_parallel_plugin, name)
        kind._compute_grad_norm = _with_other_stages(kind._compute_grad_norm)
