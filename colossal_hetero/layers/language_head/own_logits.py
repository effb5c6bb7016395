"""The logits of a rank's own rows of the vocabulary while it computes others, made when they are first used.

A plan divides the vocabulary in other parts, and the loss needs only those. But every rank still has the head's input
and the weights of its own rows, so it can compute their logits at any time, without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["OwnLogits", "OwnRows"]


class OwnRows:
    """How the logits of a rank's own rows are computed, and the result once that has happened.

    Args:
        product: computes them from the head's input and parameters.
        x: the input, detached.
        parameters: weight and bias of the rank's own rows, detached.
    """

    def __init__(self, product: Callable[..., Tensor], x: Tensor, parameters: Sequence[Tensor]) -> None:
        self._product = product
        self._x: Tensor | None = x
        self._parameters = parameters
        self._versions = _versions(parameters)
        self._values: Tensor | None = None

    @property
    def need_parameters(self) -> bool:
        """Whether the logits have not been computed, and the parameters are still the right ones."""
        return self._values is None and self._versions == _versions(self._parameters)

    def use(self, copies: Sequence[Tensor]) -> None:
        """Compute the logits with these ``copies`` of the parameters, which are about to change."""
        self._parameters, self._versions = copies, _versions(copies)

    def values(self) -> Tensor:
        """The logits, without gradients.

        Raises:
            RuntimeError: the parameters were changed before anybody used the logits.
        """
        if self._values is None:
            if self._versions != _versions(self._parameters):
                raise RuntimeError(
                    "the logits of this training pass were first used after the head's weight was changed otherwise "
                    "than by the boosted optimizer. While a plan divides the vocabulary over the ranks, logits are "
                    "computed when they are used: use them before the change, or set BalanceConfig(head=False)"
                )
            with torch.no_grad():
                self._values = self._product(self._x, *self._parameters)
            self._x, self._parameters = None, ()
        return self._values


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    """How often each of them has been changed."""
    return [parameter._version for parameter in parameters]


class OwnLogits(Tensor):
    """A tensor whose elements are computed when an operation first needs them."""

    rows: OwnRows

    @staticmethod
    def of(rows: OwnRows, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> OwnLogits:
        """Logits of this shape and type."""
        make: Any = Tensor
        made: OwnLogits = make._make_wrapper_subclass(OwnLogits, shape, dtype=dtype, device=device)
        made.rows = rows
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0].rows, args[0].shape, args[0].dtype, args[0].device)
        args, kwargs = tree_map_only(OwnLogits, lambda logits: logits.rows.values(), (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _READ_GRADIENT or (func is torch.autograd.grad and _holds_logits(args[1:], kwargs)):
                raise RuntimeError(
                    "the gradient of the logits of a training pass is not available while a plan divides the "
                    "vocabulary over the ranks: the model's own loss does not use this tensor. Take the gradient by a "
                    "tensor computed from the logits, or set BalanceConfig(head=False)"
                )
            if func in _READ_MEMORY:
                values = args[0].rows.values()
                args = values.detach().requires_grad_(args[0].requires_grad), *args[1:]
            return func(*args, **(kwargs or {}))


def _holds_logits(args: Any, kwargs: Any) -> bool:
    inputs = (kwargs or {}).get("inputs", args[:1])
    return any(isinstance(each, OwnLogits) for each in tree_leaves(inputs))


_READ_GRADIENT = {Tensor.register_hook, Tensor.retain_grad, vars(torch._C.TensorBase)["grad"].__get__}
"""Methods by which a loop sees or changes the whole gradient of a tensor."""

_READ_MEMORY = {
    getattr(Tensor, name)
    for name in (
        *("numpy", "tolist", "data_ptr", "storage", "untyped_storage", "__array__", "__repr__", "__format__"),
        *("__reduce_ex__", "__deepcopy__", "__dlpack__", "share_memory_"),
    )
}
"""Methods that read a tensor's memory without an operation."""
