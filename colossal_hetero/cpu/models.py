"""Model code of Colossal-AI that selects the GPU of its hidden states, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from colossalai.shardformer.modeling import gpt2, gptj, opt, t5

from .module_proxy import ModuleProxy

__all__ = ["patch"]


def _set_device(device: Any) -> None:
    """``torch.cuda.set_device`` raises for a CPU; there is one CPU device, and it is always the current one."""


def patch() -> None:
    """Let the forward passes that call ``torch.cuda.set_device(hidden_states.device)`` run."""
    for model in (gpt2, gptj, opt, t5):
        model.torch = ModuleProxy(torch, cuda=ModuleProxy(torch.cuda, set_device=_set_device))
