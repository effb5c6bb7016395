"""Random numbers of a block depend on the micro-batch and the block, wherever and whenever it is computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from colossalai.shardformer.layer import DropoutForParallelInput, DropoutForReplicatedInput
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colossal_hetero.layers.dropout import SeededPasses

pytestmark = pytest.mark.unit


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


@pytest.mark.parametrize("reentrant", [True, False])
def test_repeated_blocks_draw_the_same(reentrant: bool) -> None:
    plain, repeating = Model("012"), Model("012", reentrant)
    gradients = []
    for model in (plain, repeating):
        with seeded(model).run(seed_of):
            outputs = [model(inputs(number)) for number in range(3)]
            for output in outputs:  # as in a pipeline: other micro-batches have begun before a block is repeated
                output.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


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
