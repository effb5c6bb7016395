"""The measured time of a stage, on a simulated device whose clock and events the tests control."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_hetero.colossalai_support import accelerator
from colossal_hetero.plugin.hybrid import drift as drifting
from colossal_hetero.plugin.hybrid.drift import WARMUP_ITERATIONS, DriftWatch, PassSeconds, StageClock
from tests.support.planning import make_plan


class Device:
    """A simulated device; only the passes and the waiting times of the tests advance its clock."""

    seconds = 0.0
    behind = False
    """Whether the device has not yet reached the recorded events."""

    def __init__(self) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.seconds = device.seconds

            def query(self) -> bool:
                return not device.behind

            def elapsed_time(self, end: Any) -> float:
                return (end.seconds - self.seconds) * 1e3

        self.Event = Event

    def forward_step(self, seconds: float) -> None:
        self.seconds += seconds

    def backward_step(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    with patch.object(accelerator, "get_accelerator", lambda: device):
        yield device


def iterate(device: Device, *passes: tuple[float, float]) -> None:
    """Run forward and backward passes, with waiting times for other stages in between."""
    for forward, backward in passes:
        device.forward_step(forward)
        device.seconds += 100.0
        device.backward_step(backward)
        device.seconds += 100.0


def test_the_time_is_the_median_of_the_means_of_the_iterations(device: Device) -> None:
    clock = StageClock(device)
    assert clock.read() is None
    for passes in ([(1.0, 2.0), (3.0, 6.0)], [(3.0, 7.0)], [(50.0, 60.0)]):
        iterate(device, *passes)
        clock.end_iteration()
    assert clock.read() == PassSeconds(pytest.approx(3.0), pytest.approx(7.0))
    assert clock.read() is None, "the times of the previous epoch were not removed"


def test_passes_without_gradients_or_of_warm_up_do_not_count(device: Device) -> None:
    clock = StageClock(device)
    iterate(device, (9.0, 9.0))
    clock.end_iteration(counts=False)
    with torch.no_grad():
        device.forward_step(7.0)
    clock.end_iteration()
    assert clock.read() is None
    with torch.no_grad():
        device.forward_step(7.0)
    iterate(device, (1.0, 2.0))
    clock.end_iteration()
    assert clock.read() == PassSeconds(pytest.approx(1.0), pytest.approx(2.0))


def test_never_waits_for_the_device(device: Device) -> None:
    clock = StageClock(device)
    device.behind = True
    iterate(device, (1.0, 2.0))
    clock.end_iteration()
    assert clock.read() is None
    device.behind = False
    clock.end_iteration()
    assert clock.read() == PassSeconds(pytest.approx(1.0), pytest.approx(2.0))


def test_first_iterations_do_not_count(device: Device) -> None:
    """Here they take a hundred times as long and are half of all iterations."""
    plan = make_plan([[[0]]], (2,))
    watch = DriftWatch(device, plan, 0.2, None, interval=2 * WARMUP_ITERATIONS)
    with (
        patch.object(drifting, "of_every_rank", lambda own: [own]),
        patch.object(drifting, "print_on_rank_0", lambda words: None),
    ):
        for iteration in range(2 * WARMUP_ITERATIONS):
            assert watch.report is None
            slow = 100.0 if iteration < WARMUP_ITERATIONS else 1.0
            iterate(device, (1.0 * slow, 2.0 * slow))
            watch.tick()
    assert watch.report is not None
    (stage,) = watch.report.stages
    assert stage.ratio == pytest.approx(1.0) and not watch.report.drifted
