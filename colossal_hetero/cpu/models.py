"""Model code of Colossal-AI that calls ``torch.cuda.set_device``, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from colossalai.shardformer.modeling import gpt2, gptj, opt, t5

from ..module_proxy import ModuleProxy

__all__ = ["patch"]


def _set_device(device: Any) -> None:
    """Do nothing: ``torch.cuda.set_device`` raises for a CPU, whose only device is always the current one."""


def patch() -> None:
    """Let forward passes run that call ``torch.cuda.set_device(hidden_states.device)``."""
    for model in (gpt2, gptj, opt, t5):
        model.torch = ModuleProxy(torch, cuda=ModuleProxy(torch.cuda, set_device=_set_device))
