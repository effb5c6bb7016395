"""Parallel layers on a CPU: tensors are not moved to a GPU, and the random state is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
from colossalai.pipeline.weight_grad_store import WeightGradStore
from colossalai.shardformer.layer import qkv_fused_linear
from colossalai.shardformer.layer.linear import Linear1D_Row
from colossalai.shardformer.layer.qkv_fused_linear import FusedLinear1D_Row, GPT2FusedLinearConv1D_Row
from colossalai.shardformer.layer.utils import Randomizer

__all__ = ["patch"]


@contextmanager
def _cuda_stays_here(tensor: torch.Tensor) -> Iterator[None]:
    """Let ``tensor.cuda()`` return the tensor itself, contiguous and detached.

    Colossal-AI calls it because NCCL only sends from GPUs; Gloo sends from the memory where the tensor is.
    """
    tensor.cuda = tensor.detach().contiguous  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del tensor.cuda


def _gathering_here(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``gather_fused_qkv_in_gpt2_style`` without a GPU; used for checkpoints and gathered outputs of fused layers."""

    @wraps(gather)
    def gather_fused_qkv(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with _cuda_stays_here(qkv):
            return gather(qkv, *args, **kwargs)

    return gather_fused_qkv


def _resetting_here(reset: Callable[..., None]) -> Callable[..., None]:
    """``reset_parameters`` of a row-parallel layer, which broadcasts its bias from the GPU."""

    @wraps(reset)
    def reset_parameters(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if layer.bias is None:
            return reset(layer, *args, **kwargs)
        with _cuda_stays_here(layer.bias):
            return reset(layer, *args, **kwargs)

    return reset_parameters


def _forking_one_state(fork: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
    """``Randomizer.fork_rng`` for one generator.

    With ``enable_cpu`` the original saves the device's state and then the CPU's, and restores them in the same order.
    On a CPU both are one generator, so the randomizer's state would remain as the global one.
    """

    @wraps(fork)
    def fork_rng(randomizer: Randomizer, enable_cpu: bool = False) -> AbstractContextManager[None]:
        return fork(randomizer)

    return fork_rng


def _accumulating(weight_gradient: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor | None]:
    """A zero-bubble schedule's deferred weight gradient, added to the gradient that is passed to it.

    Colossal-AI's store calls it with ``(x, dy)`` for the first micro-batch and ``(x, dy, dW)`` for later ones. The
    fused kernels of apex, which need a GPU, add to ``dW``; Colossal-AI's plain product ignores it.
    """

    def add(x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor | None = None) -> torch.Tensor | None:
        increment = weight_gradient(x, dy)
        return increment if dw is None else dw.add_(increment)

    return add


def patch() -> None:
    """Let Colossal-AI's parallel layers be built, trained and saved without a GPU."""
    qkv_fused_linear.gather_fused_qkv_in_gpt2_style = _gathering_here(qkv_fused_linear.gather_fused_qkv_in_gpt2_style)
    for layer in (Linear1D_Row, FusedLinear1D_Row, GPT2FusedLinearConv1D_Row):
        layer.reset_parameters = _resetting_here(layer.reset_parameters)
    Randomizer.fork_rng = _forking_one_state(Randomizer.fork_rng)

    put = WeightGradStore.put

    def put_accumulating(x: torch.Tensor, dy: torch.Tensor, weight: Any, weight_gradient: Callable[..., Any]) -> None:
        put(x, dy, weight, _accumulating(weight_gradient))

    WeightGradStore.put = staticmethod(put_accumulating)
