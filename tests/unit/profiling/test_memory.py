"""Memory limits, and errors that mean out of memory."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from colossal_hetero.profiling import memory
from colossal_hetero.profiling.memory import (
    is_out_of_memory,
    memory_limit,
    outside_bytes,
    recover,
    reserved_memory,
    used_bytes,
)

CPU = torch.device("cpu")


@contextmanager
def address_space(room: int) -> Iterator[int]:
    """Limit the address space to ``room`` bytes above the mapped memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error: unhandled cuda error: Cuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_errors_that_mean_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error", [None, ValueError("out of memory is a phrase"), RuntimeError("shapes do not match"), OSError(2, "no file")]
)
def test_other_errors_do_not_mean_out_of_memory(error: Exception | None) -> None:
    assert not is_out_of_memory(error)


def test_a_process_recovers_from_real_errors_of_the_cpu() -> None:
    def fails() -> None:
        held = torch.ones(64 << 18)  # 64 MiB
        torch.ones(len(held) * 8)

    with address_space(200 << 20):
        for _ in range(10):  # without recover(), memory of the first attempt would make the second one fail too early
            with pytest.raises(RuntimeError) as caught:
                fails()
            assert is_out_of_memory(caught.value)
            recover(caught.value)
        with pytest.raises(MemoryError) as refused:
            bytearray(1 << 30)
        assert is_out_of_memory(refused.value)


def test_an_address_space_limit_is_hard() -> None:
    with address_space(200 << 20) as limit:
        found = memory_limit(CPU)
        assert found.bytes == limit and found.is_hard
        before = used_bytes(CPU)
        with reserved_memory(100 << 20, CPU):
            assert used_bytes(CPU) - before >= 100 << 20
        with pytest.raises(RuntimeError) as caught, reserved_memory(300 << 20, CPU):
            pass
        assert is_out_of_memory(caught.value)


def test_reserved_memory_is_resident_and_released() -> None:
    before = used_bytes(CPU)
    with reserved_memory(64 << 20, CPU):
        assert used_bytes(CPU) - before > 60 << 20
    assert used_bytes(CPU) - before < 10 << 20


def test_without_a_hard_limit_ranks_share_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_left_in_control_group", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = memory_limit(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = memory_limit(CPU)
    assert not alone.is_hard and not shared.is_hard
    used = used_bytes(CPU)
    assert used < shared.bytes < alone.bytes < used + psutil.virtual_memory().total
    assert (alone.bytes - used) / (shared.bytes - used) == pytest.approx(4, rel=0.1)
    monkeypatch.setattr(memory, "_left_in_control_group", lambda: 4 << 20)
    assert memory_limit(CPU).bytes < used + (4 << 20) and "control group" in memory_limit(CPU).source


def test_what_is_in_use_beside_the_allocator_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 bytes, 30 are free and 40 are the allocator's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40)
    assert outside_bytes(torch.device("cuda", 0)) == 10
    assert outside_bytes(CPU) is None


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
