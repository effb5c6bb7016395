"""Slow a rank by repeating a model's forward and backward passes; works on any device, without special rights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["repeat_passes"]


class _BeforeBackward(torch.autograd.Function):
    """The identity, whose backward pass calls ``action`` with the gradient first."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, action: Any) -> Tensor:
        ctx.action = action
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.action(gradient)
        return gradient, None


def repeat_passes(model: nn.Module, times: int) -> None:
    """From now on run every forward and backward pass of ``model`` in training ``times`` times.

    The additional passes run through a copy that is not part of the model, so the model's own gradients, hooks and
    sharded memory stay as they are. During a pass the copy needs the memory of one pass more.

    Args:
        model: not boosted yet; takes one tensor and returns one. It must be without dropout, because the additional
            passes would advance the random state.
        times: 1 changes nothing.
    """
    if times == 1:
        return
    twin = copy.deepcopy(model)

    def run_again(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        if not (module.training and torch.is_grad_enabled()):
            return None
        first = inputs[0].detach()
        twin.to(first)  # the device and the precision that a plugin has chosen
        parameters = list(twin.parameters())
        for _ in range(times - 2):
            twin(first)
        again = twin(first)

        def backward_again(gradient: Tensor) -> None:
            for left in reversed(range(times - 1)):
                torch.autograd.grad(again, parameters, gradient.to(again.dtype), retain_graph=left > 0)

        return _BeforeBackward.apply(output, backward_again)

    model.register_forward_hook(run_again)
