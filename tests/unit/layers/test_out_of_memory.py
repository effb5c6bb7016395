"""Lack of memory is recognized, and foreseen from the peak of earlier iterations."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistBackendError

from colossal_hetero.layers.transport import check_room, is_out_of_memory


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (
            DistBackendError("NCCL error: unhandled cuda error\nFailed to CUDA calloc 6291456 bytes: out of memory"),
            True,
        ),
        (DistBackendError("ncclUnhandledCudaError: Call to CUDA failed.\nCuda failure 2 'out of memory'"), True),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), False),
    ],
)
def test_lack_of_memory_is_told_from_other_errors(error: RuntimeError, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


@pytest.mark.parametrize(("more_bytes", "more_work"), [(40, 0.0), (20, 0.5), (0, 1.0)])
def test_an_iteration_that_would_not_fit(more_bytes: int, more_work: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 100 bytes for this process, of which 60 were in use at most, 40 of them for activations."""
    found = dict(mem_get_info=(30, 1000), memory_reserved=70, max_memory_allocated=60, memory_allocated=20)
    found |= dict(get_per_process_memory_fraction=1.0)  # which older versions of torch do not have
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value, raising=False)
    gpu = torch.device("cuda", 0)
    check_room(gpu, more_bytes, more_work)
    with pytest.raises(RuntimeError, match="an iteration would need 101 bytes, the GPU has 100") as error:
        check_room(gpu, more_bytes + 1, more_work)
    assert is_out_of_memory(error.value)
    check_room(torch.device("cpu"), 2**60, 1.0)  # is not asked
