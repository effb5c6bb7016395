"""Configures a model for the lowest ZeRO stage at which every device holds a sample (Poplar, section 'Online
Profiling').

A device that runs out of memory must not leave its peers in a collective. So what it needs is tried out by itself
first, and all ranks hear of each other's success before they go on together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...accelerator import get_accelerator
from ...data_parallel.loader import HeteroDataLoader
from ...processes.every_rank import on_every_rank
from ...profiling.aborted_step import abort_step, find_zero_optimizer
from ...profiling.batches.device_profiler import device_name, optimizer_state_bytes
from ...profiling.local_collectives import local_collectives
from ...profiling.memory import is_out_of_memory, memory_limit, recover, reserved_memory, used_bytes
from ...profiling.preserved_state import preserved_state
from ...profiling.training_step import TrainingStep, TrialRun
from .zero_stages import Configured

__all__ = ["configure_lowest"]

BROADCAST_BYTES = 250 * 2**20
"""What DDP broadcasts at once as it begins; it holds as much beside the parameters."""


def configure_lowest(
    stages: Sequence[int],
    precision: str,
    plugin_of: Callable[[int], DPPluginBase],
    training_step: TrainingStep,
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable | None,
    loader: HeteroDataLoader,
    lr_scheduler: LRScheduler | None,
) -> tuple[int, DPPluginBase, Configured]:
    """Configure for the first of ``stages``, in ascending order, at which one sample fits on every rank.

    Returns the stage, its plugin, and what that has configured.

    Raises:
        ValueError: on every rank, if some rank holds no sample at any of the stages; it names rank and device.
    """
    casts = precision != "fp32" and not {1, 2}.isdisjoint(stages[:-1])
    original = _Original(model, optimizer, casts)
    for stage in stages:
        plugin = plugin_of(stage)
        configured = _try_stage(stage, plugin, training_step, model, optimizer, criterion, loader, lr_scheduler)
        if isinstance(configured, tuple):
            return stage, plugin, configured
        original.restore()
        failed = configured
    shown = f"stage {stages[0]}" if len(stages) == 1 else f"any of the stages {', '.join(map(str, stages))}"
    remedy = 'try stage="auto" or a higher one' if stages[-1] < 3 else "use a smaller model, or train without"
    raise ValueError(f"{'; '.join(failed)}: no memory for one sample at {shown}; {remedy}")


def _try_stage(
    stage: int,
    plugin: DPPluginBase,
    training_step: TrainingStep,
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable | None,
    loader: HeteroDataLoader,
    lr_scheduler: LRScheduler | None,
) -> Configured | list[str]:
    """What ``plugin`` configures, or the ranks that have no room for it."""
    here = get_accelerator().get_current_device()
    model_bytes = sum(value.numel() * value.element_size() for value in model.parameters())
    configured: list[Any] = []

    def make_room() -> None:
        if stage == 0:
            # DDP copies the model to the device, makes buckets as large as its gradients, and broadcasts.
            with reserved_memory(model_bytes + min(model_bytes, BROADCAST_BYTES), here):
                pass

    def configure() -> None:
        configured.extend(plugin.configure(model, optimizer, criterion, None, lr_scheduler))

    def run_one_sample() -> None:
        boosted, wrapped = configured[0], configured[1]
        trial = TrialRun(boosted, wrapped, configured[2], training_step, loader)
        # DDP lays its buckets anew in its second step, and the old ones are still there.
        to_come = optimizer_state_bytes(wrapped) + (model_bytes if stage == 0 else 0)
        with preserved_state(boosted, wrapped), local_collectives(boosted):
            try:
                with reserved_memory(to_come, here):
                    trial(1)  # makes the gradients
                    trial(1)
            except Exception:
                abort_step(boosted, wrapped)
                raise
            finally:
                wrapped.zero_grad()

    for attempt in (make_room, configure, run_one_sample):
        failed = _without_room(attempt, here)
        if failed:
            if len(configured) > 1:
                _detach(configured[1])
            configured.clear()
            recover()
            return failed
    return tuple(configured)  # type: ignore[return-value]


def _without_room(attempt: Callable[[], None], device: torch.device) -> list[str]:
    """The ranks on which ``attempt`` ran out of memory, in words. Every rank calls it and gets the same answer."""

    def run() -> str | None:
        try:
            attempt()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            recover(error)
            limit, used = memory_limit(device), used_bytes(device)
            return (
                f"{device_name(device)}, {used / 2**30:.2f} of {limit.bytes / 2**30:.2f} GiB used without it; "
                f"what sets them is {limit.source}"
            )
        return None

    shortages = on_every_rank(run, "a first training step")
    return [f"rank {rank} ({words})" for rank, words in enumerate(shortages) if words is not None]


def _detach(optimizer: Any) -> None:
    zero = find_zero_optimizer(optimizer)
    if zero is not None:
        for handle in zero.grad_handles:
            handle.remove()
        zero.grad_handles.clear()


class _Original:
    """A model and its optimizer as they were before a stage's plugin changed them in place.

    Args:
        model: on whatever device.
        optimizer: of its parameters.
        casts: whether a stage casts to half precision, which cannot be taken back: copies are kept in the host's
            memory.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, casts: bool) -> None:
        self._optimizer = optimizer
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self._tensors = [*model.parameters(), *model.buffers()]
        self._devices = [tensor.device for tensor in self._tensors]
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors] if casts else None

    def restore(self) -> None:
        for group, parameters in self._groups:
            group["params"] = parameters
        self._optimizer.state.clear()
        for index, (tensor, device) in enumerate(zip(self._tensors, self._devices, strict=True)):
            tensor.grad = None
            tensor.data = (tensor.data if self._copies is None else self._copies[index].clone()).to(device)
