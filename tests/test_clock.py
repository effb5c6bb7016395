"""The clocks: what goes to which part, and, on a GPU (here a pretended one), that nobody waits for the device."""

from __future__ import annotations

import time

import pytest
import torch

from colossal_hetero.balance.clock import CpuClock, CudaClock
from colossal_hetero.stragglers import _CudaSleepBrake


class Device:
    """A device whose events happen when the test says so."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.reached = 0
        self.recorded = 0
        self.slept: list[int] = []

    def sleep(self, cycles: int) -> None:
        """At 1 GHz."""
        self.slept.append(cycles)
        self.milliseconds += cycles / 1e6

    def catch_up(self) -> None:
        self.reached = self.recorded


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            device.recorded += 1
            self.number, self.milliseconds = device.recorded, device.milliseconds

        def query(self) -> bool:
            return self.number <= device.reached

        def synchronize(self) -> None:
            device.catch_up()

        def elapsed_time(self, end: Event) -> float:
            assert self.query() and end.query(), "waited for the device"
            return end.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", device.sleep)
    return device


def run(clock: CudaClock, device: Device, parts: list[tuple[str, float]], tag: int) -> None:
    clock.start()
    for part, milliseconds in parts:
        device.milliseconds += milliseconds
        clock.mark(part)
    device.milliseconds += 1.0
    clock.stop(tag)


def test_cuda_times_are_read_when_the_device_is_done(device: Device) -> None:
    clock = CudaClock()
    run(clock, device, [("other", 2.0), ("matmul", 5.0), ("communication", 3.0), ("matmul", 4.0)], tag=0)
    assert clock.read() == []  # the device is still busy
    device.catch_up()
    run(clock, device, [("matmul", 7.0)], tag=1)
    (times,) = clock.read()
    assert times.tag == 0
    assert times.matmul_seconds == pytest.approx(9e-3)
    assert times.communication_seconds == pytest.approx(3e-3)
    assert times.other_seconds == pytest.approx(3e-3)
    assert times.work_seconds == pytest.approx(12e-3)
    device.catch_up()
    assert [times.tag for times in clock.read()] == [1]
    assert clock.read() == []


def test_cuda_marks_outside_an_iteration_do_not_count(device: Device) -> None:
    clock = CudaClock()
    clock.mark("matmul")
    run(clock, device, [("matmul", 5.0)], tag=0)
    device.milliseconds += 1000.0
    clock.mark("communication")  # an evaluation between two iterations
    run(clock, device, [("matmul", 6.0)], tag=1)
    device.catch_up()
    first, second = clock.read()
    assert first.matmul_seconds == pytest.approx(5e-3) and second.matmul_seconds == pytest.approx(6e-3)
    assert second.communication_seconds == 0.0


def test_cuda_sleep_brake_pauses_by_the_time_of_the_iteration_before(device: Device) -> None:
    brake = _CudaSleepBrake()
    device.slept.clear()
    brake.slowdown = 4.0

    def product() -> torch.Tensor:
        device.milliseconds += 2.0
        return torch.ones(1)

    brake(product)
    assert device.slept == []  # its time is not known yet
    device.catch_up()
    brake.begin_iteration()
    brake(product)
    assert device.slept == [pytest.approx(3 * 2e-3 * 1e9, rel=1e-6)]


def test_cpu_time_goes_to_the_part_that_is_marked() -> None:
    clock = CpuClock()
    clock.mark("communication")
    clock.start()
    time.sleep(0.02)
    clock.mark("matmul")
    clock.stop("tag")
    (times,) = clock.read()
    assert times.tag == "tag" and times.communication_seconds == 0.0
    assert times.matmul_seconds >= 0.02 > times.other_seconds
    assert clock.read() == []
