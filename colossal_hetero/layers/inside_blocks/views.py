"""Who sees what a rank computes inside a block: then its units must not migrate, which would change what is seen.

The caller sees attention maps and keys if he asks for them. A hook on a module inside of a block, and a forward pass
that somebody has put in place of a module's own, see what passes through the module. A module of the user's own may
keep it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from ...user_hooks import OWN_PACKAGES, is_from

__all__ = ["asks_for_heads", "is_seen"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_MODELS = (*OWN_PACKAGES, "timm", "transformers")
"""Packages whose forward passes keep nothing of what they compute, unless they are asked to."""


def is_seen(modules: Iterable[nn.Module]) -> bool:
    """Whether somebody sees what passes through any of ``modules``, which are inside of a block."""
    if any(_has_others(getattr(torch_module, f"_global{hooks}").values(), OWN_PACKAGES) for hooks in _HOOKS):
        return True
    for module in modules:
        attributes = vars(module)
        for hooks in _HOOKS:
            if attributes[hooks] and _has_others(attributes[hooks].values(), OWN_PACKAGES):
                return True
        if "forward" in attributes and _has_others([attributes["forward"]], _MODELS):
            return True
        if _is_users(type(module)) and any(map(_is_computed, attributes.values())):  # type: ignore[arg-type]
            return True
    return False


def asks_for_heads(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether the caller of ``model`` takes or gives something for each head of this rank: attention maps, masks of
    heads, and in training keys and values of earlier passes."""
    asked = arguments.get("output_attentions")
    if asked is None:
        config = getattr(model, "config", None)
        configs = [config, *vars(config).values()] if hasattr(config, "output_attentions") else []
        asked = any(getattr(each, "output_attentions", None) is True for each in configs)
    given = [name for name, value in arguments.items() if value is not None]
    return bool(asked) or any(
        name.endswith("head_mask") or (model.training and name == "past_key_values") for name in given
    )


@cache
def _is_users(kind: type[nn.Module]) -> bool:
    """Whether the forward pass of modules of this class is the user's own."""
    return _has_others([kind.forward], (*_MODELS, "torch"))


def _is_computed(value: Any) -> bool:
    """Whether ``value`` is, or has as its newest element, a tensor of the last pass, with a gradient to be computed."""
    if isinstance(value, list) and value:
        value = value[-1]
    return isinstance(value, Tensor) and value.grad_fn is not None


def _has_others(functions: Iterable[Any], packages: tuple[str, ...]) -> bool:
    """Whether a function is of none of ``packages``."""
    return not all(is_from(function, packages) for function in functions)
