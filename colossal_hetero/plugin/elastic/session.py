"""Model and optimizer of a script, which keeps its objects while what is inside them is made again for another plan."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ...checkpoint.held_pieces import pieces_of
from ...checkpoint.model_outline import outline_of
from ...checkpoint.optimizer_memory import state_entries
from ...checkpoint.pieces import RunState, TensorPiece
from ...checkpoint.restoring import Restoring
from ...checkpoint.run_states import Training, restore_group_options, restore_run, run_state_of
from ...common.ranks import of_every_rank
from ...elastic.held_layers import Held, HoldingsLost, all_holdings, empty_piece, inheritance, move_pieces
from ...profiling.model_layers import find_block_row
from ..training_objects import TrainingObjects


class Template:
    """Keeps a model without memory for its parameters, and the optimizer that trains it: the same object, with the
    options of its parameter groups, so that a learning-rate schedule keeps it. Only its parameters are replaced."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: Sequence[Sequence[str]]) -> None:
        memo = {
            id(parameter): Parameter(parameter.detach().new_zeros(()).expand(parameter.shape), parameter.requires_grad)
            for parameter in model.parameters()
        }
        self._skeleton = copy.deepcopy(model, memo | _shared_hooks(model))
        self._groups = [tuple(names) for names in groups]
        self.optimizer = optimizer

    def make(self) -> nn.Module:
        """The model, with parameters that are zero. The optimizer has these parameters then, and no state."""
        with torch.no_grad():
            model = copy.deepcopy(self._skeleton, _shared_hooks(self._skeleton))
        named = dict(model.named_parameters(remove_duplicate=False))
        for group, names in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = [named[name] for name in names]
        self.optimizer.state.clear()
        return model


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _shared_hooks(model: nn.Module) -> dict[int, Any]:
    """What copies of ``model`` share: its hooks that are objects of the script, or their methods, by ``id``."""
    modules = list(model.modules())
    hooks = [hook for module in modules for kind in HOOKS for hook in getattr(module, kind).values()]
    inside = {id(module) for module in modules}
    return {
        id(hook): hook
        for hook in hooks
        if id(getattr(hook, "__self__", hook)) not in inside and type(hook) is not partial
    }


class Session:
    """The script's objects, before they are configured, and what makes their inside again. ``plugin.configure`` is
    called for it in the plugin's new state."""

    def __init__(self, given: TrainingObjects) -> None:
        self.outline = outline_of(given.model, given.optimizer)
        self._template = Template(given.model, given.optimizer, self.outline.groups)
        self._criterion = given.criterion
        self.objects: TrainingObjects | None = None  # what ``booster.boost`` has returned; None before it has
        self.row: str | None = None
        with suppress(ValueError):
            self.row = find_block_row(given.model).name

    def without_state(self, given: TrainingObjects) -> TrainingObjects:
        """What the script has given, with weights that are zero."""
        return given._replace(model=self._template.make(), optimizer=self._template.optimizer)

    def training(self, lr_scheduler: Any = None, loader: Any = None) -> Training:
        assert self.objects is not None
        return Training(self.objects.model, self.objects.optimizer, lr_scheduler, loader, self.outline)

    def make_again(self, plugin: Any, loader: Any) -> None:
        """Let the script's model and optimizer be those that ``plugin`` makes now, with weights that are zero."""
        assert self.objects is not None
        given = TrainingObjects(self._template.make(), self._template.optimizer, self._criterion, loader, None)
        made, own = TrainingObjects(*plugin.configure(*given)), self.objects
        own.model.__dict__, own.optimizer.__dict__ = made.model.__dict__, made.optimizer.__dict__
        own.optimizer.__class__ = type(made.optimizer)  # another one if only one of both plans uses ZeRO
        plugin.adopt(own.model, loader)


START_AGAIN = (
    "all processes must start again, and continue from the latest checkpoint (torchrun --max-restarts does that)"
)

NOTHING = Held([], {}, None)  # of a process that joins

IN_STEP = "in_step"  # entry of a rank's state, true in a step that is made; see [Note: in a step] in ``elastic_run.py``


class StateLost(Exception):
    """The last holder of a part of the state is gone."""


def state_now(training: Training, pieces: list[TensorPiece], in_step: bool) -> RunState:
    state = run_state_of(training, pieces, epoch=0, plan="")
    return dataclasses.replace(state, rank={**state.rank, IN_STEP: in_step})


def release_state(training: Training, in_step: bool) -> Held:
    """Take what this rank holds; the model and the optimizer are empty then, without groups of the old world."""
    model, optimizer = training.model, training.optimizer
    pieces = pieces_of(model, optimizer, training.outline)
    state = state_now(training, pieces, in_step)
    inner, mode = model.unwrap(), model.training
    modes = {name: each.training for name, each in inner.named_modules() if name and each.training != mode}
    frozen = frozenset(name for name, each in inner.named_parameters() if not each.requires_grad)
    held = Held(pieces, state_entries(optimizer), state, modes | {"": mode}, frozen)
    # Some objects are in reference cycles with their own methods, so that the memory of weights would be free only
    # after a collection of garbage, which takes longer than all else here: parameters that are divided or padded,
    # modules, and the objects that :meth:`Session.make_again` made, whose contents these two have.
    for parameter in inner.parameters():
        for name in ("detach", "clone", "_old_detach", "_old_clone", "_unpad_detach", "_unpad_clone"):
            vars(parameter).pop(name, None)
    for module in [*inner.modules()]:
        module.__dict__.clear()
    contents, model.__dict__ = model.__dict__, nn.Module().__dict__
    contents.clear()
    optimizer.__dict__.clear()
    return held


def receive_state(held: Held, leaving: Sequence[bool]) -> tuple[Held, int]:
    """Get the share of what only leaving ranks hold; returns all that is held then, and the bytes received."""
    holdings = all_holdings(held.pieces)
    taken = [empty_piece(each) for each in inheritance(holdings, leaving)[dist.get_rank()]]
    received = move_pieces(taken, held.pieces, holdings)
    return dataclasses.replace(held, pieces=[*held.pieces, *taken]), received


def restore(training: Training, held: Held | None, step: int) -> tuple[int, bool]:
    """Fill model and optimizer from what all ranks hold after ``step`` steps; returns the bytes received, and if the
    script of a rank that held nothing before is in this step now; see :data:`IN_STEP`. All ranks call it."""
    held = held or NOTHING
    holdings = all_holdings(held.pieces)
    shapes = {each.key: each.shape for of_rank in holdings for each in of_rank}
    state = held.state
    is_in_step = None if state is None else bool(state.rank[IN_STEP])
    everyone = of_every_rank((held.kinds, held.modes, held.frozen, is_in_step))
    kinds = {entry: kind for of_rank, *_ in everyone for entry, kind in of_rank.items()}
    outline = training.outline
    lost = [name for name in outline.stored if f"param.{name}" not in shapes and f"buffer.{name}" not in shapes]
    if lost:
        layers = ", ".join(dict.fromkeys(outline.layers[name] for name in lost))
        raise StateLost(f"the members that are left do not hold {layers}; {START_AGAIN}")
    restoring = Restoring(training, shapes, kinds)
    try:
        received = move_pieces(restoring.pieces, held.pieces, holdings)
    except HoldingsLost as error:
        raise StateLost(f"the members that are left do not hold all elements of {error}; {START_AGAIN}") from None
    restoring.finish()
    in_step, source = min((each, rank) for rank, (*_, each) in enumerate(everyone) if each is not None)
    states: list[Any] = [state]
    dist.broadcast_object_list(states, src=source)
    restore_run(training, restoring.pieces, states, step=step)
    if state is not None:  # the script of this rank goes on with its own schedule
        restore_group_options(training.optimizer, outline, state.param_groups)
    modes = {name: mode for _, of_rank, *_ in everyone for name, mode in of_rank.items()}
    if modes:  # unless all processes have just started, and their scripts set them
        _switch(training.model, modes, frozenset().union(*(frozen for _, _, frozen, _ in everyone)))
    return received, in_step


def _switch(model: Any, modes: Mapping[str, bool], frozen: frozenset[str]) -> None:
    """Let modules train or evaluate, and parameters have gradients, as the script has switched them before."""
    model.train(modes[""])
    for name, module in model.unwrap().named_modules():
        module.training = modes.get(name, module.training)
    for name, parameter in model.unwrap().named_parameters():
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)
