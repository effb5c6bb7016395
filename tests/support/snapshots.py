"""All state of a training that a trial must leave as it was."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map


def snapshot(model: nn.Module, optimizer: Any = None, ids: bool = True) -> str:
    """Equal texts mean equal states, bit for bit. ``ids``: parameters and gradients are the same tensors, too."""
    parameters, modules = list(model.parameters()), list(model.modules())
    found: Any = [
        [dict(model.state_dict()), dict(model.named_buffers()), [each.grad for each in parameters]],
        [(id(each), id(each.grad)) for each in parameters if ids],
        [(each.training, sorted(vars(each))) for each in modules],
        [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules],
        None if optimizer is None else optimizer.state_dict(),
        [random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()],
    ]
    return repr(tree_map(lambda value: value.tolist() if hasattr(value, "tolist") else value, found))
