"""How long a rank's forward passes take."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from colossal_hetero.profiling.forward_timer import ForwardTimer


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
