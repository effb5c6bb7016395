"""The clocks: which time counts as which part, and that on a GPU (here a fake one) the host never waits for it."""

from __future__ import annotations

import pytest
import torch

from colossal_hetero.balance import clock as clocks
from colossal_hetero.balance.clock import CpuClock, CudaClock, IterationTimes
from colossal_hetero.balance.timeline import Segment
from colossal_hetero.testing.stragglers import _CudaSleepSlowdown
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


def run_on_host(clock: CpuClock, host: HostSeconds, parts: list[tuple[str, float]], tag: int = 0) -> IterationTimes:
    clock.start()
    for part, seconds in parts:
        host.now += seconds
        clock.mark(part)
    host.now += 1.0
    clock.stop(tag)
    (times,) = clock.read()
    return times


def run(clock: CudaClock, device: FakeDevice, parts: list[tuple[str, float]], tag: int) -> None:
    clock.start()
    for part, milliseconds in parts:
        device.milliseconds += milliseconds
        clock.mark(part)
    device.milliseconds += 1.0
    clock.stop(tag)


def test_cuda_sleep_slowdown_pauses_by_the_time_of_the_iteration_before(device: FakeDevice) -> None:
    slow_down = _CudaSleepSlowdown()
    device.slept.clear()
    slow_down.factor = 4.0

    def product() -> torch.Tensor:
        device.milliseconds += 2.0
        return torch.ones(1)

    slow_down(product)
    assert device.slept == []  # its time is not known yet
    device.catch_up()
    slow_down.begin_iteration()
    slow_down(product)
    assert device.slept == [pytest.approx(3 * 2e-3 * 1e9, rel=1e-6)]


STRETCHES = [("other", 2.0), ("matmul", 5.0), ("block", 4.0), ("matmul", 1.0), ("matmul", 2.0), ("communication", 3.0)]
"""With a second of other work after them."""


def assert_parts(times: IterationTimes, unit: float) -> None:
    assert times.matmul_seconds == pytest.approx(8 * unit)
    assert times.block_seconds == pytest.approx(4 * unit)
    assert times.communication_seconds == pytest.approx(3 * unit)
    assert times.other_seconds == pytest.approx(3 * unit)
    assert times.work_seconds == pytest.approx(15 * unit)


def assert_segments(segments: tuple[Segment, ...], start: float, unit: float) -> None:
    """Those of :data:`STRETCHES`, neighbors of one kind as one."""
    expected = [("other", 0, 2), ("matmul", 2, 7), ("block", 7, 11), ("matmul", 11, 14), ("communication", 14, 17)]
    expected.append(("other", 17, 18))
    assert [segment.kind for segment in segments] == [kind for kind, _, _ in expected]
    for segment, (_, first, last) in zip(segments, expected, strict=True):
        assert segment[1:] == pytest.approx((start + first * unit, start + last * unit))


def test_segments_are_kept_of_the_iterations_that_are_wanted(device: FakeDevice, host: HostSeconds) -> None:
    clock = CpuClock()
    assert run_on_host(clock, host, STRETCHES).segments == ()
    clock.keep_segments = True
    start = host.now
    times = run_on_host(clock, host, STRETCHES)
    assert_segments(times.segments, start, 1.0)
    assert_parts(times, 1.0)
    clock.mark("other")  # an evaluation
    clock.keep_segments = False
    assert run_on_host(clock, host, STRETCHES).segments == ()

    cuda = CudaClock()
    for tag, wanted in enumerate((False, True, False)):
        cuda.keep_segments = wanted
        run(cuda, device, STRETCHES, tag)
    device.catch_up()  # all are read late, when the wish has long changed
    first, second, third = cuda.read()
    assert first.segments == third.segments == ()
    assert_segments(second.segments, 0.0, 1e-3)
    assert_parts(second, 1e-3)


def test_processes_of_one_machine_can_compare_their_times_and_gpus_cannot(
    device: FakeDevice, host: HostSeconds
) -> None:
    base = run_on_host(CpuClock(), host, STRETCHES).time_base
    assert base and base == run_on_host(CpuClock(), host, STRETCHES).time_base
    clock = CudaClock()
    run(clock, device, STRETCHES, tag=0)
    device.catch_up()
    assert clock.read()[0].time_base == ""


ATTENTION, MLP = 0, 1
PASSES: list[tuple[str, float, int | None]] = [
    ("other", 5.0, ATTENTION),  # the embedding, in whose collective a rank may wait
    ("matmul", 1.0, ATTENTION),
    ("block", 0.5, ATTENTION),
    ("matmul", 1.0, ATTENTION),
    ("communication", 2.0, ATTENTION),
    ("other", 0.25, MLP),  # norm and residual
    ("matmul", 3.0, MLP),
    ("migration", 4.0, MLP),
    ("other", 0.125, MLP),
    ("communication", 2.0, MLP),
    ("communication", 6.0, None),  # another stage of the pipeline
    ("other", 7.0, MLP),  # the loss
    ("matmul", 6.0, MLP),
    ("communication", 2.0, MLP),
]


def test_the_time_of_a_kind_is_its_work_between_collectives_of_balanced_layers(
    device: FakeDevice, host: HostSeconds
) -> None:
    cpu, gpu = CpuClock(), CudaClock()
    for clock in (cpu, gpu):
        clock.start()
        for part, seconds, kind in PASSES:
            host.now += seconds
            device.milliseconds += 1e3 * seconds
            clock.mark(part, kind)  # type: ignore[arg-type]
        host.now += 8.0  # the optimizer step
        device.milliseconds += 8e3
        clock.stop()
    assert gpu.read() == []  # the device is still busy
    device.catch_up()
    for times in (*cpu.read(), *gpu.read()):
        assert times.kinds == {ATTENTION: pytest.approx((2.5, 0.0)), MLP: pytest.approx((9.0, 0.375))}
        assert times.migration_seconds == pytest.approx(4.0)
        assert times.communication_seconds == pytest.approx(2 + 4 + 2 + 6 + 2)
        assert times.work_seconds == pytest.approx(5 + 2.5 + 9.375 + 7 + 8)


OVERLAPPED: list[tuple[str, float]] = [
    ("block", 1.0),
    ("matmul", 3.0),  # dX
    ("overlapped", 5.0),  # dW, beside the all-reduce of dX
    ("other", 0.5),  # the bias
    ("communication", 2.0),
    ("other", 0.25),
    ("matmul", 4.0),  # dX of another layer of the kind, whose dW is not wanted
    ("communication", 2.0),
]


def test_a_product_beside_a_collective_counts_as_measured_on_a_cpu(host: HostSeconds) -> None:
    clock = CpuClock()
    clock.start()
    for part, seconds in OVERLAPPED:
        host.now += seconds
        clock.mark(part, MLP)  # type: ignore[arg-type]
    clock.stop()
    (times,) = clock.read()
    assert times.kinds[MLP].movable == 1 + 3 + 5 + 4
    assert times.matmul_seconds == 3 + 5 + 4


INNER: list[tuple[str, float, bool]] = [
    ("communication", 2.0, False),
    ("other", 0.25, False),
    ("matmul", 1.0, True),  # two column-parallel layers
    ("other", 0.0, True),
    ("matmul", 1.5, True),
    ("block", 0.5, True),
    ("matmul", 2.0, False),  # the row-parallel layer
    ("communication", 2.0, False),
    ("other", 0.25, False),  # the backward pass
    ("matmul", 4.0, True),
    ("block", 0.5, False),
    ("matmul", 3.0, False),  # dX
    ("overlapped", 5.0, True),
    ("other", 0.5, True),  # the bias
    ("communication", 1.0, False),
    ("block", 0.0, True),
    ("matmul", 1.0, False),
    ("overlapped", 1.0, True),
    ("communication", 1.0, False),
    ("matmul", 7.0, True),  # of a block that ends without another product
]
"""The last part is followed by other work of 1 ms."""


def iterate(clock: CudaClock, device: FakeDevice, parts: list[tuple[str, float, bool]] = INNER) -> None:
    clock.start()
    for part, milliseconds, inner in parts:
        device.milliseconds += milliseconds
        clock.mark(part, MLP, inner)  # type: ignore[arg-type]
    device.milliseconds += 1.0
    clock.stop()


def test_inner_parts_take_events_only_in_iterations_with_segments(device: FakeDevice) -> None:
    clock = CudaClock()
    times, events = [], []
    for clock.keep_segments in (True, False):
        before = device.recorded
        iterate(clock, device)
        events.append(device.recorded - before)
        device.catch_up()
        times += clock.read()
    detailed, merged = times
    assert events == [len(INNER) + 2, sum(not inner for _, _, inner in INNER) + 2]
    assert detailed.kinds[MLP].movable == pytest.approx((5 + 4.5 + 3 + 3 + 1 + 1 + 7) * 1e-3)
    # The bias, and the end of the last block, are the only work whose time is not known without their events.
    assert detailed.kinds[MLP].fixed == pytest.approx(1.0e-3)
    assert merged.kinds[MLP].fixed == pytest.approx(0.5e-3)
    assert merged.kinds[MLP].movable == pytest.approx(detailed.kinds[MLP].movable + 1e-3)
    # A product beside a collective is taken to be as long as the one before: 3 instead of 5 ms.
    assert merged.communication_seconds == pytest.approx(detailed.communication_seconds + 2.5e-3)
    assert merged.work_seconds + 2.5e-3 == pytest.approx(detailed.work_seconds)
    # The parts of a block are told apart as they were in the last iteration with segments.
    share = detailed.block_seconds / (detailed.block_seconds + detailed.matmul_seconds)
    assert merged.block_seconds == pytest.approx(share * (merged.block_seconds + merged.matmul_seconds))
    assert merged.segments == ()


def test_events_are_read_in_slices_while_there_is_time(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "READ_AT_ONCE", 10)
    parts = [("matmul", 1.0, False)] * 24
    clock = CudaClock()
    iterate(clock, device, parts)
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
        iterate(clock, device, parts)
    device.catch_up()
    assert len(clock.read()) == 1
    for _ in range(3):
        iterate(clock, device, parts)
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


def test_a_gpu_always_waits_for_a_host_that_waits_in_collectives(device: FakeDevice) -> None:
    clock = CudaClock(host_waits=True)
    clock.start()
    for _ in range(24):
        device.catch_up()
        clock.mark("communication", MLP)
    clock.stop()
    device.catch_up()
    assert [times.starved for times in clock.read()] == [0.0]
    assert device.queried == 1  # whether the iteration has ended


def test_few_marks_ask_whether_the_gpu_waits(device: FakeDevice) -> None:
    iterate(CudaClock(), device, [("matmul", 1.0, False)] * 24)
    assert device.queried == 24 // clocks.STARVED_EVERY
