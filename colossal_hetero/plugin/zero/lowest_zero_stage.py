"""Configures a model for the lowest ZeRO stage at which every device can train with one sample (Poplar, section 'Online
Profiling'). If a device ran out of memory within a collective, the other ranks would wait for ever. So each rank first
tries by itself whether it has enough memory, and all ranks learn the results of all before they go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from torch import nn
from torch.optim import Optimizer

from ...colossalai_support.accelerator import get_accelerator, is_out_of_memory
from ...common.ranks import on_every_rank
from ...profiling.aborted_step import abort_step, find_zero_optimizer
from ...profiling.device_profiler import device_name
from ...profiling.local_collectives import local_collectives
from ...profiling.memory import memory_limit, recover, reserved_memory, used_bytes
from ...profiling.optimizer_state import optimizer_state_bytes
from ...profiling.preserved_state import preserved_state
from ...profiling.rank_profiler import smallest_batch
from ...profiling.training_step import TrainingStep, TrialRun
from ..training_objects import TrainingObjects

BROADCAST_BYTES = 250 * 2**20  # DDP allocates so much when it starts, in addition to the parameters, to broadcast them


def configure_lowest_stage(
    stages: Sequence[int],
    precision: str,
    plugin_of: Callable[[int], DPPluginBase],
    training_step: TrainingStep,
    objects: TrainingObjects,
) -> tuple[int, DPPluginBase, TrainingObjects]:
    """Configure ``objects`` for the first of ``stages``, in ascending order, at which one sample fits on every rank."""
    casts = precision != "fp32" and not {1, 2}.isdisjoint(stages[:-1])
    original = _Original(objects.model, objects.optimizer, casts)
    for stage in stages:
        plugin = plugin_of(stage)
        configured = _try_stage(stage, plugin, training_step, objects)
        if isinstance(configured, TrainingObjects):
            return stage, plugin, configured
        original.restore()
        failed = configured
    shown = f"stage {stages[0]}" if len(stages) == 1 else f"any of the stages {', '.join(map(str, stages))}"
    remedy = 'try stage="auto" or a higher stage' if stages[-1] < 3 else "use a smaller model, or leave these ranks out"
    raise ValueError(f"{'; '.join(failed)}: not enough memory for one sample at {shown}; {remedy}")


def _try_stage(
    stage: int, plugin: DPPluginBase, training_step: TrainingStep, objects: TrainingObjects
) -> TrainingObjects | list[str]:
    """The objects that ``plugin`` has configured, or the ranks that do not have enough memory, as text."""
    here = get_accelerator().get_current_device()
    model_bytes = sum(value.numel() * value.element_size() for value in objects.model.parameters())
    configured: list[TrainingObjects] = []

    def make_room() -> None:
        if stage == 0:
            # DDP copies the model to the device, allocates buckets as large as its gradients, and broadcasts.
            with reserved_memory(model_bytes + min(model_bytes, BROADCAST_BYTES), here):
                pass

    def configure() -> None:
        result = TrainingObjects(*plugin.configure(*objects._replace(dataloader=None)))  # ours has uneven batches
        configured.append(result._replace(dataloader=objects.dataloader))

    def run_one_sample() -> None:
        boosted, wrapped, criterion, loader, _ = configured[0]
        trial = TrialRun(boosted, wrapped, criterion, training_step, loader)
        cap = loader.sampler.global_batch_size
        # In its second step DDP allocates new buckets while the old ones still exist.
        to_come = optimizer_state_bytes(wrapped) + (model_bytes if stage == 0 else 0)
        with preserved_state(boosted, wrapped), local_collectives(boosted):
            try:
                with reserved_memory(to_come, here):
                    # The first pass allocates the gradients.
                    trial(smallest_batch(trial, cap, lambda: abort_step(boosted, wrapped)))
            except Exception:
                abort_step(boosted, wrapped)
                raise
            finally:
                wrapped.zero_grad()

    for attempt in (make_room, configure, run_one_sample):
        failed = _ranks_out_of_memory(attempt, here)
        if failed:
            zero = find_zero_optimizer(configured[0].optimizer) if configured else None
            if zero is not None:
                for handle in zero.grad_handles:
                    handle.remove()
                zero.grad_handles.clear()
            configured.clear()
            recover()
            return failed
    return configured[0]


def _ranks_out_of_memory(attempt: Callable[[], None], device: torch.device) -> list[str]:
    """Ranks on which ``attempt`` ran out of memory, as text. Called by all ranks, with the same result."""

    def run() -> str | None:
        try:
            attempt()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            recover(error)
            limit, used = memory_limit(device), used_bytes(device)
            shown = f"{device_name(device)}, {used / 2**30:.2f} of {limit.bytes / 2**30:.2f} GiB used without it"
            return f"{shown}; limited by {limit.source}"
        return None

    shortages = on_every_rank(run, "a first training step")
    return [f"rank {rank} ({shortage})" for rank, shortage in enumerate(shortages) if shortage is not None]


class _Original:
    """A model and its optimizer as they were before a stage's plugin changed them in place."""

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
