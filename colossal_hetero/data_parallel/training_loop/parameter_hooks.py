"""Whether the user's hooks on parameters are exact where a rank has only its part of each gradient.

A hook of ``parameter.register_hook`` gets the gradient of one micro-batch, times its weight. If what it returns is
linear in the gradient, such as a mask or a factor, the sum over all micro-batches is the same as if it had got the
whole gradient. Anything else, such as clipping or noise, would train to other weights. So each hook is tried on
gradients of very different sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...user_hooks import user_hooks

__all__ = ["HookCheck"]


class HookCheck:
    """Checks each hook on the parameters of a model once.

    Args:
        stage: stage of ZeRO.
    """

    def __init__(self, model: nn.Module, stage: int) -> None:
        self._parameters = list(model.named_parameters())
        self._stage = stage
        self._checked: dict[int, Any] = {}

    def check(self) -> None:
        """Check the hooks that are new.

        Raises:
            RuntimeError: a hook cannot be exact.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, hook, is_late in list(self._new()):
                self._checked[id(hook)] = hook
                reason = self._why_not(parameter, hook, is_late)
                if reason is not None:
                    raise RuntimeError(
                        f"the hook {_name(hook)} on the parameter {name} cannot be exact, because {reason}"
                    )

    def _new(self) -> Iterator[tuple[str, Tensor, Callable[..., Any], bool]]:
        for name, parameter in self._parameters:
            for hook, is_late in user_hooks(parameter):
                if id(hook) not in self._checked:
                    yield name, parameter, hook, is_late

    def _why_not(self, parameter: Tensor, hook: Callable[..., Any], is_late: bool) -> str | None:
        if is_late:
            return (
                "it would use the gradient of this rank's micro-batch and not that of the global batch; use gradients "
                "after the backward pass, at stage 0 and where loader.is_last"
            )
        if self._stage == 3:
            return "FSDP calls no hooks of parameters; use stage 0, 1 or 2"
        first, second = _sample(parameter, 0), _sample(parameter, 1)
        given = [first, second, first + second]
        results = [each.clone() for each in given]
        returned = [hook(each) for each in results]
        one, other, both = (old if new is None else new for old, new in zip(results, returned, strict=True))
        if returned == [None] * 3 and all(map(torch.equal, given, results)):
            warnings.warn(
                f"the hook {_name(hook)} on a parameter gets the gradient of each micro-batch of this rank, times its "
                "weight, and not that of the global batch",
                stacklevel=2,
            )
        elif not _is_sum(one, other, both):
            return (
                "what it returns for a sum of gradients is not the sum of what it returns for each, and it is called "
                "for each micro-batch of each rank; clip by optimizer.clip_grad_by_norm() or clip_grad_by_value(), or "
                "change gradients after the backward pass, at stage 0 and where loader.is_last"
            )
        return None


def _name(hook: Any) -> str:
    return getattr(getattr(hook, "func", hook), "__qualname__", type(hook).__name__)


def _sample(parameter: Tensor, seed: int) -> Tensor:
    """A gradient whose elements have very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(parameter.shape, generator=generator)
    sizes = (2 * torch.rand(parameter.shape, generator=generator) - 1) * (3 if parameter.dtype == torch.half else 6)
    return (values * 10**sizes).to(parameter.device, parameter.dtype)


def _is_sum(one: Tensor, other: Tensor, both: Tensor) -> bool:
    error = (one.float() + other.float() - both.float()).abs()
    return bool((error <= 4 * torch.finfo(both.dtype).eps * (one.float().abs() + other.float().abs())).all())
