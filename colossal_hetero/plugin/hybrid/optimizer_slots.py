"""Masters, gradients and moments that the hybrid plugin's optimizers keep of a parameter of the model."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from colossalai.interface import OptimizerWrapper
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from ...checkpoint.optimizer_memory import masters_of
from ...layers.unit_mover import StateSlot, put_data
from ...profiling.preserved_state import inner_optimizer
from ..zero.elementwise_updates import ELEMENTWISE

_STEPPED: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
"""All optimizers of this process that have made a step since the first model was boosted, in the order of these."""


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _STEPPED.setdefault(optimizer)


class HybridOptimizerMemory:
    """Memory of all optimizers of a model: the plugin's, and any of torch that steps parameters of the model."""

    def __init__(self, plugin: Any, model: Any, optimizer: OptimizerWrapper, is_elastic: bool) -> None:
        self._model, self._optimizers = model, [optimizer]
        self._masters: list[tuple[torch.optim.Optimizer, dict[int, Tensor]]] = []
        """Tensors that each optimizer updates, by the ``id`` of the model's parameter, when units were moved last."""
        self._plugin_obstacle = _plugin_obstacle(plugin, is_elastic)
        if _note_step not in _global_optimizer_pre_hooks.values():
            register_optimizer_step_pre_hook(_note_step)

    def add(self, optimizer: OptimizerWrapper) -> None:
        self._optimizers.append(optimizer)

    def _all(self) -> list[torch.optim.Optimizer | OptimizerWrapper]:
        known = {id(inner_optimizer(optimizer)) for optimizer in self._optimizers}
        parameters = {id(parameter) for parameter in self._model.module.parameters()}

        def steps_ours(optimizer: torch.optim.Optimizer) -> bool:
            return any(id(each) in parameters for group in optimizer.param_groups for each in group["params"])

        return [*self._optimizers, *(each for each in _STEPPED if id(each) not in known and steps_ours(each))]

    @property
    def obstacle(self) -> str | None:
        """Reason why units cannot change their rank for good, as a clause; None if they can."""
        of_optimizers = (_optimizer_obstacle(inner_optimizer(optimizer)) for optimizer in self._all())
        return self._plugin_obstacle or next(filter(None, of_optimizers), None)

    def prepare(self) -> None:
        """Take the model out of torch's ``DistributedDataParallel``, and note what the optimizers update. The plugin
        uses it also for a single replica, where it has nothing to sum, but copies gradients into buckets of fixed
        sizes, and keeps the graph's nodes that add them up."""
        self._masters = [(inner_optimizer(optimizer), _updated_by(optimizer)) for optimizer in self._all()]
        if isinstance(self._model.module, DistributedDataParallel):
            self._model.module = self._model.module.module
            self._model.use_ddp = False

    def slots_of(self, parameter: Tensor) -> list[StateSlot]:
        """The masters of a parameter, if they are other tensors, with their gradients; and the optimizers' state."""
        slots = []
        for optimizer, masters in self._masters:
            master = masters.get(id(parameter))
            if master is None:
                continue
            if master is not parameter:
                slots.append(StateSlot("master", master.detach(), partial(put_data, master)))
                if master.grad is not None:
                    slots.append(StateSlot("gradient of master", master.grad, partial(setattr, master, "grad")))
            state = optimizer.state.get(master, {})
            for entry, value in sorted(state.items()):
                if isinstance(value, Tensor) and value.dim() > 0:
                    slots.append(StateSlot(entry, value, partial(state.__setitem__, entry)))
        return slots


def _updated_by(optimizer: torch.optim.Optimizer | OptimizerWrapper) -> dict[int, Tensor]:
    """Tensors that an optimizer updates (without masters the parameters), by the ``id`` of the model's parameter."""
    masters = {key: found.tensor for key, found in masters_of(optimizer).items()}
    known = {id(master) for master in masters.values()}
    added = [each for group in inner_optimizer(optimizer).param_groups for each in group["params"]]
    return masters | {id(each): each for each in added if id(each) not in known}


def _plugin_obstacle(plugin: Any, is_elastic: bool) -> str | None:
    if is_elastic:
        return "elastic training moves whole layers between ranks"
    if plugin.zero_stage > 0:
        return f"ZeRO stage {plugin.zero_stage} has divided the optimizer's state into slices of fixed sizes"
    replicas = plugin.dp_size * plugin.sp_size
    if replicas > 1:
        return f"{replicas} replicas sum their gradients, which must have equal shapes"
    return None


def _optimizer_obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    if type(optimizer) not in ELEMENTWISE:
        return f"{type(optimizer).__name__} is not known to update each element of a parameter by itself"
    if getattr(optimizer, "offloader", None) is not None:
        return "the optimizer's state is on an NVMe disk"
    return None
