"""Fused optimizers (``FusedAdam``, ``FusedSGD``) step where a group of parameters has no gradient."""

from __future__ import annotations

from functools import wraps
from typing import Any

from colossalai.utils.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["correct"]


def correct() -> None:
    """Leave out kernels that would be given no tensor: they raise an error."""
    applier: Any = MultiTensorApply
    apply = applier.__call__

    @wraps(apply)
    def run(self: Any, op: Any, buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        return apply(self, op, buffer, tensor_lists, *args) if tensor_lists[0] else None

    applier.__call__ = run
