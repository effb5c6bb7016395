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


@pytest.fixture
def calls() -> Any:
    """Calls of what stands in for apex's kernel."""
    made: list[Any] = []

    def add(x: Tensor, dy: Tensor, grad: Tensor) -> None:
        made.append(grad.add_(dy.t().matmul(x)))

    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    with (
        patch.object(_operation, "_grad_accum_fusion_available", True),
        patch.object(_operation, "fused_weight_gradient_mlp_cuda", kernels, create=True),
    ):
        yield made


def passes(product: Any, shape: tuple[int, int] = (4, 6)) -> Tensor:
    """The weight's gradient after three passes without clearing it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=generator, requires_grad=True)
    for _ in range(3):
        product(torch.randn(5, 6, generator=generator), weight).square().sum().backward()
    assert weight.grad is not None
    return weight.grad


def ours(layout: Any = LINEAR_LAYOUT, **options: Any) -> Any:
    return lambda x, weight: parallel_product(x, weight, None, ProductContext(layout, **options))


def test_later_passes_add_to_the_gradient_in_the_kernel_as_colossalais_layers_do(calls: list[Any]) -> None:
    mine = passes(ours())
    assert len(calls) == 2  # in the first pass there is no gradient to add to
    theirs = passes(lambda x, weight: _operation.linear_with_async_comm(x, weight, None, None, False))
    assert torch.equal(mine, theirs) and len(calls) == 4


def test_no_kernel_where_it_does_not_fit(calls: list[Any]) -> None:
    kept, slowed = torch.tensor([0, 2, 5]), list[Tensor]()
    pruned = passes(ours(lineage=Lineage(kept, "zero", {})))
    assert pruned[:, [1, 3, 4]].abs().max() == 0 and pruned[:, kept].abs().min() > 0
    passes(ours(slow_down=lambda product: (slowed.append(product()), slowed[-1])[1]))
    assert len(slowed) == 9
    conv = passes(ours(CONV1D_LAYOUT), (6, 4))
    assert torch.allclose(conv, passes(lambda x, weight: x @ weight, (6, 4)))
    assert not calls
