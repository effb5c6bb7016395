"""Optimizer steps with gradients that have not been summed over ranks."""

from __future__ import annotations

import functools
from typing import Any

from colossalai.interface import ModelWrapper, OptimizerWrapper

__all__ = ["refuse_unsummed_steps"]


def refuse_unsummed_steps(model: ModelWrapper, optimizer: OptimizerWrapper) -> None:
    """Let ``optimizer.step`` raise ``RuntimeError`` if the last backward pass ran inside ``no_sync``: ranks would
    update with different gradients, and ZeRO with none."""
    is_summed = True

    def noting(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_summed
            is_summed = bool(model.require_grad_sync and getattr(optimizer, "require_grad_sync", True))
            return function(*args, **kwargs)

        return run

    optimizer.backward = noting(optimizer.backward)
    optimizer.backward_by_grad = noting(optimizer.backward_by_grad)
    step, zero_grad = optimizer.step, optimizer.zero_grad

    @functools.wraps(step)
    def step_if_summed(*args: Any, **kwargs: Any) -> Any:
        if not is_summed:
            raise RuntimeError(
                "optimizer.step() was called, but the last backward pass ran inside no_sync(), so the ranks have "
                "different gradients; the last backward pass before a step must run outside no_sync()"
            )
        return step(*args, **kwargs)

    @functools.wraps(zero_grad)
    def drop(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_summed
        is_summed = True
        return zero_grad(*args, **kwargs)

    optimizer.step, optimizer.zero_grad = step_if_summed, drop
