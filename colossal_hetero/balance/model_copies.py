"""Deep copies of a boosted model, such as for a moving average of its weights.

A copy computes what the model does, but is not balanced: its layers have no blocks and no clocks. Of this package's
hooks it has those that sum partial gradients, so that it can be trained. It shares the process groups.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from colossalai.interface import ModelWrapper
from colossalai.tensor.d_tensor.api import is_customized_distributed_tensor, is_distributed_tensor
from torch import nn

from ..layers.inside_blocks.partial_gradients import Shapes, sum_partial_gradients
from ..user_hooks import is_from

__all__ = ["make_copyable"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PACKAGE = __name__.partition(".")[0]


def make_copyable(model: ModelWrapper, shapes: Shapes, shared: tuple[object, ...], before: Callable[[], None]) -> None:
    """Let ``copy.deepcopy`` copy ``model``, or the model inside of it; both give a copy of the model inside.

    Args:
        model: the boosted model.
        shapes: the whole shapes of its parameters.
        shared: objects that a copy shares with the model.
        before: called before a copy is made.
    """
    innermost = model.unwrap(unwrap_peft=False)
    is_divided = any(
        is_distributed_tensor(each) or is_customized_distributed_tensor(each) for each in model.parameters()
    )

    def copied(memo: dict[int, Any]) -> nn.Module:
        before()
        return copy_of(innermost, memo)

    def copy_of(source: nn.Module, memo: dict[int, Any]) -> nn.Module:
        made = _copy(source, shared, memo)
        if is_divided:
            made.register_state_dict_pre_hook(_refuse)
        if shapes:
            sum_partial_gradients(made, shapes)
        made.__deepcopy__ = functools.partial(copy_of, made)  # type: ignore[assignment]
        return made

    for each in (model, innermost):
        each.__deepcopy__ = copied


def _copy(model: nn.Module, shared: tuple[object, ...], memo: dict[int, Any]) -> nn.Module:
    memo.update((id(each), each) for each in (*shared, *dist.distributed_c10d._world.pg_map))
    kept = [
        (module, name, {key: hook for key, hook in getattr(module, name).items() if not is_from(hook, (_PACKAGE,))})
        for module in model.modules()
        for name in _HOOKS
    ]
    memo.update((id(getattr(module, name)), type(getattr(module, name))(hooks)) for module, name, hooks in kept)
    own: dict[str, Any] = {name: model.__dict__.pop(name) for name in ("__deepcopy__", "train") if name in vars(model)}
    try:
        made = copy.deepcopy(model, memo)
    finally:
        model.__dict__.update(own)
    for module, name, hooks in kept:
        for key, hook in hooks.items():
            getattr(memo[id(module)], name)[key] = copy.deepcopy(hook, memo)
    return made


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "a copy of a tensor-parallel model has this rank's shards, but the model's state_dict() gathers whole tensors, "
        "so they cannot be averaged by state_dict: use parameters() of both (torch's AveragedModel does; for timm's "
        "ModelEmaV3 set exclude_buffers=True). To save an average, copy its parameters into the model's, and call "
        "booster.save_model"
    )
