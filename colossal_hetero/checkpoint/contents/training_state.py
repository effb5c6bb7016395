"""What training needs besides tensors: options of the optimizer, loss scaler, learning-rate schedule, data loader."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler
from torch import Tensor

from ...profiling.aborted_step import find_zero_optimizer
from ...profiling.preserved_state import inner_optimizer
from .model_outline import ModelOutline

__all__ = [
    "as_bytes",
    "from_bytes",
    "group_options",
    "restore_group_options",
    "restore_scaler",
    "scaler_state",
]

KEPT = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Entries of a parameter group that a checkpoint does not change: how the optimizer computes on this device."""


def group_options(optimizer: Any) -> list[dict[str, Any]]:
    """The options of each group of the optimizer, such as the learning rate, as JSON can hold them.

    Raises:
        ValueError: an option is neither a number nor text nor a list of these.
    """
    return [
        {name: _option(name, value) for name, value in group.items() if name not in KEPT}
        for group in inner_optimizer(optimizer).param_groups
    ]


def _option(name: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_option(name, each) for each in value]
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"the option {name} of a parameter group is of type {type(value).__name__}, which a layer checkpoint cannot "
        "hold; use numbers or text, or save with booster.save_optimizer"
    )


def restore_group_options(
    optimizer: Any,
    outline: ModelOutline,
    saved_groups: Sequence[Sequence[str]],
    saved_options: Sequence[Mapping[str, Any]],
) -> None:
    """Give every group of the optimizer the options that its parameters were saved with.

    Args:
        optimizer: as a plugin has configured it.
        outline: of the model and of this optimizer.
        saved_groups: names of the parameters of each group in the checkpoint.
        saved_options: options of each group in the checkpoint.

    Raises:
        ValueError: the checkpoint lacks a parameter that is trained, or has its parameters in other groups.
    """
    sources = matching_groups(outline, saved_groups)
    for group, source in zip(inner_optimizer(optimizer).param_groups, sources, strict=True):
        for name, value in ({} if source is None else saved_options[source]).items():
            present = group.get(name)
            if isinstance(present, Tensor):  # such as a learning rate of compiled steps
                present.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(present, tuple) else value


def matching_groups(outline: ModelOutline, saved_groups: Sequence[Sequence[str]]) -> list[int | None]:
    """For each group of the optimizer, the saved group that has its parameters; None if none of them was saved.

    Raises:
        ValueError: see :func:`restore_group_options`.
    """
    place = {name: number for number, names in enumerate(saved_groups) for name in names}
    missing = [name for names in outline.groups for name in names if name in outline.trained and name not in place]
    if missing:
        raise ValueError(
            f"the checkpoint has no state of {missing[0]} and {len(missing) - 1} other parameters that this optimizer "
            "trains; load a checkpoint of a run that trained the same parameters"
        )
    sources: list[int | None] = []
    for number, names in enumerate(outline.groups):
        found = sorted({place[name] for name in names if name in place})
        if len(found) > 1 or set(found) & set(sources):
            raise ValueError(
                f"the checkpoint has other groups of parameters: those of group {number} are in its groups "
                f"{', '.join(map(str, found))}, together with others; make the optimizer with the groups that it was "
                "saved with"
            )
        sources.append(found[0] if found else None)
    return sources


_DYNAMIC = ("_scale", "_growth_step", "_hysteresis_step")
"""What Colossal-AI's loss scaler changes while training. Its own ``state_dict`` lacks the counts of steps."""


def scaler_state(optimizer: Any) -> dict[str, Any] | None:
    """The state of the loss scaler; None without one."""
    scaler = _scaler(optimizer)
    if scaler is None:
        return None
    if not isinstance(scaler, DynamicGradScaler):
        return dict(scaler.state_dict())
    return {name: _plain(getattr(scaler, name)) for name in _DYNAMIC}


def restore_scaler(optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Continue with the scale of a checkpoint. A run with another precision than the checkpoint's keeps its own."""
    scaler = _scaler(optimizer)
    if scaler is None or not state:
        return
    if not isinstance(scaler, DynamicGradScaler):
        if "scale" in state:
            scaler.load_state_dict(dict(state))
    elif "_scale" in state:
        for name in _DYNAMIC:
            present, value = getattr(scaler, name), state[name]
            setattr(scaler, name, value.to(present.device) if isinstance(present, Tensor) else value)


def _scaler(optimizer: Any) -> Any:
    zero = find_zero_optimizer(optimizer)
    mixed = getattr(zero, "mixed_precision_mixin", None) if zero is not None else None
    mixed = mixed or getattr(optimizer, "mixed_precision", None)
    return getattr(mixed, "grad_scaler", None) or getattr(optimizer, "scaler", None)


def as_bytes(state: Any, what: str) -> bytes:
    """A state of tensors, containers, numbers and text, as bytes.

    Raises:
        ValueError: it has something else in it, which only Python's pickle could load; ``what`` names the state.
    """
    buffer = io.BytesIO()
    torch.save(_plain(state), buffer)
    try:
        from_bytes(buffer.getvalue())
    except Exception as error:
        raise ValueError(
            f"{what} cannot be saved in a layer checkpoint, whose states consist of tensors, containers, numbers and "
            f"text: {' '.join(str(error).split())[:200]}"
        ) from None
    return buffer.getvalue()


def from_bytes(content: bytes) -> Any:
    """What :func:`as_bytes` was given. No code in ``content`` is run."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _plain(value: Any) -> Any:
    """A copy of a state or an option, with numbers of Python instead of NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    return value
