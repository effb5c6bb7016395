"""Products of a rank that prunes, sends or receives units, and gradients that are added in place."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from colossalai.shardformer.layer import _operation
from torch import Tensor

from colossal_hetero.layers.product import ProductContext, parallel_product
from colossal_hetero.layers.unit_layout import CONV1D_LAYOUT, LINEAR_LAYOUT, UnitPlace, UnitShare, WeightLayout
from colossal_hetero.layers.workload import Lineage, matrix_view

UNITS, SIZE, OTHER = 5, 2, 3
ROWS, TAKEN = 7, (2, 1)

SHARES = {
    "receiver": (UNITS, None, TAKEN),
    "sender": (3, None, ()),
    "pruned": (UNITS, [1, 3], ()),
    "pruned, and receiver": (UNITS, [0, 4], TAKEN),
    "pruned, and sender": (3, [2], ()),
}
"""How many own units remain, which of them are kept, and the sizes of the ranges of taken units."""


class Case:
    """A layer with random weights, the share of one rank of its units, and the same units in a tensor of their own."""

    def __init__(self, layout: WeightLayout, is_column_parallel: bool, parts: int, share: str) -> None:
        self.layout = layout
        self.generator = torch.Generator().manual_seed(0)
        self.remaining, kept, taken = SHARES[share]
        dim = 1 - layout.columns if is_column_parallel else layout.columns
        shape = [OTHER, OTHER]
        shape[dim] = parts * UNITS * SIZE
        self.places = [UnitPlace(dim, parts, UNITS, SIZE)]
        self.parameters = [self.random(*shape)]
        if is_column_parallel:
            self.places.append(UnitPlace(0, parts, UNITS, SIZE))
            self.parameters.append(self.random(parts * UNITS * SIZE))
        self.kept = list(range(self.remaining)) if kept is None else kept
        # As in a message: contiguous, and folded where it arrives.
        self.ranges = [
            [
                self.random(*[count if d == place.unit_dim else n for d, n in enumerate(place.view(parameter).shape)])
                for place, parameter in zip(self.places, self.parameters, strict=True)
            ]
            for count in taken
        ]
        self.messages: list[Tensor] = []
        self.returned: list[list[Tensor]] = []
        self.share = UnitShare(self.places, self.remaining, self.return_gradients)
        self.share.begin(self.parameters, None if kept is None else torch.tensor(kept), self.ranges)
        self.wide = [
            place.fold(
                torch.cat(
                    [place.view(parameter)[(slice(None),) * place.unit_dim + (self.kept,)], *views], place.unit_dim
                )
            )
            for place, parameter, *views in zip(self.places, self.parameters, *self.ranges, strict=True)
        ]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def return_gradients(self, messages: list[Tensor]) -> list[list[Tensor]]:
        self.messages = messages
        return self.returned


CASES = [
    pytest.param(layout, is_column_parallel, parts, share, id=f"{name}, {share}")
    for name, layout, is_column_parallel, parts in (
        ("column-parallel", LINEAR_LAYOUT, True, 1),
        ("fused", LINEAR_LAYOUT, True, 3),
        ("row-parallel", LINEAR_LAYOUT, False, 1),
        ("GPT-2 fused", CONV1D_LAYOUT, True, 3),
        ("GPT-2 row-parallel", CONV1D_LAYOUT, False, 1),
    )
    for share in SHARES
]


@pytest.mark.parametrize(("layout", "is_column_parallel", "parts", "share"), CASES)
def test_products_are_those_of_one_weight_with_all_units(layout, is_column_parallel, parts, share):
    case = Case(layout, is_column_parallel, parts, share)
    wide = [tensor.clone().requires_grad_() for tensor in case.wide]
    matrix = layout.as_matrix(wide[0])
    x = case.random(2, ROWS, matrix.shape[1]).requires_grad_()
    bias = wide[1] if is_column_parallel else None
    expected = torch.nn.functional.linear(x, matrix, bias)
    dy = case.random(*expected.shape)
    expected.backward(dy)
    with torch.no_grad():
        weight, *biases = case.parameters
        output = case.share.output(layout, x, weight, biases[0] if biases else None)
        torch.testing.assert_close(output, expected)
        assert not output._is_view()  # torch forbids to change a view in place that a function of one's own returns
        # Another forward pass comes before the backward pass, with other units.
        held = case.share.weights
        kept = (
            None
            if len(case.kept) == case.remaining
            else torch.tensor(sorted((each + 1) % case.remaining for each in case.kept))
        )
        case.share.begin(case.parameters, kept, [[view + 1 for view in views] for views in case.ranges])
        share = case.share.with_weights(held)
        torch.testing.assert_close(share.input_gradient(layout, dy, weight), x.grad)
        dy, rows = matrix_view(dy), matrix_view(x)
        given = UNITS - case.remaining
        # The gradients of given units return for one half of them after the other.
        case.returned = [
            [
                case.random(*place.view(parameter).narrow(place.unit_dim, 0, count).shape)
                for place, parameter in zip(case.places, case.parameters, strict=True)
            ]
            for count in (given // 2, given - given // 2)
        ]
        # A rank that is slowed on purpose computes each product several times.
        for _ in range(2):
            dw = share.weight_gradient(layout, dy, rows)
        whole = share.gradients(dw, dy.sum(0) if is_column_parallel else None)
        for number, (place, parameter, wide_one) in enumerate(zip(case.places, case.parameters, wide, strict=True)):
            actual = whole[number]
            assert actual is not None and wide_one.grad is not None
            assert actual.shape == parameter.shape and actual.is_contiguous()
            computed = place.view(wide_one.grad).movedim(place.unit_dim, 0)
            units = torch.zeros_like(place.view(parameter).movedim(place.unit_dim, 0))
            units[case.kept] = computed[: len(case.kept)]
            ones = [views[number].movedim(place.unit_dim, 0) for views in case.returned]
            units[case.remaining :] = torch.cat(ones)
            torch.testing.assert_close(place.view(actual).movedim(place.unit_dim, 0), units)
        taken = [place.view(one.grad) for place, one in zip(case.places, wide, strict=True)]
        start = len(case.kept)
        assert len(case.messages) == len(case.ranges)
        for message, views in zip(case.messages, case.ranges, strict=True):
            count = views[0].shape[case.places[0].unit_dim]
            parts_of = [
                view.narrow(place.unit_dim, start, count).reshape(-1)
                for place, view in zip(case.places, taken, strict=True)
            ]
            torch.testing.assert_close(message, torch.cat(parts_of))
            start += count


def test_neither_weights_nor_gradients_are_copied() -> None:
    case = Case(LINEAR_LAYOUT, True, 3, "receiver")
    # The rank's own weights are read where they are: a change needs no preparation.
    x = case.random(ROWS, OTHER)
    before = case.share.output(LINEAR_LAYOUT, x, *case.parameters)
    case.parameters[0].zero_()
    case.parameters[1].zero_()
    after = case.share.output(LINEAR_LAYOUT, x, *case.parameters)
    width = UNITS * SIZE
    assert (before[:, :width] != 0).all() and (after[:, :width] == 0).all()
    assert torch.equal(before[:, width : width + 3 * SIZE], after[:, width : width + 3 * SIZE])
    # The gradient of the own weight is a tensor of its own, not a part of a wider one.
    dw = case.share.weight_gradient(LINEAR_LAYOUT, before, x)
    assert dw.untyped_storage().nbytes() == case.parameters[0].untyped_storage().nbytes()


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
