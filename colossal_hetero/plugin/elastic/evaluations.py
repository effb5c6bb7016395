"""Evaluations in elastic training: all ranks know that all have finished one before any of them goes on.

[Note: evaluations] An evaluation has no commit, so a message at its end keeps replicas together, as the commit does for
steps. If a member is lost, a rank is either in the evaluation that others are in, or one ahead of them, because it has
got the message of this one; then all have its results, and ranks that are behind go on with them. The others evaluate
their batch again, unless all are in the same evaluation and have its results. A process that joins meanwhile is in no
evaluation, and would train alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ...checkpoint.held_pieces import pieces_of
from ...checkpoint.optimizer_memory import state_entries
from ...checkpoint.restoring import Restoring
from ...checkpoint.run_states import Training, restore_run, run_state_of
from ...common.ranks import of_every_rank
from ...elastic.held_layers import CatchUp, Held, RecoveryDecision, Standing
from ...elastic.moves import HoldingsLost, all_holdings, empty_piece, inheritance, move_pieces


class Evaluations:
    done = 0  # evaluations that all ranks have finished, as far as this rank knows
    has_results: bool | None = None  # of the passes of the present evaluation; None outside

    def run(
        self,
        evaluate: Callable[[Iterator[Any]], dict],
        batches: Iterator[Any],
        change: Callable[[RuntimeError], bool],
    ) -> dict:
        """Evaluate the next batch; returns what ``evaluate`` returns."""
        drawn: list[Any] = []
        result: dict = {}
        self.has_results = False
        while True:
            try:
                if not self.has_results:
                    result = evaluate(_drawing(batches, drawn))
                    self.has_results = True
                dist.barrier()
                break
            except RuntimeError as error:
                failure = error
            with torch.inference_mode(False), torch.enable_grad():
                self.has_results = not change(failure)
            if self.has_results:
                break
        self.done, self.has_results = self.done + 1, None
        return result


def has_to_repeat(own: Standing, standings: Sequence[Standing]) -> bool:
    furthest = max(each.evaluations for each in standings)
    if own.has_results is None or own.evaluations < furthest:
        return False
    return not all(each.has_results and each.evaluations == furthest for each in standings)


def is_joined_inside(standings: Sequence[Standing]) -> bool:
    """True if ranks of the new world are in an evaluation, and others have just joined, which are not."""
    has_new = any(each.version is None for each in standings)
    return has_new and any(each.version is not None and each.has_results is not None for each in standings)


def _drawing(batches: Iterator[Any], drawn: list[Any]) -> Iterator[Any]:
    """Repeat the batches that were drawn before, then draw the next ones, which are noted."""
    yield from tuple(drawn)
    for batch in batches:
        drawn.append(batch)
        yield batch


# Template ------------------------------------------------------------------------------------------------------------


class Template:
    """Keeps a model without memory for its parameters, and the optimizer that trains it: the same object, with the
    options of its parameter groups, so that a learning-rate schedule keeps it. Only its parameters are replaced."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: Sequence[Sequence[str]]) -> None:
        memo = {
            id(parameter): Parameter(parameter.detach().new_zeros(()).expand(parameter.shape), parameter.requires_grad)
            for parameter in model.parameters()
        }
        self._skeleton = copy.deepcopy(model, memo)
        self._groups = [tuple(names) for names in groups]
        self.optimizer = optimizer

    def make(self) -> nn.Module:
        """The model, with parameters that are zero. The optimizer has these parameters then, and no state."""
        with torch.no_grad():
            model = copy.deepcopy(self._skeleton)
        named = dict(model.named_parameters(remove_duplicate=False))
        for group, names in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = [named[name] for name in names]
        self.optimizer.state.clear()
        return model


# Moving state --------------------------------------------------------------------------------------------------------


START_AGAIN = (
    "all processes must start again, and continue from the latest checkpoint (torchrun --max-restarts does that)"
)

NOTHING = Held([], {}, None)  # of a process that joins


class StateLost(Exception):
    """The last holder of a part of the state is gone."""


def release_state(training: Training) -> Held:
    """Take what this rank holds; the model and the optimizer are empty then, without groups of the old world."""
    model, optimizer = training.model, training.optimizer
    pieces = pieces_of(model, optimizer, training.outline)
    state = run_state_of(training, pieces, epoch=0, plan="")
    held = Held(pieces, state_entries(optimizer), state)
    model.__dict__ = nn.Module().__dict__
    optimizer.__dict__ = {}
    return held


def receive_state(held: Held, leaving: Sequence[bool]) -> tuple[Held, int]:
    """Get the share of what only leaving ranks hold; returns all that is held then, and the bytes received."""
    holdings = all_holdings(held.pieces)
    taken = [empty_piece(each) for each in inheritance(holdings, leaving)[dist.get_rank()]]
    received = move_pieces(taken, held.pieces, holdings)
    return dataclasses.replace(held, pieces=[*held.pieces, *taken]), received


def restore(training: Training, held: Held | None, agreed: RecoveryDecision) -> int:
    """Fill model and optimizer from what all ranks hold; returns the bytes received. All ranks call it."""
    held = held or NOTHING
    holdings = all_holdings(held.pieces)
    shapes = {each.key: each.shape for of_rank in holdings for each in of_rank}
    kinds = {entry: kind for of_rank in of_every_rank(held.kinds) for entry, kind in of_rank.items()}
    outline = training.outline
    lost = [name for name in outline.stored if f"param.{name}" not in shapes and f"buffer.{name}" not in shapes]
    if lost:
        layers = ", ".join(dict.fromkeys(outline.layers[name] for name in lost))
        raise StateLost(f"the members that are left do not hold {layers}; {START_AGAIN}")
    restoring = Restoring(training, shapes, kinds)
    try:
        received = move_pieces(restoring.pieces, held.pieces, holdings)
    except HoldingsLost as error:
        raise StateLost(f"the members that are left do not hold all elements: {error}; {START_AGAIN}") from None
    restoring.finish()
    state: list[Any] = [held.state]
    dist.broadcast_object_list(state, src=agreed.catch_ups.index(CatchUp.KEEP))
    restore_run(training, restoring.pieces, state, step=agreed.version)
    return received
