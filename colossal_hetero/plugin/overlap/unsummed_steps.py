"""Optimizer steps with gradients that are not the sums over ranks: refused in words.

What the passes have summed is noted for each model, because its optimizers share its gradients.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn

__all__ = ["note_passes", "refuse_unsummed_steps"]


class _Sums:
    """Notes about the gradients of one model."""

    def __init__(self) -> None:
        self.optimizers: WeakSet[OptimizerWrapper] = WeakSet()
        self.unsummed: WeakSet[OptimizerWrapper] = WeakSet()
        """Those of ``optimizers`` whose gradients the last passes have not summed."""


_sums: WeakKeyDictionary[nn.Module, _Sums] = WeakKeyDictionary()


def refuse_unsummed_steps(model: ModelWrapper, optimizer: OptimizerWrapper, *, in_pipeline: bool) -> None:
    """Let ``optimizer.step`` raise ``RuntimeError`` if the last backward pass ran inside ``no_sync``: ranks would
    update with different gradients, and ZeRO with none.

    Args:
        in_pipeline: a schedule calls the optimizer's backward passes, all of them inside ``no_sync``; who runs the
            schedule calls :func:`note_passes` before.
    """
    sums = _sums.setdefault(model, _Sums())
    sums.optimizers.add(optimizer)

    def noting(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            note_passes(model, optimizer)
            return function(*args, **kwargs)

        return run

    if not in_pipeline:
        optimizer.backward = noting(optimizer.backward)
        optimizer.backward_by_grad = noting(optimizer.backward_by_grad)
    step, zero_grad = optimizer.step, optimizer.zero_grad

    @functools.wraps(step)
    def step_if_summed(*args: Any, **kwargs: Any) -> Any:
        if optimizer in sums.unsummed:
            raise RuntimeError(
                "optimizer.step() was called, but the last backward pass ran inside no_sync(), so the ranks have "
                "different gradients; the last backward pass before a step must run outside no_sync()"
            )
        return step(*args, **kwargs)

    @functools.wraps(zero_grad)
    def drop(*args: Any, **kwargs: Any) -> Any:
        sums.unsummed.discard(optimizer)
        return zero_grad(*args, **kwargs)

    optimizer.step, optimizer.zero_grad = step_if_summed, drop


def note_passes(model: ModelWrapper, optimizer: OptimizerWrapper) -> None:
    """Note the backward pass, or all passes of a pipeline's batch, that run next."""
    sums = _sums.get(model)
    if sums is None:
        return
    if not (model.require_grad_sync and getattr(optimizer, "require_grad_sync", True)):
        sums.unsummed.update(sums.optimizers)
    elif hasattr(optimizer, "require_grad_sync"):
        sums.unsummed.discard(optimizer)  # ZeRO sums the gradients of one optimizer
    else:
        sums.unsummed.clear()
