"""Colossal-AI's accelerator on a CPU, and warnings during the import."""

from __future__ import annotations

import sys
import time
import warnings

import pytest
import torch
from colossalai.accelerator import CpuAccelerator, CudaAccelerator, get_accelerator, set_accelerator

import colossal_hetero.colossalai_support.accelerator as accelerator_module
import colossal_hetero.colossalai_support.cpu
from colossal_hetero.colossalai_support.accelerator import HeteroCpuAccelerator

MEGABYTES_64 = 64 << 20

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU accelerator is for hosts without a GPU")


@pytest.fixture
def accelerator() -> HeteroCpuAccelerator:
    accelerator = get_accelerator()
    assert isinstance(accelerator, HeteroCpuAccelerator)
    return accelerator


def test_the_random_state_is_that_of_torch(accelerator: HeteroCpuAccelerator) -> None:
    accelerator.manual_seed(3)
    state = accelerator.get_rng_state("cuda")  # Colossal-AI names a device that a CPU does not have
    expected = torch.rand(5)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(5), expected)
    accelerator.manual_seed(1024)


def test_memory_is_the_resident_set_in_bytes(accelerator: HeteroCpuAccelerator) -> None:
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    block = torch.ones(MEGABYTES_64, dtype=torch.uint8)
    grown = accelerator.memory_allocated() - before
    assert 0.9 * MEGABYTES_64 < grown < 3 * MEGABYTES_64
    del block
    assert accelerator.max_memory_allocated() - before > 0.9 * MEGABYTES_64


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is reset through Linux's /proc")
def test_peak_memory_resets(accelerator: HeteroCpuAccelerator) -> None:
    torch.ones(4 * MEGABYTES_64, dtype=torch.uint8)
    peak = accelerator.max_memory_allocated()
    accelerator.reset_peak_memory_stats()
    if accelerator.max_memory_allocated() == peak:
        pytest.skip("this kernel does not let a process reset its peak")
    assert accelerator.max_memory_allocated() < peak - 2 * MEGABYTES_64


def test_memory_without_proc(accelerator: HeteroCpuAccelerator, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(accelerator_module, "_PROCESS_STATUS", tmp_path / "none")
    monkeypatch.setattr(accelerator_module, "_PROCESS_CLEAR_REFS", tmp_path / "none" / "either")
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() > 0.5 * accelerator.memory_allocated()


def test_events_are_milliseconds_apart(accelerator: HeteroCpuAccelerator) -> None:
    begin, end = accelerator.Event(enable_timing=True), accelerator.Event(enable_timing=True)
    begin.record()
    time.sleep(0.05)
    end.record()
    assert 50 <= begin.elapsed_time(end) < 5000


def test_a_users_warning_passes_through_a_quiet_import() -> None:
    with pytest.warns(UserWarning, match="of my own"), accelerator_module.quiet_import():
        warnings.warn("a warning of my own", stacklevel=1)


def test_only_the_stock_accelerator_of_a_cpu_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a script that has imported Colossal-AI before."""
    ours, patched = get_accelerator(), list[object]()
    monkeypatch.setattr(colossal_hetero.colossalai_support.cpu, "patch_colossalai", lambda *_: patched.append(1))
    set_accelerator(CpuAccelerator())
    accelerator_module._set_up_cpu()
    assert type(get_accelerator()) is HeteroCpuAccelerator and patched == [1]
    set_accelerator(ours)
    monkeypatch.setattr(accelerator_module, "get_accelerator", CudaAccelerator)
    monkeypatch.setattr(accelerator_module, "set_accelerator", pytest.fail)
    accelerator_module._set_up_cpu()
    assert patched == [1]
