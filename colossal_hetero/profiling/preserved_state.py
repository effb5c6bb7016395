"""Restore model, optimizer and random state after trial passes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..colossalai_support.accelerator import get_accelerator
from .aborted_step import abort_step, find_zero_optimizer

# isort: split
from colossalai.interface import OptimizerWrapper
from colossalai.shardformer.layer.utils import Randomizer

Restore = Callable[[], None]


@contextmanager
def preserved_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | OptimizerWrapper | None = None
) -> Iterator[None]:
    """On leaving the block, restore what forward and backward passes change, bit for bit and in the same tensors:
    buffers, gradients (also those of ZeRO's optimizer and FSDP), modes of modules, all random states, and the entries
    of the optimizer's state and parameter groups. An unfinished step is aborted. The block must not contain optimizer
    steps: parameters and tensors in the optimizer's state are not restored."""
    abort_step(model, optimizer)
    tensors = _parameters(model, optimizer)
    restores = [*_gradients(optimizer, tensors), *_optimizer(optimizer), *_modules(model), random_state()]
    try:
        yield
    finally:
        abort_step(model, optimizer)
        for restore in restores:
            restore()


def inner_optimizer(optimizer: torch.optim.Optimizer | OptimizerWrapper) -> torch.optim.Optimizer:
    while isinstance(optimizer, OptimizerWrapper):
        optimizer = optimizer.optim
    return optimizer


def random_state() -> Restore:
    """The random state of Python, NumPy, torch and the accelerator; call the result to restore it."""
    accelerator = get_accelerator()
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = None if accelerator.name == "cpu" else accelerator.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            accelerator.set_rng_state(device)

    return restore


def _modules(model: nn.Module) -> Iterator[Restore]:
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        yield partial(setattr, module, "training", module.training)
        if module._buffers:
            yield _buffers(module, copies)
        for value in vars(module).values():
            if isinstance(value, Randomizer):
                yield _attributes(value)


def _buffers(module: nn.Module, copies: dict[int, Tensor]) -> Restore:
    """Restore buffers; ``copies``, by ``id`` of a buffer, is shared by all modules."""
    before = dict(module._buffers)
    for buffer in before.values():
        if buffer is not None and id(buffer) not in copies:
            copies[id(buffer)] = _on_host(buffer)

    def restore() -> None:
        module._buffers.clear()
        module._buffers.update(before)
        for buffer in before.values():
            # Unchanged buffers are not written, because a buffer whose elements share memory cannot be written.
            if buffer is not None and not torch.equal(buffer.detach().cpu(), copies[id(buffer)]):
                buffer.detach().copy_(copies[id(buffer)])

    return restore


def _attributes(owner: Any) -> Restore:
    before = dict(vars(owner))

    def restore() -> None:
        vars(owner).clear()
        vars(owner).update(before)

    return restore


def _values(tensors: list[Tensor]) -> Restore:
    copies = [_on_host(tensor) for tensor in tensors]

    def restore() -> None:
        for tensor, value in zip(tensors, copies, strict=True):
            tensor.detach().copy_(value)

    return restore


def _gradients(optimizer: Any, tensors: list[Tensor]) -> Iterator[Restore]:
    found = [(tensor, tensor.grad) for tensor in tensors]
    values = _values([gradient for _, gradient in found if gradient is not None])

    def restore() -> None:
        for tensor, gradient in found:
            # Set to None first, because torch does not allow to replace a gradient by one of another type.
            tensor.grad = None
            tensor.grad = gradient
        values()

    yield restore
    zero = find_zero_optimizer(optimizer)
    if zero is not None:
        for store in zero.pg_to_grad_store.values():
            yield _gradient_store(store)
        if zero.mixed_precision_mixin is not None:
            yield _attributes(zero.mixed_precision_mixin)


def _gradient_store(store: Any) -> Restore:
    """Restore ZeRO's reduced gradients: lists of slices by parameter group and parameter."""
    slices = {
        group: {parameter: list(parts) for parameter, parts in parameters.items()}
        for group, parameters in store._grads_of_params.items()
    }
    owners = dict(store.grad_to_param_mapping)
    values = _values([part for parameters in slices.values() for parts in parameters.values() for part in parts])

    def restore() -> None:
        store._grads_of_params = slices
        store.grad_to_param_mapping = owners
        values()

    return restore


def _optimizer(optimizer: torch.optim.Optimizer | OptimizerWrapper | None) -> Iterator[Restore]:
    """Restore the entries of the optimizer's state and parameter groups; their tensors are not copied."""
    if optimizer is None:
        return
    inner = inner_optimizer(optimizer)
    state = [(key, entry, dict(entry) if isinstance(entry, dict) else None) for key, entry in inner.state.items()]
    groups = [
        (group, {name: list(value) if name == "params" else _copied(value) for name, value in group.items()})
        for group in inner.param_groups
    ]

    def restore() -> None:
        inner.state.clear()
        for key, entry, content in state:
            if content is not None:
                entry.clear()
                entry.update(content)
            inner.state[key] = entry
        inner.param_groups[:] = [group for group, _ in groups]
        for group, content in groups:
            parameters = group["params"]
            parameters[:] = content["params"]
            group.clear()
            group.update(content, params=parameters)

    yield restore


def _copied(value: Any) -> Any:
    return value if isinstance(value, Tensor) else copy.deepcopy(value)


def _parameters(model: nn.Module, optimizer: Any) -> list[Tensor]:
    tensors: list[Tensor] = list(model.parameters())
    shards = FullyShardedDataParallel.fsdp_modules(model)
    tensors += [shard._handle.flat_param for shard in shards if shard._handle is not None]
    if optimizer is not None:
        tensors += [tensor for group in inner_optimizer(optimizer).param_groups for tensor in group["params"]]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
