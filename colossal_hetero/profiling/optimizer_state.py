"""Memory that an optimizer allocates (state in the first step, temporaries in each), and the time of its step."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, defaultdict
from statistics import fmean
from typing import Any

import torch
from colossalai.interface import OptimizerWrapper
from colossalai.interface.optimizer import DistributedOptim
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..colossalai_support.accelerator import get_accelerator, is_out_of_memory
from .memory import recover
from .preserved_state import inner_optimizer

DISTRIBUTED_STATE_BYTES = 8
"""Largest state of Colossal-AI's distributed optimizers (Lamb, CAME, Adafactor, GaLore), per parameter: two moments."""


def optimizer_state_bytes(optimizer: torch.optim.Optimizer | OptimizerWrapper) -> int:
    """Bytes that the optimizer's first step will allocate for state that does not exist yet; no temporary memory. A
    copy of the optimizer object takes a real step with zero gradients for one parameter of each kind. Distributed
    optimizers know only their own shards and communicate in a step, so the largest possible state is counted."""
    inner = inner_optimizer(optimizer)
    total = 0
    for group in inner.param_groups:
        measured: dict[tuple[Any, ...], int] = {}
        for parameter in group["params"]:
            if parameter.numel() == 0 or _tensor_bytes(inner.state.get(parameter), parameter.device):
                continue
            if isinstance(inner, DistributedOptim):
                total += DISTRIBUTED_STATE_BYTES * parameter.numel()
                continue
            kind = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if kind not in measured:
                measured[kind] = _state_after_a_step(inner, group, parameter)
            total += measured[kind]
    return total


def step_temporary_bytes(optimizer: torch.optim.Optimizer | OptimizerWrapper) -> int:
    """Approximate bytes that a step needs for a moment. torch's optimizers compute the denominator of one parameter at
    a time, in two tensors of its size, while that of the one before still exists; on a GPU those of all parameters of a
    group together (``foreach``), unless the step is fused."""
    most = 0
    for group in inner_optimizer(optimizer).param_groups:
        sizes = [each.numel() * each.element_size() for each in group["params"]]
        on_gpu = any(each.device.type == "cuda" for each in group["params"])
        together = on_gpu and group.get("foreach") is not False and not group.get("fused")
        most = max(most, sum(sizes) if together else 0, 3 * max(sizes, default=0))
    return most


def twin_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of the optimizer object without state and hooks. Set its ``param_groups`` before it steps."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a learning-rate scheduler replaces it to count the steps
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    twin.state = defaultdict(dict)
    return twin


def _like(group: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    options = {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
    return {**options, "params": parameters}


def _state_after_a_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    twin = twin_of(optimizer)
    try:
        stand_in = torch.nn.Parameter(torch.zeros_like(parameter))
        stand_in.grad = torch.zeros_like(stand_in)
        twin.param_groups = [_like(group, [stand_in])]
        twin.step()
        return _tensor_bytes(twin.state.get(stand_in), parameter.device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        recover(error)
    if parameter.numel() == 1:
        return 0  # with so little memory, no sample will fit either
    # If there is not enough memory for the whole parameter, measure half of it and scale the result.
    half = parameter.detach().reshape(-1)[: parameter.numel() // 2]
    return math.ceil(_state_after_a_step(optimizer, group, half) * parameter.numel() / half.numel())


def _tensor_bytes(state: Any, device: torch.device) -> int:
    # Not by storages, which wrappers of quantized state do not have.
    tensors = [each for each in tree_leaves(state) if isinstance(each, Tensor) and each.device == device]
    return sum(each.numel() * each.element_size() for each in tensors)


MAX_ELEMENTS = 2**22  # number of elements that are stepped; the time of larger optimizers is in proportion
MIN_SECONDS = 0.2  # steps are repeated for so long, because a device under a CPU quota is not stopped in each of them
MIN_STEPS, MAX_STEPS = 3, 30


def optimizer_step_seconds(optimizer: torch.optim.Optimizer | OptimizerWrapper) -> float | None:
    """Seconds of a step without collectives, of a copy of the optimizer object on copies of its first parameters. None
    if they do not fit into memory or their step fails, and for distributed optimizers, which communicate in a step."""
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
            twin.param_groups.append(_like(group, copies))
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
