"""Second derivatives through tensor-parallel layers, which Colossal-AI gets wrong, are refused."""

from __future__ import annotations

import functools
from typing import Any

import torch
from colossalai.shardformer.layer import _operation, attn, loss, qkv_fused_linear
from torch.autograd import Function

__all__ = ["correct", "without_second_derivatives"]


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


def correct() -> None:
    """Refuse second derivatives in all functions of Colossal-AI's parallel layers."""
    for module in (_operation, attn, loss, qkv_fused_linear):
        for each in vars(module).values():
            if isinstance(each, type) and issubclass(each, Function) and each.__module__ == module.__name__:
                without_second_derivatives(each)
