"""Where the units of a block are in a weight, and the operands of a rank that prunes, sends or receives units."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from colossal_hetero.layers.unit_layout import UnitPlace, UnitShare

UNITS, SIZE, OTHER = 5, 2, 3

PLACES = {
    "rows": (UnitPlace(0, 1, UNITS, SIZE), (UNITS * SIZE, OTHER)),
    "fused rows": (UnitPlace(0, 3, UNITS, SIZE), (3 * UNITS * SIZE, OTHER)),
    "columns": (UnitPlace(1, 1, UNITS, SIZE), (OTHER, UNITS * SIZE)),
    "fused columns": (UnitPlace(1, 3, UNITS, SIZE), (OTHER, 3 * UNITS * SIZE)),
    "bias": (UnitPlace(0, 3, UNITS, SIZE), (3 * UNITS * SIZE,)),
}


def numbered(place: UnitPlace, shape: tuple[int, ...]) -> Tensor:
    """A tensor whose every element is the number of the unit that it belongs to."""
    owner = torch.arange(UNITS, dtype=torch.float32).repeat_interleave(place.size).repeat(place.parts)
    return owner.view([-1 if dim == place.dim else 1 for dim in range(len(shape))]).expand(shape).contiguous()


def return_nothing(gradients: list[Tensor]) -> None:
    """No rank returns gradients."""


@pytest.mark.parametrize("name", PLACES)
def test_a_view_counts_units_along_one_dimension_and_folds_back(name: str) -> None:
    place, shape = PLACES[name]
    tensor = numbered(place, shape)
    view = place.view(tensor)
    assert view.shape[place.unit_dim] == UNITS
    assert view.data_ptr() == tensor.data_ptr()
    for unit in range(UNITS):
        assert (view.select(place.unit_dim, unit) == unit).all()
        assert view.select(place.unit_dim, unit).numel() == place.numel(tensor)
    assert torch.equal(place.fold(view), tensor)
    # If the view has fewer or more units, the folded tensor has the width of these units.
    assert place.fold(view.narrow(place.unit_dim, 1, 2)).shape[place.dim] == 2 * place.parts * SIZE


@pytest.mark.parametrize("name", PLACES)
def test_operands_are_the_kept_units_and_then_the_received_ones(name: str) -> None:
    place, shape = PLACES[name]
    parameter = numbered(place, shape)
    view = place.view(parameter)
    theirs = view.narrow(place.unit_dim, 0, 2) + 100
    for own, kept, taken, expected in (
        (5, None, [], [0, 1, 2, 3, 4]),
        (3, None, [], [0, 1, 2]),
        (5, None, [theirs], [0, 1, 2, 3, 4, 100, 101]),
        (5, [1, 4], [theirs], [1, 4, 100, 101]),
        (3, [0, 2], [], [0, 2]),
    ):
        share = UnitShare([place], own, 2 * len(taken), return_nothing)
        share.reserve([parameter])
        share.begin([parameter], None if kept is None else torch.tensor(kept), taken)
        operand, bias = share.operands(parameter, None)
        assert bias is None
        assert operand.dim() == parameter.dim()
        units = place.view(operand).movedim(place.unit_dim, 0)
        assert len(units) == len(expected)
        for unit, number in zip(units, expected, strict=True):
            assert (unit == number).all(), (own, kept, expected)


def test_weight_and_bias_have_the_same_units() -> None:
    weight_place, bias_place = UnitPlace(0, 3, UNITS, SIZE), UnitPlace(0, 3, UNITS, SIZE)
    weight, bias = numbered(*PLACES["fused rows"]), numbered(*PLACES["bias"])
    share = UnitShare([weight_place, bias_place], 2, 0, return_nothing)
    share.begin([weight, bias], None, [])
    own_weight, own_bias = share.operands(weight, bias)
    assert own_bias is not None
    assert own_weight[:, 0].tolist() == own_bias.tolist() == [0, 0, 1, 1] * 3
    # A row-parallel layer adds its bias elsewhere.
    assert share.operands(weight, None)[1] is None


def test_every_iteration_uses_the_current_weights() -> None:
    place, shape = PLACES["columns"]
    parameter = numbered(place, shape)
    share = UnitShare([place], UNITS, 1, return_nothing)
    share.reserve([parameter])
    memory = set()
    for step, kept in enumerate((None, torch.tensor([0, 3]), None)):
        weight = parameter + 10 * step
        taken = place.view(weight).narrow(place.unit_dim, 0, 1) + 100
        share.begin([weight], kept, [taken])
        operand, _ = share.operands(weight, None)
        own = [0, 1, 2, 3, 4] if kept is None else kept.tolist()
        assert operand[0, ::SIZE].tolist() == [unit + 10 * step for unit in (*own, 100)]
        memory.add(operand.data_ptr())
    assert len(memory) == 1, "the reserved memory is not used"


@pytest.mark.parametrize("name", ["rows", "fused rows", "columns", "fused columns"])
def test_gradients_are_assigned_to_their_units(name: str) -> None:
    place, shape = PLACES[name]
    gradient = numbered(place, shape) + 1  # so that no unit has the gradient 0
    view = place.view(gradient)

    def units_of(tensor: Tensor) -> list[float]:
        assert tensor.shape == gradient.shape
        return [float(unit.unique().item()) for unit in place.view(tensor).movedim(place.unit_dim, 0)]

    for own, kept, taken, returns, expected in (
        # A receiver, a sender with returned gradients, a sender without them, a rank that prunes, and two combinations.
        (5, None, 2, False, [1, 2, 3, 4, 5]),
        (3, None, 0, True, [1, 2, 3, 51, 52]),
        (3, None, 0, False, [1, 2, 3, 0, 0]),
        (5, [1, 3], 0, False, [0, 1, 0, 2, 0]),
        (5, [0, 4], 2, False, [1, 0, 0, 0, 2]),
        (3, [2], 0, True, [0, 0, 1, 51, 52]),
    ):
        handed: list[list[Tensor]] = []

        def return_gradients(
            gradients: list[Tensor], handed: list = handed, own: int = own, returns: bool = returns
        ) -> list[Tensor] | None:
            handed.append(gradients)
            return [view.narrow(place.unit_dim, 0, UNITS - own) + 50] if returns else None

        share = UnitShare([place], own, taken, return_gradients)
        share.reserve([gradient])
        share.begin(
            [gradient],
            None if kept is None else torch.tensor(kept),
            [view.narrow(place.unit_dim, 0, taken)] if taken else [],
        )
        mine = own if kept is None else len(kept)
        own_part, their_part = view.narrow(place.unit_dim, 0, mine), view.narrow(place.unit_dim, 0, taken) + 70
        computed = torch.cat([own_part, their_part], place.unit_dim)
        whole, bias = share.gradients(place.fold(computed), None)
        assert bias is None
        assert units_of(whole) == expected, (own, kept, taken)
        ((theirs,),) = handed
        assert theirs.shape[place.unit_dim] == taken
        assert (theirs > 70).all()


def test_a_receiver_keeps_the_gradients_of_its_own_units() -> None:
    weight, bias = numbered(*PLACES["rows"]), torch.arange(UNITS * SIZE, dtype=torch.float32)
    places = [PLACES["rows"][0], UnitPlace(0, 1, UNITS, SIZE)]
    share = UnitShare(places, UNITS, 1, return_nothing)
    share.reserve([weight, bias])
    share.begin([weight, bias], None, [place.view(t)[:, :1] for place, t in zip(places, (weight, bias), strict=True)])
    wider = [torch.cat([tensor, tensor[:SIZE]]) for tensor in (weight, bias)]
    dw, db = share.gradients(wider[0], wider[1])
    assert torch.equal(dw, weight)
    assert db is not None and torch.equal(db, bias)
