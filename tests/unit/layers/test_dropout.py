"""Dropout with a mask for each unit; random numbers that depend on the micro-batch and the block."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from colossalai.shardformer.layer import DropoutForParallelInput, DropoutForReplicatedInput
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from colossal_hetero.layers.dropout import SeededPasses, UnitDropout
from colossal_hetero.layers.unit_layout import UnitRange
from colossal_hetero.layers.workload import Surrounded

P = 0.3
UNITS = 37  # groups of three, and one of one
OWN = (UnitRange(0, 0, UNITS),)


class Holder(nn.Module):
    """A module like one that holds a block: ``inside`` runs between the products of the block."""

    def __init__(self, inside: Callable[..., Tensor], units: Sequence[UnitRange], dim: int) -> None:
        super().__init__()
        self.first, self.last, self.inside = nn.Identity(), nn.Identity(), inside
        dropout = UnitDropout("block", UNITS, dim, lambda: units)
        vars(self)["forward"] = Surrounded(self, lambda: dropout.between(self.first, self.last))

    def forward(self, *tensors: Tensor) -> Tensor:
        self.first(tensors[0])
        return F.dropout(self.last(self.inside(*tensors)), 0.0)


def dropped(x: Tensor, units: Sequence[UnitRange] = OWN, dim: int = -1, seed: int = 0, **options: bool) -> Tensor:
    torch.manual_seed(seed)
    return Holder(lambda x: F.dropout(x, P, **options), units, dim)(x)


def test_elements_are_dropped_with_the_probability_and_the_others_are_scaled() -> None:
    x = torch.randn(40, 5, 2 * UNITS, requires_grad=True)
    y = dropped(x)
    kept = y != 0
    assert kept.float().mean() == pytest.approx(1 - P, abs=0.01)
    torch.testing.assert_close(y, x * kept / (1 - P))
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept / (1 - P))
    # Elements are independent of each other: units, samples and positions.
    masks = kept.float().flatten(0, 1)
    assert torch.corrcoef(masks.T).fill_diagonal_(0).abs().max() < 0.4
    assert torch.corrcoef(masks).fill_diagonal_(0).abs().max() < 0.6


@pytest.mark.parametrize("dim", [-1, -3])
def test_a_unit_has_the_same_mask_on_each_rank(dim: int) -> None:
    x = torch.ones(4, UNITS, 3, 5).movedim(1, dim)
    on_own_rank = [dropped(x, [UnitRange(owner, 0, UNITS)], dim) for owner in range(3)]
    ranges = [UnitRange(1, 0, 20), UnitRange(0, 31, 37), UnitRange(2, 5, 9), UnitRange(2, 14, 15)]
    for number, count in ((1, 20), (2, 26), (3, 30), (4, 31)):
        expected = [on_own_rank[owner].narrow(dim, start, stop - start) for owner, start, stop in ranges[:number]]
        assert torch.equal(dropped(x.narrow(dim, 0, count), ranges[:number], dim), torch.cat(expected, dim))
    masks = [*on_own_rank, dropped(x, seed=1, dim=dim)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(masks, 2))


def attention(query: Tensor, key: Tensor, value: Tensor, units: Sequence[UnitRange], **options: object) -> Tensor:
    torch.manual_seed(0)

    def inside(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=P, **options)  # type: ignore[arg-type]

    return Holder(inside, units, -3)(query, key, value)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.randn(UNITS, 6, 6)}, {"scale": 0.3}])
def test_fused_attention_drops_probabilities_by_unit(options: dict) -> None:
    query, key = torch.randn(2, 50, UNITS, 6, 4)
    # With the unit matrix as values, the outputs are the probabilities.
    value = torch.eye(6).expand(50, UNITS, 6, 6)
    y = attention(query, key, value, OWN, **options)
    probabilities = F.scaled_dot_product_attention(query, key, value, **options)
    kept = y != 0
    torch.testing.assert_close(y, probabilities * kept / (1 - P))
    assert kept[probabilities > 0].float().mean() == pytest.approx(1 - P, abs=0.01)
    part = [UnitRange(1, 4, 5), UnitRange(0, 30, UNITS)]
    last = {name: option[-8:] if isinstance(option, Tensor) else option for name, option in options.items()}
    of_part = attention(query[:, -8:], key[:, -8:], value[:, -8:], part, **last)
    torch.testing.assert_close(of_part[:, 1:], y[:, 30:])
    assert not torch.equal(of_part[:, 0] != 0, kept[:, -8])


def test_query_heads_of_a_group_share_a_unit() -> None:
    query, key, value = torch.ones(2, 3 * UNITS, 6, 4), torch.ones(2, UNITS, 6, 4), torch.eye(6)[:, :4]
    y = attention(query, key, value.expand(2, UNITS, 6, 4), OWN, enable_gqa=True)
    of_last = attention(
        query[:, -6:], key[:, -2:], value.expand(2, 2, 6, 4), [UnitRange(0, UNITS - 2, UNITS)], enable_gqa=True
    )
    assert torch.equal(of_last, y[:, -6:])


def test_an_exception_in_the_block_leaves_nothing_behind() -> None:
    holder = Holder(lambda x: F.dropout(x, 1 / 0), OWN, -1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            holder(torch.ones(2, UNITS))
        assert not _get_current_function_mode_stack()
    holder.inside = lambda x: F.dropout(x, P)
    torch.manual_seed(0)
    assert torch.equal(holder(torch.ones(2, UNITS)), dropped(torch.ones(2, UNITS)))
    words = r"inside block has an input of shape \[2, 36\]; .* multiple of the 37 units"
    with pytest.raises(RuntimeError, match=words):
        dropped(torch.ones(2, 36))


class Model(nn.Module):
    """A stage of a model of three blocks, with dropout before, in and after them."""

    def __init__(self, blocks: Sequence[str], reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.reentrant = reentrant
        self.before = nn.Dropout(0.5) if "0" in blocks else nn.Identity()
        every = {name: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)) for name in "012"}
        self.blocks = nn.ModuleDict({name: every[name] for name in blocks})
        self.after = nn.Dropout(0.5) if "2" in blocks else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks.values():
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.after(x)


def seeded(model: Model, group_rank: int = 0) -> SeededPasses:
    return SeededPasses(model, dict(model.blocks.items()), group_rank)


def inputs(number: int) -> Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8).mul(number + 1).requires_grad_()


def seed_of(micro_batch: int) -> int:
    return 100 + micro_batch


@pytest.mark.parametrize("cut", [("0", "12"), ("01", "2")])
def test_stages_draw_what_the_whole_model_draws(cut: tuple[str, str]) -> None:
    whole, stages = Model("012"), [Model(names) for names in cut]
    with seeded(whole).run(seed_of):
        expected = [whole(inputs(number)) for number in range(2)]
    torch.manual_seed(99)  # processes have other random states
    first, second = (seeded(stage) for stage in stages)
    with first.run(seed_of):
        between = [stages[0](inputs(number)) for number in range(2)]
    with second.run(seed_of):
        found = [stages[1](x) for x in between]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(expected[0] == 0, expected[1] == 0)


@pytest.mark.parametrize("is_training", [True, False])
def test_it_is_known_whether_the_model_draws_and_the_random_state_is_kept(is_training: bool) -> None:
    model = Model("012").train(is_training)
    passes, state = seeded(model), torch.get_rng_state()
    with passes.run(seed_of):
        model(inputs(0))
    assert passes.draws is is_training and torch.equal(torch.get_rng_state(), state)
    model(inputs(0))  # outside of training
    assert torch.equal(torch.get_rng_state(), state) != is_training


def test_parallel_dropout_differs_between_ranks_only_where_it_should() -> None:
    model = Model("012")
    model.blocks["1"][1] = DropoutForParallelInput(0.5)
    model.blocks["2"][1] = DropoutForReplicatedInput(0.5)
    drawn: list[list[Tensor]] = []
    for group_rank in (0, 1):
        passes, masks = seeded(model, group_rank), list[Tensor]()
        hooks = [
            model.blocks[name][1].register_forward_hook(lambda _, x, y, masks=masks: masks.append(y == 0))
            for name in "12"
        ]
        for _ in range(2):
            with passes.run(seed_of):
                model(inputs(0))
        for hook in hooks:
            hook.remove()
        assert torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[3])
        drawn.append(masks)
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
