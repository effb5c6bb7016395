"""How long a rank's forward passes take, and how much slower than expected that is."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from colossal_hetero.data_parallel.batch_balancer import damped, slowdown
from colossal_hetero.planner.batches.time_curve import Curve
from colossal_hetero.profiling.batches.forward_timer import ForwardTimer

LINEAR = Curve.from_seconds([1.0, 2.0, 3.0, 4.0])


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = 0.02

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        if self.seconds < 0.001:
            raise RuntimeError("out of memory")
        return inputs * self.weight


def test_only_training_passes_are_measured() -> None:
    model, batch = Sleeper(), SimpleNamespace(samples=3)
    wrapped = nn.Module()
    wrapped.module = model
    watch = ForwardTimer(wrapped, lambda: batch.samples)
    model(torch.ones(3))
    batch.samples = 2
    model(torch.ones(2))
    with torch.no_grad():
        model(torch.ones(5))
    model.eval()
    model(torch.ones(5))
    model.train()
    model.seconds = 0.0
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.ones(7))
    passes = watch.take()
    assert [samples for samples, _ in passes] == [3, 2]
    assert all(seconds >= 0.02 for _, seconds in passes)
    assert watch.take() == []
    watch.remove()
    model.seconds = 0.01
    model(torch.ones(3))
    assert watch.take() == []


def test_slowdown_is_the_ratio_of_sums_without_the_longest_pass() -> None:
    assert slowdown([(1, 2.0), (4, 8.0), (2, 4.0)], LINEAR) == pytest.approx(2.0)
    assert slowdown([(1, 1.0), (4, 400.0), (2, 2.0)], LINEAR) == pytest.approx(1.0)
    # If a device is throttled for half of the time, slow and fast passes alternate; the mean slowdown is 3.
    assert slowdown([(1, 1.0), (1, 5.0)] * 50, LINEAR) == pytest.approx(3.0, rel=0.02)


def test_too_few_or_too_short_passes_give_no_slowdown() -> None:
    assert slowdown([], LINEAR) is None
    assert slowdown([(1, 2.0), (1, 2.0)], LINEAR) is None
    assert slowdown([(1, 0.01)] * 30, LINEAR) is None


def test_if_the_direction_turns_half_of_the_change_is_applied() -> None:
    assert damped(1.0, 3.0, 1.0) == 3.0
    assert damped(3.0, 3.5, 3.0) == 3.5
    assert damped(4.0, 1.0, 4.0) == 2.0
    assert damped(2.0, 1.0, 0.5) == 1.0
