"""Profiling on a simulated device; memory limits, and errors that mean out of memory."""

import errno
import itertools
import math
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch import nn

from colossal_hetero.colossalai_support.accelerator import is_out_of_memory
from colossal_hetero.planner.batches.batch_profile import DeviceProfile
from colossal_hetero.profiling import device_profiler, memory
from colossal_hetero.profiling.device_profiler import RESERVE, STEADY_SECONDS, largest_batch, profile_device
from colossal_hetero.profiling.rank_profiler import is_too_few_samples, smallest_batch

CPU = torch.device("cpu")


def bound(largest: int) -> float:
    return 2 * math.log2(largest) + 4 if largest else 1


def check(true: int, cap: int, estimate: Callable[[], int | None] | None = None) -> int:
    """Search where ``true`` samples fit; returns the number of trials."""
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= true

    found = largest_batch(fits, cap, estimate)
    assert found == min(true, cap), (true, cap, tried)
    assert len(tried) <= bound(found), (true, cap, tried)
    assert len(set(tried)) == len(tried) and all(1 <= batch <= cap for batch in tried)
    failed = [batch for batch in tried if batch > true]
    assert min(failed, default=None) == (None if true >= cap else found + 1)
    return len(tried)


def test_the_largest_batch_is_found_whatever_the_estimate_is() -> None:
    for true in range(0, 70):
        for cap in (*range(1, 70), 300):
            check(true, cap)
    expected = lambda factor, offset, true: int(factor * true) + offset  # noqa: E731
    for factor, offset in itertools.product([0.0, 0.3, 0.9, 1.0, 1.1, 3.0, 1e6], [-3, -1, 0, 1, 5]):
        for true in range(301):
            trials = check(true, 400, partial(expected, factor, offset, true))
            assert (factor, offset) != (1.0, 0) or not true or trials <= math.floor(math.log2(true)) + 4
    generator = random.Random(0)
    for true in range(301):  # estimates that change or are missing
        check(true, 350, lambda: generator.choice([None, generator.randint(-5, 500)]))
    with pytest.raises(ValueError, match="at least 1"):
        largest_batch(lambda batch: True, 0)


def test_an_estimate_that_must_not_be_exceeded_is_not_exceeded() -> None:
    for room in range(0, 120):
        for true in (0, 1, 50, 1000):
            tried: list[int] = []
            found = largest_batch(
                lambda batch, true=true, tried=tried: tried.append(batch) or batch <= true,
                100,
                lambda room=room: room,
                may_exceed_estimate=False,
            )
            assert all(batch <= max(room, 1) for batch in tried)
            assert found == min(max(room, 1), true, 100)
            assert len(tried) <= bound(found) + (found == 0)

    # The search ends if the estimate rises slowly.
    tried = [0]
    rising = lambda: max(tried) + 1  # noqa: E731
    found = largest_batch(lambda batch: tried.append(batch) or True, 10**6, rising, may_exceed_estimate=False)
    assert len(tried) <= 5 and found == max(tried)


@pytest.mark.parametrize(("per_sample", "expected"), [(1, 2), (2, 4), (3, 8)])
def test_more_samples_are_tried_until_a_batch_normalization_runs(per_sample: int, expected: int) -> None:
    aborted: list[None] = []

    def normalized(samples: int) -> torch.Tensor:
        return nn.BatchNorm1d(3)(torch.randn(max(samples // per_sample, 1), 3))

    assert smallest_batch(normalized, 64, lambda: aborted.append(None)) == expected
    assert len(aborted) == [1, 2, 3, 4, 8].index(expected)
    with pytest.raises(ValueError, match=r"micro-batches of at least 2 samples.*GroupNorm") as caught:
        smallest_batch(normalized, 1, lambda: None)
    assert is_too_few_samples(caught.value)


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_samples_that_are_compared_with_each_other_and_errors_of_one_sample(at_once: int) -> None:
    def run(samples: int) -> None:
        if samples % at_once:
            raise ValueError(f"cannot be divided by {at_once}, nor can {samples}")

    assert smallest_batch(run, 64, lambda: None) == at_once
    if at_once > 1:
        with pytest.raises(ValueError, match=r"nor can 1$"):
            smallest_batch(run, at_once - 1, lambda: None)
    with pytest.raises(MemoryError):
        smallest_batch(Mock(side_effect=MemoryError), 64, pytest.fail)


class Device:
    """A simulated device: 1,000 bytes of state, 10 bytes per sample, and the time of the n-th pass of a batch."""

    def __init__(self, limit: int, seconds: Callable[[int, int], float], is_hard: bool = True) -> None:
        self.limit, self.is_hard = limit, is_hard
        self.held, self.peak = 0, 0
        self.runs: list[int] = []
        self._seconds = seconds

    def run(self, batch: int) -> float:
        self.runs.append(batch)
        self.peak = 1000 + self.held + 10 * batch
        if self.peak > self.limit:
            raise MemoryError
        return self._seconds(batch, self.runs.count(batch))

    @contextmanager
    def reserved(self, size_bytes: int, device: torch.device) -> Iterator[None]:
        self.held += size_bytes
        yield
        self.held -= size_bytes


LARGE = 10**6


def profiled(device: Device, cap: int, **options: Any) -> DeviceProfile:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "memory_limit": lambda _: memory.MemoryLimit(device.limit, device.is_hard, "a test"),
            "used_bytes": lambda _: 1000 + device.held,
            "peak_bytes": lambda _: device.peak,
            "reset_peak": lambda _: None,
            "reserved_memory": device.reserved,
            "recover": lambda *_: None,
        }.items():
            patch.setattr(device_profiler, name, value)
        return profile_device(device.run, cap, state_bytes_to_come=0, device=CPU, **options)


def line(batch: int, run: int) -> float:
    return 0.05 + 0.01 * batch


def test_a_share_of_the_memory_is_left_free_except_for_the_smallest_batch() -> None:
    for is_hard in (True, False):
        device = Device(3000, line, is_hard)
        found = profiled(device, 1000)
        assert found.max_batch == int(200 * (1 - RESERVE)) and found.memory_bound
        assert found.memory_bytes == 3000 - int(2000 * RESERVE)
        assert (found.memory_bytes - found.state_bytes) // found.sample_bytes == found.max_batch
        assert is_hard or max(device.runs) == found.max_batch
    found = profiled(Device(1010, line), 8)
    assert found.max_batch == 1 and found.memory_bound and found.points
    assert profiled(Device(1009, line), 8).max_batch == 0
    found = profiled(Device(1040, line), 8, smallest=4)
    assert (found.max_batch, found.min_batch) == (4, 4)


def test_only_sizes_that_no_straight_line_predicts_are_timed() -> None:
    device = Device(LARGE, line)
    found = profiled(device, 48)
    assert (found.max_batch, found.memory_bound) == (48, False)
    assert [point.batch for point in found.points] == [1, 8, 48]
    runs = Counter(device.runs)
    assert all(runs[batch] == 1 for batch in (2, 4, 16, 32)) and runs[48] == 3
    for batch in range(1, 49):
        assert found.curve(48).seconds[batch] == pytest.approx(line(batch, 0))

    # Sizes at a bend are timed.
    found = profiled(Device(LARGE, lambda batch, run: max(0.1, 0.01 * batch)), 64)
    assert {1, 8, 16, 64} <= {point.batch for point in found.points}
    for batch in (1, 8, 16, 32, 64):
        assert found.curve(64).seconds[batch] == pytest.approx(max(0.1, 0.01 * batch), rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda batch, run: batch * (10.0 if run == 2 else 1.0), [1.0, 2.0, 4.0]),  # a single slow run is ignored
        # Half of the passes wait for the next period of a CPU quota.
        (lambda batch, run: batch * (0.01 if run % 2 else 0.03), [0.02, 0.04, 0.08]),
        (lambda batch, run: 9.0 if batch == 2 and run <= 3 else float(batch), [1.0, 2.0, 4.0]),  # measured again
        (lambda batch, run: {1: 1.0, 2: 3.0, 4: 2.0}[batch], [1.0, 2.0, 2.0]),  # a decrease that remains
    ],
)
def test_typical_times(seconds: Callable[[int, int], float], expected: list[float]) -> None:
    device = Device(LARGE, seconds)
    points = profiled(device, 4).points
    assert [point.batch for point in points] == [1, 2, 4]
    assert [point.seconds for point in points] == pytest.approx(expected, rel=0.15 if expected[0] < 1 else 1e-9)
    if expected[0] < 1:
        assert device.runs.count(1) > 20 > 10 > device.runs.count(4)

    # Short passes are repeated until a pause would have been seen. The first pass, with the gradients, is not timed.
    device = Device(LARGE, lambda batch, run: 0.02)
    profiled(device, 1)
    assert (len(device.runs) - 1) * 0.02 == pytest.approx(STEADY_SECONDS, abs=0.021)


def test_a_size_that_fits_only_once_is_rejected() -> None:
    def seconds(batch: int, run: int) -> float:
        if batch > 7 or (batch == 7 and run > 1):
            raise MemoryError
        return float(batch)

    device, aborted = Device(LARGE, seconds), list[int]()
    found = profiled(device, 50, abort=lambda: aborted.append(1))
    assert found.max_batch == 6 and found.points[-1].batch == 6 and found.memory_bound
    assert len(aborted) == device.runs.count(7) - 1 + sum(batch > 7 for batch in device.runs)


@contextmanager
def address_space(room: int) -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_errors_that_mean_out_of_memory() -> None:
    for error in (
        MemoryError(),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error: unhandled cuda error: Cuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ):
        assert is_out_of_memory(error)
        wrapped = ValueError("the step failed")
        wrapped.__cause__ = error
        assert is_out_of_memory(wrapped)
    for other in (None, ValueError("out of memory is a phrase"), RuntimeError("shapes do not match"), OSError(2, "no")):
        assert not is_out_of_memory(other)


def test_a_process_recovers_from_real_errors_of_the_cpu_at_the_limit_of_the_address_space() -> None:
    def fails() -> None:
        held = torch.ones(64 << 18)  # 64 MiB
        torch.ones(len(held) * 8)

    with address_space(200 << 20):
        for _ in range(4):  # without recover(), memory of the first attempt would make the second one fail too early
            with pytest.raises(RuntimeError) as caught:
                fails()
            assert is_out_of_memory(caught.value)
            memory.recover(caught.value)
        with pytest.raises(MemoryError) as refused:
            bytearray(1 << 30)
        assert is_out_of_memory(refused.value)
    with address_space(200 << 20) as limit:
        found = memory.memory_limit(CPU)
        assert found.bytes == limit and found.is_hard
        before = memory.used_bytes(CPU)
        with memory.reserved_memory(100 << 20, CPU):
            assert memory.used_bytes(CPU) - before >= 100 << 20
        with pytest.raises(RuntimeError) as caught, memory.reserved_memory(300 << 20, CPU):
            pass
        assert is_out_of_memory(caught.value)
    before = memory.used_bytes(CPU)
    with memory.reserved_memory(64 << 20, CPU):  # is resident
        assert memory.used_bytes(CPU) - before > 60 << 20
    assert memory.used_bytes(CPU) - before < 10 << 20  # and released


def test_without_a_hard_limit_ranks_share_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_left_in_control_group", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = memory.memory_limit(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = memory.memory_limit(CPU)
    assert not alone.is_hard and not shared.is_hard
    used = memory.used_bytes(CPU)
    assert used < shared.bytes < alone.bytes < used + psutil.virtual_memory().total
    assert (alone.bytes - used) / (shared.bytes - used) == pytest.approx(4, rel=0.1)
    monkeypatch.setattr(memory, "_left_in_control_group", lambda: 4 << 20)
    assert memory.memory_limit(CPU).bytes < used + (4 << 20) and "control group" in memory.memory_limit(CPU).source


def test_what_is_in_use_beside_the_allocator_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 bytes, 30 are free and 40 are the allocator's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40)
    assert memory.outside_bytes(torch.device("cuda", 0)) == 10
    assert memory.outside_bytes(CPU) is None


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    groups.write_text("0::/outer/inner\n")
    for folder, limit in ((inner, "max"), (inner.parent, "1000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 200\n")
    assert memory._left_in_control_group(tmp_path, groups) == 500
    (inner / "memory.max").write_text("900\n")
    assert memory._left_in_control_group(tmp_path, groups) == 400
    old = tmp_path / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("650\n")
    (old / "memory.usage_in_bytes").write_text("600\n")
    (old / "memory.stat").write_text("total_inactive_file 30\n")
    groups.write_text("5:cpu:/job\n4:memory,hugetlb:/job\n0::/\n")
    assert memory._left_in_control_group(tmp_path, groups) == 80
    assert memory._left_in_control_group(tmp_path, tmp_path / "missing") is None
