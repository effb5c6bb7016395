"""Times of forward passes, and those of global batches that follow from them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from colossal_hetero.data_parallel.busy_timer import ForwardOnlyTimer, TimedGlobalBatch, forward_curve
from colossal_hetero.planner.batches.batch_profile import DeviceProfile, TimedBatch
from colossal_hetero.profiling.forward_timer import ForwardTimer


def device(*points: TimedBatch) -> DeviceProfile:
    return DeviceProfile(
        device="cpu", memory_bytes=9, state_bytes=1, sample_bytes=1, max_batch=4, memory_bound=False, points=points
    )


def test_a_micro_batch_takes_as_many_times_as_long_as_in_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = device(*(TimedBatch(batch=n, seconds=3.0 * n, forward_seconds=float(n)) for n in (1, 2, 4)))
    forward = forward_curve(profile, 4)
    assert forward is not None
    timer = ForwardOnlyTimer(nn.Linear(1, 1), lambda: 1, profile.curve(4), forward)
    monkeypatch.setattr(timer._timer, "take", lambda: [(2, 5.0), (4, 4.0)])
    assert timer.take() == [
        TimedGlobalBatch((2,), pytest.approx(15.0), 0.0, 0.0, 0.0),
        TimedGlobalBatch((4,), pytest.approx(12.0), 0.0, 0.0, 0.0),
    ]


def test_without_forward_times_there_is_no_curve() -> None:
    assert forward_curve(device(TimedBatch(batch=1, seconds=1.0), TimedBatch(batch=4, seconds=4.0)), 4) is None


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
