"""Gradients that a training loop must not use, because they are not the gradients of the global batch.

[Note: guarded gradients] After a backward pass, micro-batches of the global batch may be missing in ``parameter.grad``,
or each rank has another part of it (ZeRO). Whatever a loop computes with such gradients, it would train to other
weights. So these gradients get a class, :class:`GuardedGradient`, that refuses all functions of torch which read or
change values. Parameters whose gradient is somewhere else (stages 1 and 2) get an empty one, because loops take a
parameter without a gradient for an unused one. FSDP itself may use gradients at any time. Before this package uses
them, and in forward passes, where torch may compile something, they are plain. If a loop has removed all of them or set
them to zero, it has called ``zero_grad`` of a module; other changes are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp._flat_param
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["CLIPPING", "GradientGuard", "GuardedGradient"]

CLIPPING = "optimizer.clip_grad_by_norm() and optimizer.clip_grad_by_value() are exact at every stage"

_PROPERTIES = ("shape", "dtype", "device", "ndim", "grad_fn", "requires_grad", "is_leaf", "is_sparse")
_METHODS = ("size", "numel", "dim", "requires_grad_", "detach_")
_WITHOUT_VALUES: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
}
"""Functions that neither read nor change values, such as those of ``zero_grad``."""


class GuardedGradient(Tensor):
    """A gradient that must not be used; see [Note: guarded gradients]."""

    reason: str
    is_zero: bool
    """Whether the loop has called ``zero_``."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__")
        if func in _WITHOUT_VALUES or caller == torch.distributed.fsdp._flat_param.__name__:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.zero_:
            args[0].is_zero = True
            return args[0]
        reason = next(leaf.reason for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GuardedGradient))
        raise RuntimeError(f"the gradient of a parameter cannot be used here: {reason}")


class _Guarded(NamedTuple):
    name: str
    parameter: Tensor
    gradient: Tensor | None
    version: int


class GradientGuard:
    """Guards the gradients of parameters; see [Note: guarded gradients]."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._parameters = list(parameters)
        self._guarded: list[_Guarded] = []
        self._reason = ""

    def close(self, reason: str, *, fill: bool) -> None:
        """Guard the gradients. With ``fill``, trained parameters without one get an empty one."""
        self._reason = reason
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self._parameters:
                gradient: Any = parameter.grad
                if gradient is None and fill and parameter.requires_grad:
                    gradient = torch.sparse_coo_tensor(  # type: ignore[call-arg]
                        size=parameter.shape, dtype=parameter.dtype, device=parameter.device
                    )
                    parameter.grad = gradient
                version = 0
                if gradient is not None:
                    version = gradient._version
                    gradient.__class__ = GuardedGradient
                    gradient.reason, gradient.is_zero = reason, False
                self._guarded.append(_Guarded(name, parameter, gradient, version))

    def open(self, check: bool = True) -> bool:
        """Make the gradients plain. Returns whether the loop has removed all of them, or set all to zero; they are put
        back. Without ``check`` other changes are allowed.

        Raises:
            RuntimeError: the loop has changed some of them.
        """
        guarded, self._guarded = self._guarded, []
        dropped, changed = [], []
        with torch._C.DisableTorchFunctionSubclass():
            for each in guarded:
                gradient: Any = each.gradient
                now: Any = each.parameter.grad
                if gradient is None:
                    changed += [each.name] if now is not None else []
                    continue
                gradient.__class__ = Tensor
                if gradient._version != each.version or (now is not gradient and now is not None):
                    changed.append(each.name)
                elif now is None or gradient.is_zero:
                    dropped.append(each.name)
                is_empty = gradient.is_sparse and gradient._nnz() == 0
                each.parameter.grad = None if is_empty else gradient
        is_dropped = len(dropped) == sum(each.gradient is not None for each in guarded) > 0
        if check and (changed or (dropped and not is_dropped)):
            raise RuntimeError(f"the gradient of {(changed or dropped)[0]} was replaced or removed, but {self._reason}")
        return is_dropped
