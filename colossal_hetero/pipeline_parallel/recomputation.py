"""Stages that recompute: of each block only the input is kept, and its forward pass runs again in the backward pass.

The blocks themselves are checkpointed, with ``torch.utils.checkpoint``, rather than the model told to do so. Models of
transformers (``gradient_checkpointing_enable``), timm (``set_grad_checkpointing``) and the forward passes that
Colossal-AI puts in their place call ``checkpoint`` in ways of their own: some always in its reentrant form, which
zero-bubble schedules cannot use, and none with the random state of tensor-parallel dropout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..layers.dropout.repeated_dropout import repeated_dropout
from ..profiling.layers.model_layers import find_block_row

__all__ = ["find_recomputable_blocks", "recompute_blocks"]


def find_recomputable_blocks(model: nn.Module) -> str:
    """The name of the row of blocks of ``model`` that a stage can recompute, before Colossal-AI divides it.

    Raises:
        ValueError: the model has no row of blocks, or it is unknown whether its blocks can run twice.
    """
    kind = type(model).__name__
    if not getattr(model, "supports_gradient_checkpointing", False) and not hasattr(model, "set_grad_checkpointing"):
        raise ValueError(
            f"the plan has stages that recompute, but {kind} does not say that its blocks can run twice: it has "
            "neither supports_gradient_checkpointing = True (as models of transformers) nor set_grad_checkpointing (as "
            "models of timm); add one of them if no block changes its inputs in place, or plan without recomputation"
        )
    try:
        return find_block_row(model).name
    except ValueError as error:
        raise ValueError(f"the plan has stages that recompute, but their blocks were not found: {error}") from error


def recompute_blocks(model: nn.Module, row: str) -> None:
    """Let all blocks that this rank has of ``model`` recompute in training, once Colossal-AI has divided it.

    A second call changes nothing. What the script had switched on for the same purpose is switched off, because blocks
    would be repeated twice.

    Args:
        model: what this rank has of the model.
        row: see :func:`find_recomputable_blocks`.
    """
    held = [block for block in model.get_submodule(row).children() if any(True for _ in block.parameters())]
    if any(isinstance(vars(block).get("forward"), _Recomputed) for block in held):
        return
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
    elif getattr(model, "grad_checkpointing", False):
        model.set_grad_checkpointing(False)
    for block in held:
        # Both have types in nn.Module that do not allow this.
        setattr(block, "forward", _Recomputed(block))  # noqa: B010
        setattr(block, "grad_checkpointing", True)  # noqa: B010  timm's name; measurements are told apart by it
    holder = model.get_submodule(row.rpartition(".")[0])
    if "use_cache" in inspect.signature(type(holder).forward).parameters:
        # A repeated block would append its keys and values to the cache again.
        holder.register_forward_pre_hook(_without_cache, with_kwargs=True)


class _Recomputed:
    """The forward pass of ``block``, of which backward keeps only the arguments."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._forward: Callable[..., Any] = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._block.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        context = partial(repeated_dropout, self._block)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=context, **kwargs)


def _without_cache(holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | ({"use_cache": False} if holder.training else {})
