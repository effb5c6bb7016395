"""Lack of memory is recognized, and foreseen from the peak of earlier iterations."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistBackendError

from colossal_hetero.layers.transport import check_room, is_out_of_memory

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        DistBackendError(
            "NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc 6291456 bytes: out of memory"
        ),
        DistBackendError("ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'"),
    ],
)
def test_recognized(error: RuntimeError) -> None:
    assert is_out_of_memory(error)


def test_other_errors() -> None:
    assert not is_out_of_memory(DistBackendError("NCCL error: remote process exited or there was a network error"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 100 bytes for this process, of which 60 were in use at most, 40 of them for activations."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 1000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("more_bytes", "more_work"), [(40, 0.0), (20, 0.5), (0, 1.0)])
def test_an_iteration_that_fits(more_bytes: int, more_work: float) -> None:
    check_room(GPU, more_bytes, more_work)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("more_bytes", "more_work"), [(41, 0.0), (21, 0.5), (1, 1.0)])
def test_an_iteration_that_would_not_fit(more_bytes: int, more_work: float) -> None:
    with pytest.raises(RuntimeError, match="an iteration would need 101 bytes, the GPU has 100") as error:
        check_room(GPU, more_bytes, more_work)
    assert is_out_of_memory(error.value)


def test_a_cpu_is_not_asked() -> None:
    check_room(torch.device("cpu"), 2**60, 1.0)
