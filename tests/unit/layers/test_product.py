"""The product of a parallel linear layer: gradients that are added in place, as Colossal-AI's layers do with apex."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from colossalai.shardformer.layer import _operation
from torch import Tensor

from colossal_hetero.layers.product import ProductContext, parallel_product
from colossal_hetero.layers.unit_layout import CONV1D_LAYOUT, LINEAR_LAYOUT
from colossal_hetero.layers.workload import Lineage


class Kernels:
    """Stands in for apex's module, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def wgrad_gemm_accum_fp32(self, x: Tensor, dy: Tensor, grad: Tensor) -> None:
        self.calls += 1
        grad.add_(dy.t().matmul(x))


@pytest.fixture
def kernels() -> Any:
    kernels = Kernels()
    with (
        patch.object(_operation, "_grad_accum_fusion_available", True),
        patch.object(_operation, "fused_weight_gradient_mlp_cuda", kernels, create=True),
    ):
        yield kernels


def passes(product: Any, shape: tuple[int, int] = (4, 6), count: int = 3) -> Tensor:
    """The weight's gradient after some passes without clearing it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=generator, requires_grad=True)
    for _ in range(count):
        product(torch.randn(5, 6, generator=generator), weight).square().sum().backward()
    assert weight.grad is not None
    return weight.grad


def ours(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return parallel_product(x, weight, None, ProductContext(LINEAR_LAYOUT, **options))


def theirs(x: Tensor, weight: Tensor) -> Tensor:
    return _operation.linear_with_async_comm(x, weight, None, None, False)


def test_later_passes_add_to_the_gradient_in_the_kernel_as_colossalais_layers_do(kernels: Kernels) -> None:
    mine = passes(ours)
    assert kernels.calls == 2  # in the first pass there is no gradient to add to
    assert torch.equal(mine, passes(theirs))
    assert kernels.calls == 4


def test_no_kernel_where_it_does_not_fit(kernels: Kernels) -> None:
    kept = torch.tensor([0, 2, 5])
    lineage = Lineage(kept, "zero", {})
    slow = SimpleNamespace(calls=0)

    def slow_down(product: Any) -> Tensor:
        slow.calls += 1
        return product()

    pruned = passes(lambda x, weight: ours(x, weight, lineage=lineage))
    assert pruned[:, [1, 3, 4]].abs().max() == 0 and pruned[:, kept].abs().min() > 0
    passes(lambda x, weight: ours(x, weight, slow_down=slow_down))
    assert slow.calls == 9
    conv = passes(lambda x, weight: parallel_product(x, weight, None, ProductContext(CONV1D_LAYOUT)), (6, 4))
    assert kernels.calls == 0
    assert torch.allclose(conv, passes(lambda x, weight: x @ weight, (6, 4)))
