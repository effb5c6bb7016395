"""The time of global batches from their forward passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from colossal_hetero.data_parallel.busy_timer import ForwardOnlyTimer, TimedGlobalBatch, forward_curve
from colossal_hetero.planner.batches.batch_profile import DeviceProfile, TimedBatch


def device(*points: TimedBatch) -> DeviceProfile:
    return DeviceProfile(
        device="cpu", memory_bytes=9, state_bytes=1, sample_bytes=1, max_batch=4, memory_bound=False, points=points
    )


def test_a_micro_batch_takes_as_many_times_as_long_as_in_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = device(*(TimedBatch(batch=n, seconds=3.0 * n, forward_seconds=float(n)) for n in (1, 2, 4)))
    forward = forward_curve(profile, 4)
    assert forward is not None
    loader: Any = SimpleNamespace(current=None)
    timer = ForwardOnlyTimer(nn.Linear(1, 1), loader, profile.curve(4), forward)
    monkeypatch.setattr(timer._timer, "take", lambda: [(2, 5.0), (4, 4.0)])
    assert timer.take() == [
        TimedGlobalBatch((2,), pytest.approx(15.0), 0.0, 0.0, 0.0),
        TimedGlobalBatch((4,), pytest.approx(12.0), 0.0, 0.0, 0.0),
    ]


def test_without_forward_times_there_is_no_curve() -> None:
    assert forward_curve(device(TimedBatch(batch=1, seconds=1.0), TimedBatch(batch=4, seconds=4.0)), 4) is None
