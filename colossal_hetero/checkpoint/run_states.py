"""State of a run that is not in tensors of the model: collected for a checkpoint, and restored from one."""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..colossalai_support.accelerator import get_accelerator
from ..common.ranks import of_every_rank
from ..profiling.aborted_step import find_zero_optimizer
from ..profiling.preserved_state import inner_optimizer
from .model_outline import ModelOutline
from .optimizer_memory import state_entries
from .pieces import RunState, TensorPiece


def random_state_of(model: nn.Module) -> dict[str, Any]:
    accelerator = get_accelerator()
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "device_name": accelerator.name,
        "device": None if accelerator.name == "cpu" else accelerator.get_rng_state(),
        "randomizers": {place: dict(vars(each)) for place, each in _randomizers(model)},
    }


def restore_random_state(state: Mapping[str, Any], model: nn.Module) -> None:
    restore_process(state)
    for place, randomizer in _randomizers(model):
        if place in state["randomizers"]:
            vars(randomizer).update(state["randomizers"][place])


def share_random_state(state: Mapping[str, Any], model: nn.Module, step: int) -> None:
    """Continue with one rank's random states in a run with another plan; dropout draws new ones from seed and step."""
    restore_process(state)
    for _, randomizer in _randomizers(model):
        seed = randomizer.seed
        vars(randomizer).update(vars(Randomizer(seed + 1_000_003 * (step + 1))), seed=seed)


def restore_process(state: Mapping[str, Any]) -> None:
    """Continue with the random states of this process, without those of a model's dropout."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    accelerator = get_accelerator()
    if state["device"] is not None and state["device_name"] == accelerator.name:
        accelerator.set_rng_state(state["device"])


def _randomizers(model: nn.Module) -> Iterator[tuple[str, Randomizer]]:
    for module_name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Randomizer):
                yield f"{module_name}.{attribute}", value


class Training(NamedTuple):
    model: Any
    optimizer: Any
    lr_scheduler: Any
    loader: Any
    outline: ModelOutline


KEPT = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Entries of a parameter group that a checkpoint does not change: how the optimizer computes on this device."""


def group_options(optimizer: Any) -> list[dict[str, Any]]:
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
    saved: Sequence[Mapping[str, Any]],
) -> None:
    sources = matching_groups(outline, [group["names"] for group in saved])
    for group, source in zip(inner_optimizer(optimizer).param_groups, sources, strict=True):
        options = {} if source is None else {name: value for name, value in saved[source].items() if name != "names"}
        for name, value in options.items():
            present = group.get(name)
            if isinstance(present, Tensor):  # such as a learning rate of compiled steps
                present.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(present, tuple) else value


def matching_groups(outline: ModelOutline, saved_groups: Sequence[Sequence[str]]) -> list[int | None]:
    """The saved group that has the parameters of each group of the optimizer; None if none of them was saved."""
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
"""Attributes of Colossal-AI's loss scaler that change in training; its own ``state_dict`` lacks the counts of steps."""


def scaler_state(optimizer: Any) -> dict[str, Any] | None:
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
    """The state that :func:`as_bytes` was given. No code in ``content`` is run."""
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


RANDOM, SCALER, SCHEDULER = "random", "scaler", "scheduler"


def check_loader(loader: Any) -> None:
    if loader is not None and not hasattr(loader, "state_dict"):
        own = "; DataLoader of torch has none" if type(loader) is DataLoader else ""
        raise TypeError(
            f"a {type(loader).__name__} has no state_dict, so its position cannot be saved{own}; use the loader that "
            "plugin.prepare_dataloader makes, or leave the loader out and save at the end of an epoch, with the number "
            "of the next one"
        )


def check_optimizer(optimizer: Any, saved: str) -> None:
    if _kind(optimizer) != saved:
        raise ValueError(
            f"the checkpoint has the state of {saved}, but this run trains with {_kind(optimizer)}; make the optimizer "
            "with which it was saved"
        )


def _kind(optimizer: Any) -> str:
    """The class of the optimizer. Colossal-AI replaces some by classes that know how parameters are divided."""
    return type(inner_optimizer(optimizer)).__name__.removeprefix("Distributed")


def place_digest(pieces: Sequence[TensorPiece]) -> str:
    """Digest that is equal in two runs if a rank has the same part of the model in both, among as many ranks."""
    held = sorted((piece.key, piece.box.offsets, piece.box.sizes) for piece in pieces if piece.key.startswith("param."))
    return hashlib.sha256(json.dumps([dist.get_world_size(), held]).encode()).hexdigest()[:16]


def run_state_of(training: Training, pieces: Sequence[TensorPiece], *, epoch: int, plan: str) -> RunState:
    model, optimizer, lr_scheduler, loader, outline = training
    check_loader(loader)
    binary = {RANDOM: as_bytes(random_state_of(model), "the random state")}
    if lr_scheduler is not None:
        binary[SCHEDULER] = as_bytes(lr_scheduler.state_dict(), f"the state of {type(lr_scheduler).__name__}")
    scaler = scaler_state(optimizer)
    if scaler is not None:
        binary[SCALER] = as_bytes(scaler, "the loss scale")
    groups = zip(outline.groups, group_options(optimizer), strict=True)
    return RunState(
        epoch=epoch,
        plan=plan,
        param_groups=[{"names": list(names), **options} for names, options in groups],
        common={
            "optimizer": _kind(optimizer),
            "state": state_entries(optimizer),
            "loader": None if loader is None else loader.state_dict(),
        },
        rank={"place": place_digest(pieces)},
        binary=binary,
    )


def restore_run(training: Training, pieces: Sequence[TensorPiece], saved: Sequence[RunState], *, step: int) -> bool:
    """Continue with the state of a run, after ``pieces``, those of this rank, were loaded. Every rank calls it.

    True if every rank has the same part of the model as then; else dropout draws other masks.
    """
    model, optimizer, lr_scheduler, loader, outline = training
    first = saved[0]
    restore_group_options(optimizer, outline, first.param_groups)
    restore_scaler(optimizer, from_bytes(first.binary[SCALER]) if SCALER in first.binary else None)
    if lr_scheduler is not None and SCHEDULER in first.binary:
        lr_scheduler.load_state_dict(from_bytes(first.binary[SCHEDULER]))
    if loader is not None and first.common["loader"] is not None:
        check_loader(loader)
        loader.load_state_dict(first.common["loader"])
    rank = dist.get_rank()
    own = saved[rank] if rank < len(saved) else None
    same = of_every_rank(own is not None and own.rank["place"] == place_digest(pieces))
    if own is not None and all(same):
        restore_random_state(from_bytes(own.binary[RANDOM]), model)
    else:
        share_random_state(from_bytes(first.binary[RANDOM]), model, step)
    return all(same)
