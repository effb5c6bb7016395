"""The clocks: which time counts as which part, and that on a GPU (here a fake one) the host never waits for it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from colossal_hetero.balance import clock as clocks
from colossal_hetero.balance.clock import CpuClock, CudaClock
from tests.support.fake_device import FakeDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    for name, fake in device.fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return device


class HostSeconds:
    """A host clock that a test turns on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostSeconds:
    host = HostSeconds()
    monkeypatch.setattr(clocks, "time", host)
    return host


def iterate(clock: Any, host: HostSeconds, device: FakeDevice, parts: Sequence[Any], after: float = 1.0) -> None:
    """An iteration of parts, each with its seconds, perhaps a kind, and whether it is inner; then of other work."""
    clock.start()
    for part, seconds, *kind_and_inner in parts:
        pass_by(host, device, seconds)
        clock.mark(part, *kind_and_inner)
    pass_by(host, device, after)
    clock.stop()


def pass_by(host: HostSeconds, device: FakeDevice, seconds: float) -> None:
    host.now += seconds
    device.milliseconds += 1e3 * seconds


ATTENTION, MLP = 0, 1
PASSES: list[tuple[str, float, int | None]] = [
    ("other", 5.0, ATTENTION),  # the embedding, in whose collective a rank may wait
    *(("matmul", 1.0, ATTENTION), ("block", 0.5, ATTENTION), ("matmul", 1.0, ATTENTION)),
    ("communication", 2.0, ATTENTION),
    *(("other", 0.25, MLP), ("matmul", 3.0, MLP), ("migration", 4.0, MLP)),  # norm, residual, products
    *(("other", 0.125, MLP), ("communication", 2.0, MLP)),
    ("communication", 6.0, None),  # another stage of the pipeline
    *(("other", 7.0, MLP), ("matmul", 6.0, MLP), ("communication", 2.0, MLP)),  # the loss
]


def test_the_time_of_a_kind_is_its_work_between_collectives_of_balanced_layers(device, host):
    cpu, gpu = CpuClock(), CudaClock()
    for clock in (cpu, gpu):
        iterate(clock, host, device, PASSES, after=8.0)  # the optimizer step
    assert gpu.read() == []  # the device is still busy
    device.catch_up()
    for times in (*cpu.read(), *gpu.read()):
        assert times.kinds == {ATTENTION: pytest.approx((2.5, 0.0)), MLP: pytest.approx((9.0, 0.375))}
        assert times.matmul_seconds == pytest.approx(1 + 0.5 + 1 + 3 + 6)
        assert times.migration_seconds == pytest.approx(4.0)
        assert times.communication_seconds == pytest.approx(2 + 4 + 2 + 6 + 2)
        assert times.work_seconds == pytest.approx(5 + 2.5 + 9.375 + 7 + 8)


INNER: list[tuple[str, float, bool]] = [
    *(("communication", 2.0, False), ("other", 0.25, False)),
    *(("matmul", 1.0, True), ("other", 0.0, True), ("matmul", 1.5, True)),  # two column-parallel layers
    *(("block", 0.5, True), ("matmul", 2.0, False), ("communication", 2.0, False)),  # the row-parallel layer
    *(("other", 0.25, False), ("matmul", 4.0, True), ("block", 0.5, False)),  # the backward pass
    *(("matmul", 3.0, False), ("overlapped", 5.0, True), ("other", 0.5, True)),  # dX, dW, the bias
    *(("communication", 1.0, False), ("block", 0.0, True)),
    *(("matmul", 1.0, False), ("overlapped", 1.0, True), ("communication", 1.0, False)),
    ("matmul", 7.0, True),  # of a block that ends without another product
]
"""In milliseconds. The last part is followed by other work of 1 ms."""


def run(clock: CudaClock, device: FakeDevice, parts: list[tuple[str, float, bool]] = INNER) -> None:
    """The parts in milliseconds."""
    iterate(clock, HostSeconds(), device, [(part, 1e-3 * ms, MLP, inner) for part, ms, inner in parts], after=1e-3)


def test_inner_parts_take_no_events_on_a_gpu(device: FakeDevice, host: HostSeconds) -> None:
    cpu, gpu = CpuClock(), CudaClock()
    before = device.recorded
    for clock in (cpu, gpu):
        iterate(clock, host, device, [(part, ms, MLP, inner) for part, ms, inner in INNER])
    assert device.recorded - before == sum(not inner for _, _, inner in INNER) + 2
    device.catch_up()
    (all_parts,), (merged,) = cpu.read(), gpu.read()
    # The bias, and the end of the last block, are the only work whose time is not known without their events. A product
    # beside a collective is taken to be as long as the one before: 3 instead of 5 ms.
    assert all_parts.kinds[MLP].movable == pytest.approx(5 + 4.5 + 3 + 5 + 1 + 1 + 7)
    assert merged.kinds[MLP].movable == pytest.approx(all_parts.kinds[MLP].movable - 2 + 1)
    assert all_parts.kinds[MLP].fixed == pytest.approx(1.0) and merged.kinds[MLP].fixed == pytest.approx(0.5)
    assert merged.communication_seconds == pytest.approx(all_parts.communication_seconds + 2.5)
    assert merged.work_seconds + 2.5 == pytest.approx(all_parts.work_seconds)


def test_events_are_read_in_slices_while_there_is_time(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "READ_AT_ONCE", 10)
    parts = [("matmul", 1.0, False)] * 24
    clock = CudaClock()
    run(clock, device, parts)
    assert device.queried == 24 // clocks.STARVED_EVERY  # few marks ask whether the GPU waits
    device.catch_up()
    read, finished = [], []
    for _ in range(3):
        before = device.read
        finished.append(clock.read())
        read.append(device.read - before)
    assert read == [10, 10, 5] and [len(each) for each in finished] == [0, 0, 1]
    assert finished[-1][0].kinds[MLP].movable == pytest.approx(24e-3)
    # If every iteration is measured, none is left behind.
    for _ in range(2):
        run(clock, device, parts)
    device.catch_up()
    assert len(clock.read()) == 1
    for _ in range(3):
        run(clock, device, parts)
        device.catch_up()
        assert len(clock.read()) == 1


def test_a_gpu_that_waits_for_its_host_is_noticed(device: FakeDevice) -> None:
    clock = CudaClock()
    shares = []
    for late in (0, 9, 24):  # the host is late with so many of 24 parts
        clock.start()
        for number in range(24):
            if number < late:
                device.catch_up()
            device.milliseconds += 1.0
            clock.mark("matmul", MLP)
        asked = device.queried
        clock.stop()
        assert device.queried - asked <= 1
        device.catch_up()
        (times,) = clock.read()
        shares.append(times.starved)
    assert shares == [0.0, pytest.approx(9 / 24), pytest.approx(1.0)]
