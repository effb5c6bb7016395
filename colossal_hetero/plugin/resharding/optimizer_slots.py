"""Masters, gradients and moments that the hybrid plugin's optimizers keep of a parameter of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from colossalai.interface import OptimizerWrapper
from colossalai.nn.optimizer import CPUAdam, FusedAdam, HybridAdam
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...checkpoint.contents.optimizer_memory import masters_of
from ...layers.resharding.unit_mover import StateSlot, put_data
from ...profiling.preserved_state import inner_optimizer

__all__ = ["ELEMENTWISE", "HybridOptimizerMemory"]

ELEMENTWISE: tuple[type, ...] = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, FusedAdam, CPUAdam, HybridAdam),
)
"""Optimizers that update each element of a parameter from its own gradients alone. Others, such as LAMB and Adafactor,
use norms of whole parameters, which would change with the parameter's shape."""


class HybridOptimizerMemory:
    """The memory of an optimizer that ``HybridParallelPlugin`` has configured.

    Args:
        plugin: the plugin.
        model: the model that the optimizer trains, as the plugin has configured it.
        optimizer: the optimizer.
        is_elastic: whether training is elastic.
    """

    def __init__(self, plugin: Any, model: Any, optimizer: OptimizerWrapper, is_elastic: bool) -> None:
        self._model = model
        self._optimizer = optimizer
        self._masters: dict[int, Tensor] = {}
        """What the optimizer updates, by the ``id`` of the model's parameter, when units were moved last."""
        self._obstacle = _plugin_obstacle(plugin, is_elastic) or _optimizer_obstacle(inner_optimizer(optimizer))

    @property
    def obstacle(self) -> str | None:
        """Why units cannot change their rank for good, as a clause; None if they can."""
        return self._obstacle

    def prepare(self) -> None:
        """Take the model out of torch's ``DistributedDataParallel``, and note what the optimizer updates.

        The plugin uses ``DistributedDataParallel`` also for a single replica, where it has nothing to sum. But it
        copies gradients into buckets of fixed sizes, and keeps the graph's nodes that add them up.
        """
        self._masters = {key: found.tensor for key, found in masters_of(self._optimizer).items()}
        if isinstance(self._model.module, DistributedDataParallel):
            self._model.module = self._model.module.module
            self._model.use_ddp = False

    def slots_of(self, parameter: Tensor) -> list[StateSlot]:
        """The master of a parameter, if it is another tensor, with its gradient; and the optimizer's state."""
        master = self._masters.get(id(parameter))
        if master is None:
            return []
        slots = []
        if master is not parameter:
            slots.append(StateSlot("master", master.detach(), partial(put_data, master)))
            if master.grad is not None:
                slots.append(StateSlot("gradient of master", master.grad, _gradient_putter(master)))
        state = inner_optimizer(self._optimizer).state.get(master, {})
        for entry, value in sorted(state.items()):
            if isinstance(value, Tensor) and value.dim() > 0:
                slots.append(StateSlot(entry, value, partial(state.__setitem__, entry)))
        return slots


def _gradient_putter(master: Tensor) -> Callable[[Tensor], None]:
    def put(gradient: Tensor) -> None:
        master.grad = gradient

    return put


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
