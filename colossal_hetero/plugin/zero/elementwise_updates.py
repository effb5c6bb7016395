"""Checks whether an optimizer can be sharded: ZeRO gives each rank a flat part of every parameter, gradient and state.
That is exact only for optimizers that update each element on its own. Others look at norms of whole tensors (LAMB,
LARS), at rows and columns (Adafactor, CAME), at whole matrices (Muon, GaLore, Shampoo) or at all gradients (Prodigy),
and would train to other weights without an error. So an unknown optimizer is tried on a tensor and on its halves."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from colossalai.interface import OptimizerWrapper
from colossalai.interface.optimizer import DistributedOptim
from colossalai.nn.optimizer import CPUAdam, FusedAdam, FusedSGD, HybridAdam, Lamb
from torch import Tensor, optim
from torch.nn import Parameter

from ...colossalai_support.accelerator import get_accelerator

ELEMENTWISE = {
    *(optim.Adadelta, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.SGD, CPUAdam, FusedAdam, FusedSGD, HybridAdam),
}
"""Optimizers that update each element of a parameter from its own gradients alone."""

LARGEST = (192, 192, 3)  # of a tensor on which an optimizer is tried; the last size is for all further dimensions

STEPS, RATE, TOLERANCE = 2, 0.1, 1e-5


def check_sharding(optimizer: Any, option: str, stage: int, distributed: bool) -> None:
    reason = why_not_sharded(optimizer, distributed)
    if reason is not None:
        raise ValueError(
            f"{type(_inner(optimizer)).__name__} cannot be sharded by ZeRO ({option}={stage}), because "
            f"{reason}; use {option}=0, or an optimizer that updates each element on its own, such as AdamW"
        )


def why_not_sharded(optimizer: Any, distributed: bool) -> str | None:
    """Reason why ``optimizer`` cannot be sharded, in words; None if it can be."""
    optimizer = _inner(optimizer)
    if type(optimizer) in ELEMENTWISE or (distributed and type(optimizer) is Lamb):
        return None
    if isinstance(optimizer, DistributedOptim):
        return "it is made for tensors that Colossal-AI divides"
    if any(isinstance(each, Tensor) for each in optimizer.state):
        return "it keeps states of whole parameters from the beginning"
    for group in optimizer.param_groups:
        # The largest of each number of dimensions.
        shapes = {each.dim(): tuple(each.shape) for each in sorted(group["params"], key=Tensor.numel)}
        for shape in shapes.values():
            reason = _try(optimizer, group, _sample_shape(shape))
            if reason is not None:
                return reason
    return None


def _inner(optimizer: Any) -> Any:
    return _inner(optimizer.optim) if isinstance(optimizer, OptimizerWrapper) else optimizer


def _sample_shape(shape: Sequence[int]) -> tuple[int, ...]:
    limits = (*LARGEST, *[LARGEST[-1]] * len(shape))
    sizes = [min(size, limit) for size, limit in zip(shape, limits, strict=False)]
    return tuple(sizes) if torch.Size(sizes).numel() > 1 else (2,)


def _try(optimizer: Any, group: dict[str, Any], shape: tuple[int, ...]) -> str | None:
    """Update a tensor of this shape, and its halves as two ranks would do."""
    generator = torch.Generator().manual_seed(0)
    device = get_accelerator().get_current_device()
    count = torch.Size(shape).numel()
    # Norms of the halves differ.
    scales = torch.where(torch.arange(count) < count // 2, 1.0, 3.0).view(shape)
    value, *gradients = ((torch.randn(shape, generator=generator) * scales).to(device) for _ in range(1 + STEPS))
    # AdamP and SGDP look at tensors only where gradients are nearly perpendicular to them.
    gradients[0] -= 0.97 * (gradients[0] * value).sum() / value.square().sum() * value
    try:
        whole = _updated(optimizer, group, value, gradients)
        halves = [
            _updated(optimizer, group, value.flatten()[part], [each.flatten()[part] for each in gradients])
            for part in (slice(count // 2), slice(count // 2, None))
        ]
    except Exception as error:
        return f"its step cannot be tried on a part of a tensor ({type(error).__name__}: {error})"
    change = (whole - value).abs().max()
    if not change > 0:
        return "a step that was tried with it changed nothing"
    if not (torch.cat(halves) - whole.flatten()).abs().max() <= TOLERANCE * change:
        return f"it updates a tensor of shape {list(shape)} in another way than its parts, of which each rank has one"
    return None


def _updated(optimizer: Any, group: dict[str, Any], value: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    parameter = Parameter(value.clone())
    probe = object.__new__(type(optimizer))
    groups: list[dict[str, Any]] = []
    memo: dict[int, Any] = {id(each): each for one in optimizer.param_groups for each in one["params"]}
    memo.update({id(optimizer): probe, id(optimizer.param_groups): groups, id(optimizer.state): defaultdict(dict)})
    options = copy.deepcopy({name: each for name, each in group.items() if name != "params"}, memo)
    if options.get("lr") is not None:
        options["lr"] = RATE  # a schedule may begin with 0
    groups.append({**options, "params": [parameter]})
    # A schedule has replaced the method `step` of the object.
    vars(probe).update(copy.deepcopy({name: each for name, each in vars(optimizer).items() if name != "step"}, memo))
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(probe, name, OrderedDict())
    for gradient in gradients:
        parameter.grad = gradient.clone()
        type(optimizer).step(probe)
    return parameter.detach()
