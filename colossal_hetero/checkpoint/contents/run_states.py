"""The state of a run that is not in tensors of the model: collected for a checkpoint, and restored from one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ...profiling.preserved_state import inner_optimizer
from ..format.pieces import TensorPiece
from ..format.run_state import RunState
from .model_outline import ModelOutline
from .optimizer_memory import state_entries
from .random_state import random_state_of, restore_random_state, share_random_state
from .training_state import (
    as_bytes,
    from_bytes,
    group_options,
    restore_group_options,
    restore_scaler,
    scaler_state,
)

__all__ = ["check_loader", "check_optimizer", "place_digest", "restore_run", "run_state_of"]

RANDOM, SAMPLER, SCALER, SCHEDULER = "random", "sampler", "scaler", "scheduler"
"""Names of binary states."""


def check_loader(loader: Any) -> None:
    """Check that the position of a data loader can be saved.

    Raises:
        TypeError: it has no ``state_dict``.
    """
    if loader is not None and not hasattr(loader, "state_dict"):
        own = "; DataLoader of torch has none" if type(loader) is DataLoader else ""
        raise TypeError(
            f"a {type(loader).__name__} has no state_dict, so its position cannot be saved{own}; use the loader that "
            "plugin.prepare_dataloader makes, or leave the loader out and save at the end of an epoch, with the number "
            "of the next one"
        )


def check_optimizer(optimizer: Any, saved: str) -> None:
    """Check that a checkpoint has the state of such an optimizer.

    Raises:
        ValueError: it has that of another one.
    """
    if _kind(optimizer) != saved:
        raise ValueError(
            f"the checkpoint has the state of {saved}, but this run trains with {_kind(optimizer)}; make the optimizer "
            "with which it was saved"
        )


def _kind(optimizer: Any) -> str:
    """The class of the optimizer. Colossal-AI replaces some by classes that know how parameters are divided."""
    return type(inner_optimizer(optimizer)).__name__.removeprefix("Distributed")


def place_digest(pieces: Sequence[TensorPiece]) -> str:
    """The same for two runs on a rank if it has the same part of the model in both, among as many ranks."""
    held = sorted((piece.key, piece.box.offsets, piece.box.sizes) for piece in pieces if piece.key.startswith("param."))
    return hashlib.sha256(json.dumps([dist.get_world_size(), held]).encode()).hexdigest()[:16]


def run_state_of(
    model: nn.Module,
    optimizer: Any,
    lr_scheduler: Any,
    loader: Any,
    outline: ModelOutline,
    pieces: Sequence[TensorPiece],
    *,
    epoch: int,
    plan: str,
) -> RunState:
    """The state of the run on this rank.

    Args:
        model: as a plugin has configured it.
        optimizer: its optimizer.
        lr_scheduler: the learning-rate schedule, or None.
        loader: a data loader with a ``state_dict``, or None.
        outline: of the model before it was configured.
        pieces: what this rank holds.
        epoch: the epoch that the run is in.
        plan: the plan of the run in a few words, for tables.

    Raises:
        TypeError: see :func:`check_loader`.
        ValueError: a state cannot be saved; see :func:`.training_state.as_bytes`.
    """
    check_loader(loader)
    binary = {RANDOM: as_bytes(random_state_of(model), "the random state")}
    if lr_scheduler is not None:
        binary[SCHEDULER] = as_bytes(lr_scheduler.state_dict(), f"the state of {type(lr_scheduler).__name__}")
    scaler = scaler_state(optimizer)
    if scaler is not None:
        binary[SCALER] = as_bytes(scaler, "the loss scale")
    of_loader = None if loader is None else dict(loader.state_dict())
    if of_loader is not None and of_loader.get("sampler") is not None:
        # The user's own, such as the state of a generator, which is a tensor.
        binary[SAMPLER] = as_bytes(of_loader.pop("sampler"), "the state of the sampler")
    groups = zip(outline.groups, group_options(optimizer), strict=True)
    return RunState(
        epoch=epoch,
        plan=plan,
        param_groups=[{"names": list(names), **options} for names, options in groups],
        common={
            "optimizer": _kind(optimizer),
            "state": state_entries(optimizer),
            "loader": of_loader,
        },
        rank={"place": place_digest(pieces)},
        binary=binary,
    )


def restore_run(
    model: nn.Module,
    optimizer: Any,
    lr_scheduler: Any,
    loader: Any,
    outline: ModelOutline,
    pieces: Sequence[TensorPiece],
    saved: Sequence[RunState],
    *,
    step: int,
) -> bool:
    """Continue with the state of a run. Every rank calls it, with its pieces, after these were loaded.

    Args:
        model, optimizer, lr_scheduler, loader, outline, pieces: as in :func:`run_state_of`.
        saved: by rank of the run that was saved.
        step: of the checkpoint.

    Returns:
        whether every rank has the same part of the model as then. Only then dropout draws what it would have drawn
        without the interruption.

    Raises:
        ValueError: the optimizer trains other parameters, or in other groups; or the loader has other data.
    """
    first = saved[0]
    groups: list[Mapping[str, Any]] = list(first.param_groups)
    options = [{name: value for name, value in group.items() if name != "names"} for group in groups]
    restore_group_options(optimizer, outline, [group["names"] for group in groups], options)
    restore_scaler(optimizer, from_bytes(first.binary[SCALER]) if SCALER in first.binary else None)
    if lr_scheduler is not None and SCHEDULER in first.binary:
        lr_scheduler.load_state_dict(from_bytes(first.binary[SCHEDULER]))
    if loader is not None and first.common["loader"] is not None:
        check_loader(loader)
        sampler = {SAMPLER: from_bytes(first.binary[SAMPLER])} if SAMPLER in first.binary else {}
        loader.load_state_dict({**first.common["loader"], **sampler})
    rank = dist.get_rank()
    own = saved[rank] if rank < len(saved) else None
    same: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(same, own is not None and own.rank["place"] == place_digest(pieces))
    if own is not None and all(same):
        restore_random_state(from_bytes(own.binary[RANDOM]), model)
    else:
        share_random_state(from_bytes(first.binary[RANDOM]), model, step)
    return all(same)
