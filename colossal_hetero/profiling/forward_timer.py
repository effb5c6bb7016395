"""Measure the forward passes of this rank during training, without waiting for other ranks. If a device changes its
speed, both passes change alike, and in the backward pass fast ranks wait for slow ones. Waits in the forward pass
(gathering of sharded parameters, synchronized batch normalization) are subtracted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ..colossalai_support.accelerator import get_accelerator, recorded_event

MAX_PASSES = 1000
"""Number of passes kept: enough for a speed, and few enough for the memory of long epochs."""


@dataclass
class _Pass:
    samples: int
    begin: Any
    gaps: list[list[Any]] = field(default_factory=list)
    """Pairs of events around each gathering of parameters."""
    end: Any = None

    def seconds(self) -> float:
        gaps = sum(before.elapsed_time(after) for before, after in self.gaps)
        return (self.begin.elapsed_time(self.end) - gaps) / 1e3


class ForwardTimer:
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
        for module in inner.modules():
            # Their forward passes contain collectives, in which fast ranks wait for slow ones.
            if isinstance(module, nn.SyncBatchNorm):
                self._handles.append(module.register_forward_pre_hook(self._begin_gap))
                self._handles.append(
                    module.register_forward_hook(lambda module, inputs, _: self._end_gap(module, inputs))
                )

    def take(self) -> list[tuple[int, float]]:
        """``(samples, seconds)`` of the passes since the last call, at most ``MAX_PASSES``; waits for the device."""
        get_accelerator().synchronize()
        taken = [(each.samples, each.seconds()) for each in self._passes]
        self._passes.clear()
        return taken

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._running = _Pass(self._samples(), recorded_event())

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._running is not None and output is not None:  # None: the pass failed, e.g. out of memory
            self._running.end = recorded_event()
            self._passes.append(self._running)
        self._running = None

    def _begin_gap(self, module: nn.Module, _: Any) -> None:
        if self._running is not None:
            self._running.gaps.append([recorded_event()])

    def _end_gap(self, module: nn.Module, _: Any) -> None:
        if self._running is not None and len(self._running.gaps[-1]) == 1:
            self._running.gaps[-1].append(recorded_event())


def _innermost(model: nn.Module) -> nn.Module:
    """The user's model inside all wrappers; the wrappers communicate outside of it."""
    while hasattr(model, "module") and isinstance(model.module, nn.Module):
        model = model.module
    return model
