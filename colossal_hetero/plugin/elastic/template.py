"""A model as the script made it, to be divided again for another plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

__all__ = ["Template"]


class Template:
    """Keeps a model without memory for its parameters, and the optimizer that trains it.

    The optimizer stays the same object, with the options of its parameter groups, so that a learning-rate schedule
    keeps it. Only its parameters are replaced.

    Args:
        model: that no plugin has configured yet.
        optimizer: of torch, with all parameters that are trained.
        groups: names of the parameters in each of its groups.
    """

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
