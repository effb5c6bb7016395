"""Hooks that users register on parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..linear import HeteroLinear

__all__ = ["has_user_hooks"]


def has_user_hooks(layer: HeteroLinear) -> bool:
    """Whether a parameter of ``layer`` has a hook that neither Colossal-AI nor this package has registered."""
    return any(
        _is_users(hook)
        for parameter in layer.parameters()  # type: ignore[attr-defined]
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        for hook in (hooks or {}).values()
    )


def _is_users(hook: Callable[..., Any]) -> bool:
    # That of a functools.partial is the one of what it calls.
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.split(".")[0] not in ("colossalai", "colossal_hetero")
