"""Measure how long a rank's optimizer step takes, without changing the optimizer, its parameters or its state."""

from __future__ import annotations

import time
from statistics import fmean

import torch
from colossalai.interface import OptimizerWrapper
from colossalai.interface.optimizer import DistributedOptim
from torch import nn

from ...accelerator import get_accelerator
from ..memory import is_out_of_memory, recover
from ..preserved_state import inner_optimizer
from .optimizer_state import twin_of

__all__ = ["optimizer_step_seconds"]

MAX_ELEMENTS = 2**22
"""Number of elements that are stepped; the time of larger optimizers is in proportion."""

MIN_SECONDS = 0.2
"""Steps are repeated for so long, because a device under a CPU quota is not stopped in each of them."""
MIN_STEPS, MAX_STEPS = 3, 30


def optimizer_step_seconds(optimizer: torch.optim.Optimizer | OptimizerWrapper) -> float | None:
    """Seconds of a step without collectives; None if that cannot be measured.

    A copy of the optimizer object steps on copies of its first parameters with zero gradients. Colossal-AI's
    distributed optimizers communicate in a step, so they are not measured, and neither is an optimizer for which the
    memory does not suffice or whose step fails for the copies.
    """
    inner = inner_optimizer(optimizer)
    if isinstance(inner, DistributedOptim):
        return None
    whole = sum(parameter.numel() for group in inner.param_groups for parameter in group["params"])
    twin = twin_of(inner)
    seconds: list[float] = []
    stepped = 0
    try:
        twin.param_groups = []
        for group in inner.param_groups:
            copies = []
            for parameter in group["params"]:
                count = min(parameter.numel(), MAX_ELEMENTS - stepped)
                if count > 0:
                    stepped += count
                    copies.append(nn.Parameter(parameter.detach().reshape(-1)[:count].clone()))
                    copies[-1].grad = torch.zeros_like(copies[-1])
            options = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()
            }
            twin.param_groups.append({**options, "params": copies})
        twin.step()  # makes its state
        while len(seconds) < MIN_STEPS or (sum(seconds) < MIN_SECONDS and len(seconds) < MAX_STEPS):
            get_accelerator().synchronize()
            begin = time.perf_counter()
            twin.step()
            get_accelerator().synchronize()
            seconds.append(time.perf_counter() - begin)
    except Exception as error:
        # Some optimizers need parameters of several dimensions, or memory that is missing.
        if is_out_of_memory(error):
            recover(error)
        return None
    return fmean(sorted(seconds)[:-1]) * whole / stepped if stepped else None
