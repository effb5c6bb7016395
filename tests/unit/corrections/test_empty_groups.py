"""Colossal-AI's fused optimizers with a group that trains nothing; kernels refuse empty lists, as those of CUDA do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from colossalai.kernel import kernel_loader
from colossalai.nn.optimizer import FusedAdam, FusedSGD
from torch import Tensor, nn

import colossal_hetero.colossalai_support.accelerator  # noqa: F401


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
