"""Hooks that neither this package nor Colossal-AI has registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

OWN_PACKAGES = ("colossal_hetero", "colossalai")


def is_from(function: Any, packages: tuple[str, ...]) -> bool:
    """True if one of ``packages`` defines ``function``; a ``functools.partial`` counts as what it calls."""
    while hasattr(function, "func"):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] in packages


def user_hooks(parameter: Tensor) -> Iterator[tuple[Callable[..., Any], bool]]:
    """The user's hooks on the gradient of ``parameter``, each with True if it runs after accumulation."""
    for hooks, is_late in ((parameter._backward_hooks, False), (parameter._post_accumulate_grad_hooks, True)):
        for hook in (hooks or {}).values():
            if not is_from(hook, OWN_PACKAGES):
                yield hook, is_late
