"""The state of training between two plans: what a rank holds leaves its old objects, moves, and fills the new ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ...checkpoint.contents.held_pieces import pieces_of
from ...checkpoint.contents.model_outline import ModelOutline
from ...checkpoint.contents.optimizer_memory import state_entries
from ...checkpoint.contents.restoring import Restoring
from ...checkpoint.contents.run_states import restore_run, run_state_of
from ...elastic.state.held_state import Held
from ...elastic.state.moves import HoldingsLost, all_holdings, empty_piece, inheritance, move_pieces
from ...elastic.state.versions import Agreed, CatchUp
from ..part import TrainingObjects

__all__ = ["NOTHING", "START_AGAIN", "StateLost", "let_go", "restore", "take_over"]

START_AGAIN = (
    "all processes must start again, and continue from the latest checkpoint (colossal-hetero launch does that)"
)

NOTHING = Held([], {}, None)
"""What a process holds that joins."""


class StateLost(Exception):
    """The last holder of a part of the state is gone."""


def let_go(objects: TrainingObjects, outline: ModelOutline, lr_scheduler: Any, loader: Any) -> Held:
    """What this rank holds. The model and the optimizer are empty then, without groups of the old world."""
    model, optimizer = objects.model, objects.optimizer
    pieces = pieces_of(model, optimizer, outline)
    state = run_state_of(model, optimizer, lr_scheduler, loader, outline, pieces, epoch=0, plan="")
    held = Held(pieces, state_entries(optimizer), state)
    model.__dict__ = nn.Module().__dict__
    optimizer.__dict__ = {}
    return held


def take_over(held: Held, leaving: Sequence[bool]) -> tuple[Held, int]:
    """What this rank holds after it has got its share of what only ranks hold that leave, and the bytes received.

    All ranks call it.

    Args:
        held: by this rank.
        leaving: by rank, whether it leaves.
    """
    holdings = all_holdings(held.pieces)
    taken = [empty_piece(each) for each in inheritance(holdings, leaving)[dist.get_rank()]]
    received = move_pieces(taken, held.pieces, holdings)
    return dataclasses.replace(held, pieces=[*held.pieces, *taken]), received


def restore(
    objects: TrainingObjects, outline: ModelOutline, held: Held | None, agreed: Agreed, lr_scheduler: Any, loader: Any
) -> int:
    """Fill model and optimizer from what all ranks hold; returns the bytes received. All ranks call it.

    Args:
        objects: configured for the new plan.
        outline: of the undivided model.
        held: by this rank; None if it joins.
        agreed: the newest step, and who holds it.
        lr_scheduler: the learning-rate schedule, if it is to get the state of the others.
        loader: the same for the loader.

    Raises:
        StateLost: no rank holds some part of the state.
    """
    model, optimizer, held = objects.model, objects.optimizer, held or NOTHING
    holdings = all_holdings(held.pieces)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held.kinds)
    shapes = {each.key: each.shape for of_rank in holdings for each in of_rank}
    kinds = {entry: kind for of_rank in everyone for entry, kind in of_rank.items()}
    _check_complete(outline, shapes)
    restoring = Restoring(model, optimizer, outline, shapes, kinds)
    try:
        received = move_pieces(restoring.pieces, held.pieces, holdings)
    except HoldingsLost as error:
        raise StateLost(f"the members that are left do not hold all elements: {error}; {START_AGAIN}") from None
    restoring.finish()
    state: list[Any] = [held.state]
    dist.broadcast_object_list(state, src=agreed.catch_ups.index(CatchUp.KEEP))
    restore_run(model, optimizer, lr_scheduler, loader, outline, restoring.pieces, state, step=agreed.version)
    return received


def _check_complete(outline: ModelOutline, held: Collection[str]) -> None:
    """Raise ``StateLost`` if no rank holds some tensor of the model any more."""
    lost = [
        outline.layers[name] for name in outline.shapes if f"param.{name}" not in held and f"buffer.{name}" not in held
    ]
    if lost:
        layers = ", ".join(dict.fromkeys(lost))
        raise StateLost(f"the members that are left do not hold {layers}; {START_AGAIN}")
