"""A model whose passes take given times on a simulated clock, with or without a CPU quota."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossal_hetero.profiling.layer_passes import Duration

WIDTH, CLASSES = 8, 3
PERIOD = 0.1  # period of the quota in seconds


class SimulatedClock:
    """The time of a process with a ``quota`` of a core. In each period it uses up its share, then waits."""

    def __init__(self, quota: float = 1.0, threads: int = 1) -> None:
        self.quota = quota
        self.threads = threads
        self.busy = 0.0  # seconds for which the process has run

    def advance(self, seconds: float) -> None:
        self.busy += seconds

    def __call__(self) -> Duration:
        share = PERIOD * self.quota
        periods = math.floor(self.busy / share)
        return Duration(periods * PERIOD + self.busy - periods * share, self.busy * self.threads)


class TakesTime(torch.autograd.Function):
    """The identity, which takes given seconds per sample in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: SimulatedClock, forward: float, backward: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, backward * len(x)
        clock.advance(forward * len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.clock.advance(ctx.seconds)
        return gradient, None, None, None


class Part(nn.Module):
    """A linear layer that takes a given time."""

    def __init__(self, clock: SimulatedClock, forward: float, backward: float, out: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, out)
        self.norm = nn.LayerNorm(out)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(1))
        self.clock, self.seconds = clock, (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return TakesTime.apply(self.dropout(self.norm(self.linear(x))), self.clock, *self.seconds)


class Model(nn.Module):
    """A model of ``before``, ``blocks`` and ``after``, each with its seconds per sample forward and backward."""

    def __init__(
        self,
        clock: SimulatedClock,
        before: tuple[float, float] = (0.0, 0.0),
        blocks: tuple[tuple[float, float], ...] = ((0.003, 0.006),) * 5,
        after: tuple[float, float] = (0.0, 0.0),
        block: Callable[..., nn.Module] = Part,
    ) -> None:
        super().__init__()
        self.embed = Part(clock, *before)
        self.blocks = nn.ModuleList(block(clock, *seconds) for seconds in blocks)
        self.head = Part(clock, *after, out=CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SlowSGD(torch.optim.SGD):
    """An SGD optimizer that takes ``SECONDS`` per parameter tensor."""

    SECONDS = 0.01

    def __init__(self, parameters: Any, clock: SimulatedClock) -> None:
        super().__init__(parameters, lr=0.1)
        self._clock = clock

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self._clock.advance(self.SECONDS * sum(len(group["params"]) for group in self.param_groups))


def use_clock(clock: SimulatedClock, patch: pytest.MonkeyPatch) -> None:
    """Let the profiler use this clock."""
    for module in ("layer_passes", "layer_profiler"):
        patch.setattr(f"colossal_hetero.profiling.{module}.clock", clock)
    patch.setattr(torch, "get_num_threads", lambda: clock.threads)


def batch(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, WIDTH, generator=generator), torch.arange(samples) % CLASSES
