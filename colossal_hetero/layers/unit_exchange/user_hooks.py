"""Hooks that users register on parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor

from ..block import Block

__all__ = ["hooked_blocks"]


def hooked_blocks(blocks: Iterable[Block]) -> list[str]:
    """The names of blocks with a parameter that has a hook which neither Colossal-AI nor this package registered."""
    return [block.name for block in blocks if any(map(_is_hooked, chain.from_iterable(block.unit_parameters)))]


def _is_hooked(parameter: Tensor) -> bool:
    registered = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return any(_is_users(hook) for hooks in registered for hook in (hooks or {}).values())


def _is_users(hook: Callable[..., Any]) -> bool:
    # That of a functools.partial is the one of what it calls.
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.split(".")[0] not in ("colossalai", "colossal_hetero")
