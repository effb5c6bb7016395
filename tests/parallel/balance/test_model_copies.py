"""Deep copies of a boosted model, for moving averages; the reference is Colossal-AI's plugin."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from colossal_hetero import BalanceConfig
from tests.support.checks import on
from tests.support.language_models import llama, tokens, train_on_tokens
from tests.support.migration_runs import assert_equal, migrating_run
from tests.support.training import batch, boost, ours, sgd, theirs, tiny_vit, train, train_alone

STEPS = 3


def images(model: Any) -> Tensor:
    return model(batch()[0])


def logits(model: Any) -> Tensor:
    inputs, _ = tokens(0)
    return model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits


LLAMA = dict(make_vocab_size_divisible_by=4)
FAMILIES: tuple[tuple[Callable[[], nn.Module], Any, Any, Any, Callable[[Any], Tensor]], ...] = (
    (lambda: tiny_vit(depth=1), {}, {}, train, images),
    (lambda: llama(layers=1), LLAMA | dict(custom_policy=None), LLAMA, train_on_tokens, logits),
)


@on(2)
@on(3)
def averages_of_weights_are_exact() -> None:
    ranks = dist.get_world_size()
    for sender, (make, theirs_options, options, train_one, outputs) in enumerate(FAMILIES[: 4 - ranks]):
        expected = boost(theirs(tp_size=ranks, **theirs_options), make(), sgd)
        run = migrating_run("block", sender, make(), choices=dict(reshard_after=2), tp_size=ranks, **options)
        average = AveragedModel(run.model.unwrap())
        moving = ModelEmaV3(run.model, decay=0.5, exclude_buffers=True)
        means = [torch.zeros_like(value) for value in expected.parameters.values()]
        movings = [value.clone() for value in expected.parameters.values()]
        for _ in range(STEPS):
            train_one(expected, 1)
            train_one(run, 1)
            average.update_parameters(run.model.unwrap())
            moving.update(run.model)
            for mean, ema, value in zip(means, movings, expected.parameters.values(), strict=True):
                mean.add_(value / STEPS)
                ema.lerp_(value, 0.5)
        assert sum(run.plugin.balancer.plan.migrate) > 0.1 and not run.plugin.balancer.has_resharded
        assert_equal(run, expected, f"rank {sender} slow")
        later = copy.deepcopy(copy.deepcopy(run.model)).eval()
        assert run.model.training and run.model.unwrap().training
        expected.model.eval()
        with torch.no_grad():
            for made, values in ((later, None), (copy.deepcopy(average).eval(), means), (moving, movings)):
                for parameter, value in zip(expected.model.unwrap().parameters(), values or (), strict=False):
                    parameter.data.copy_(value)
                torch.testing.assert_close(outputs(made), outputs(expected.model), rtol=1e-4, atol=1e-4)
        with pytest.raises(RuntimeError, match=r"cannot be averaged by state_dict: use parameters\(\)"):
            ModelEmaV3(run.model).update(run.model)
        train_one(run, 1)


@on(2)
@on(3)
def copies_can_be_trained() -> None:
    def make() -> nn.Module:
        return tiny_vit(depth=1, act_layer=nn.PReLU)

    alone = make().train()
    run = boost(ours(BalanceConfig(mode="off"), tp_size=dist.get_world_size()), make(), sgd)
    copied = copy.deepcopy(copy.deepcopy(run.model)).train()
    for model in (alone, copied):
        train_alone(model, sgd(model), map(batch, range(3)))
    torch.testing.assert_close(copied.blocks[0].mlp.act.weight, alone.blocks[0].mlp.act.weight, rtol=1e-5, atol=1e-6)


@on(2)
def copies_keep_the_shapes_of_parameters() -> None:
    run = migrating_run("block", 1, choices=dict(reshard_after=2), tp_size=2)
    train(run, STEPS)
    assert run.plugin.balancer.has_resharded
    with pytest.raises(RuntimeError, match=r"copied after units were permanently re-sharded.*reshard_after=None"):
        copy.deepcopy(run.model)
    # A copy on one rank alone keeps the shapes on all.
    run = migrating_run("block", 1, choices=dict(reshard_after=2), tp_size=2)
    if dist.get_rank() == 0:
        copy.deepcopy(run.model.unwrap())
    train(run, STEPS)
    assert not run.plugin.balancer.has_resharded and sum(run.plugin.balancer.plan.migrate) > 0.1


@on(1)
def models_of_one_rank_are_copied() -> None:
    run = boost(ours(BalanceConfig(mode="off"), tp_size=1), None, sgd)
    seen: list[nn.Module] = []
    run.model.unwrap().blocks[0].register_forward_hook(lambda module, *_: seen.append(module))
    made = copy.deepcopy(run.model)
    train(run, 1)
    torch.testing.assert_close(made.state_dict(), tiny_vit().state_dict())
    seen.clear()
    made(batch()[0])
    assert seen == [made.blocks[0]]
