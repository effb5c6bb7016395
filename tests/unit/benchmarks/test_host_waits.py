"""On a GPU, waits are taken from the warnings of torch, whose mode is restored; here torch's calls are pretended."""

from __future__ import annotations

import warnings

import pytest
import torch

from benchmarks.gpu.training.host_waits import host_waits


def test_only_warnings_of_synchronizing_operations_count(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    show = warnings.showwarning
    with host_waits(torch.device("cuda")) as waits:
        for _ in range(2):  # also if the same line waits again
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)
    assert [wait.place.partition(":")[0] for wait in waits] == ["benchmarks/test_host_waits.py"] * 2
    assert modes == ["warn", 0]
    assert warnings.showwarning is show
