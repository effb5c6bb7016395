"""How long this rank's own forward passes take, whatever it waits for.

A device that changes its speed changes that of forward and backward passes alike, and the forward pass is the part that
is this rank's own: gradients are summed in the backward pass, while fast ranks wait for slow ones. Only sharded
parameters (stage 3) are gathered during the forward pass; those gaps are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ...accelerator import get_accelerator

__all__ = ["MAX_PASSES", "ForwardTimer"]

MAX_PASSES = 1000
"""Passes that are remembered: enough to tell a speed, and few enough events to keep for an epoch of any length."""


@dataclass
class _Pass:
    """Marks in the device's order of work, read when they are long past."""

    samples: int
    begin: Any
    gaps: list[list[Any]] = field(default_factory=list)
    end: Any = None

    def seconds(self) -> float:
        gaps = sum(before.elapsed_time(after) for before, after in self.gaps)
        return (self.begin.elapsed_time(self.end) - gaps) / 1e3


class ForwardTimer:
    """Measures the forward passes of a boosted model in training, at two events each.

    Args:
        model: the model as its stage's plugin wrapped it.
        samples: how many samples are in the pass that begins.
    """

    def __init__(self, model: nn.Module, samples: Callable[[], int]) -> None:
        self._samples = samples
        self._passes: deque[_Pass] = deque(maxlen=MAX_PASSES)
        self._running: _Pass | None = None
        shards = [module for module in model.modules() if isinstance(module, FSDP)]
        inner = shards[0].module if shards else _innermost(model)
        self._handles = [
            inner.register_forward_pre_hook(self._begin),
            inner.register_forward_hook(self._end, always_call=True),
        ]
        for shard in shards[1:]:
            self._handles.append(shard.register_forward_pre_hook(self._begin_gap))
            self._handles.append(shard.module.register_forward_pre_hook(self._end_gap))

    def take(self) -> list[tuple[int, float]]:
        """Return ``(samples, seconds)`` of the latest passes, at most ``MAX_PASSES``; wait for the device."""
        get_accelerator().synchronize()
        taken = [(each.samples, each.seconds()) for each in self._passes]
        self._passes.clear()
        return taken

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._running = _Pass(self._samples(), _mark())

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._running is not None and output is not None:  # None: it failed, out of memory for example
            self._running.end = _mark()
            self._passes.append(self._running)
        self._running = None

    def _begin_gap(self, module: nn.Module, _: Any) -> None:
        if self._running is not None:
            self._running.gaps.append([_mark()])

    def _end_gap(self, module: nn.Module, _: Any) -> None:
        if self._running is not None and len(self._running.gaps[-1]) == 1:
            self._running.gaps[-1].append(_mark())


def _innermost(model: nn.Module) -> nn.Module:
    """The user's model: wrappers do their communication outside of it."""
    while hasattr(model, "module") and isinstance(model.module, nn.Module):
        model = model.module
    return model


def _mark() -> Any:
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event
