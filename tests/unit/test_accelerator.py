"""Colossal-AI on a CPU: its accelerator, warnings in the import, fused optimizers with groups that train nothing."""

import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from colossalai.accelerator import CpuAccelerator, CudaAccelerator, get_accelerator, set_accelerator
from colossalai.kernel import kernel_loader
from colossalai.nn.optimizer import FusedAdam, FusedSGD
from torch import Tensor, nn

import colossal_hetero.colossalai_support.accelerator
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


def test_memory_is_the_resident_set_in_bytes(accelerator: HeteroCpuAccelerator) -> None:
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    block = torch.ones(MEGABYTES_64, dtype=torch.uint8)
    grown = accelerator.memory_allocated() - before
    assert 0.9 * MEGABYTES_64 < grown < 3 * MEGABYTES_64
    del block
    assert accelerator.max_memory_allocated() - before > 0.9 * MEGABYTES_64


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


def descend(chunk_size: int, buffer: Tensor, lists: list[list[Tensor]], *options: Any) -> None:
    if not lists[0]:
        raise RuntimeError("tensor_lists[0].size() is not > 0")
    for gradient, parameter in zip(*lists[:2], strict=True):
        parameter.detach().sub_(gradient)


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_groups_without_gradients_stay_as_they_are(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(multi_tensor_adam=descend, multi_tensor_sgd=descend)
    monkeypatch.setattr(kernel_loader, "FusedOptimizerLoader", lambda: SimpleNamespace(load=lambda: kernels))
    frozen, trained = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = kind([dict(params=[frozen]), dict(params=[trained])], lr=1.0)
    optimizer.param_groups.append(dict(optimizer.param_groups[0], params=[]))
    trained.grad = torch.ones(3)
    optimizer.step()
    assert frozen.tolist() == [1.0] * 3 and trained.tolist() == [0.0] * 3
