"""The norm that gradients are clipped by, under tensor parallelism."""

from __future__ import annotations

import torch
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


def correct() -> None:
    """Let the hybrid plugin's optimizers count the gradients of fused layers in full."""
    hybrid_parallel_plugin.is_distributed_tensor = _is_sharded
