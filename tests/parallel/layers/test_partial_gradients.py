"""Trained parameters inside blocks, which all ranks have whole, get the gradients that one process gives them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster.plugin import HybridParallelPlugin
from timm.layers import set_reentrant_ckpt
from torch import Tensor, nn

from tests.support.checks import on
from tests.support.migration_runs import give
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import Trained, boost, theirs, tiny_vit
from tests.support.uneven_runs import backward_of, relieved_run, train_in_parts

STEPS = 4  # an ordinary one, one in which units migrate, and two after they were permanently re-sharded


class Curve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.1))
        self.slopes = nn.Parameter(torch.linspace(0.5, 1.5, 5)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.slopes[: x.shape[1]]) * self.log_scale.exp()


def shared_slope() -> nn.Module:
    slope = nn.PReLU()
    model = tiny_vit(depth=1, act_layer=lambda: slope)
    model.norm = nn.Sequential(model.norm, slope)
    return model


class AddsMean(nn.Module):
    """An activation that adds something of the residual stream, which all ranks have whole."""

    def __init__(self, stream: list[Tensor]) -> None:
        super().__init__()
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.stream[-1].mean(-1, keepdim=True))


def adding_stream() -> nn.Module:
    stream: list[Tensor] = []
    model = tiny_vit(depth=1, act_layer=lambda: AddsMean(stream))
    model.blocks[0].norm2.register_forward_hook(lambda module, inputs, output: stream.append(output))
    return model


def checkpointed(reentrant: bool) -> nn.Module:
    set_reentrant_ckpt(reentrant)
    model = tiny_vit(depth=1, act_layer=nn.PReLU, qk_norm=True)
    model.set_grad_checkpointing()
    return model


def thawing() -> nn.Module:
    model = tiny_vit(depth=1, act_layer=nn.PReLU)
    slope = model.blocks[0].mlp.act.weight.requires_grad_(False)
    passes: list[None] = []

    def thaw(*_: Any) -> None:
        passes.append(None)
        slope.requires_grad_(len(passes) > 1)

    model.register_forward_pre_hook(thaw)
    return model


def frozen_base() -> nn.Module:
    model = tiny_vit(depth=1, act_layer=nn.PReLU, qk_norm=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("act", "q_norm", "k_norm", "head")))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "PReLU": partial(tiny_vit, depth=1, act_layer=nn.PReLU),
    "own activation, norm of heads": partial(tiny_vit, depth=1, act_layer=Curve, qk_norm=True),
    "slope shared with the end": shared_slope,
    "whole activation": adding_stream,
    "checkpointed": partial(checkpointed, False),
    "checkpointed, reentrant": partial(checkpointed, True),
    "thawing": thawing,
    "frozen base": frozen_base,
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


Alone = tuple[list[float], dict[str, Tensor]]


def alone(name: str, parts: int = 1) -> Alone:
    model = MODELS[name]().double().train()
    losses = train_in_parts(model, [sgd(model)], lambda loss: loss.backward(), STEPS, parts)
    return losses, dict(model.named_parameters())


def assert_equal(run: Trained, losses: list[float], expected: Alone, what: str) -> None:
    assert losses == pytest.approx(expected[0], rel=1e-10), what
    for name, value in run.model.unwrap().named_parameters():
        if value.shape == expected[1][name].shape:
            difference = float((value - expected[1][name]).abs().max())
            assert difference < 1e-10, f"{what}: {name} differs by {difference}"


@on(2, 1)
@on(3, 2)
def training_is_that_of_one_process(parts: int) -> None:
    ranks = dist.get_world_size()
    for number, name in enumerate(MODELS if ranks == 2 else list(MODELS)[:3]):
        expected = alone(name, parts)
        for straggler in range(ranks) if IS_THOROUGH else (number % ranks,):
            what = f"{name}, rank {straggler} is slow"
            run = relieved_run(None, MODELS[name]().double(), sgd)
            relieve = {1: partial(give, run.plugin, straggler)}
            losses = train_in_parts(run.model, [run.optimizer], backward_of(run), STEPS, parts, relieve)
            assert run.plugin.balancer.has_resharded, what
            assert_equal(run, losses, expected, what)


@on(4)
def options_of_the_plugin() -> None:
    """Over two replicas, in ZeRO stage 1 and in bf16: all ranks have equal slopes, those of one process."""
    _, expected = alone("PReLU")
    in_bf16 = dict(precision="bf16"), torch.bfloat16, 0.05
    for options, dtype, precision in ((dict(zero_stage=1), torch.float32, 1e-5), in_bf16):
        run = relieved_run(1, MODELS["PReLU"](), sgd, tp_size=2, **options)
        run.model.register_forward_pre_hook(lambda _, inputs, dtype=dtype: tuple(each.to(dtype) for each in inputs))
        train_in_parts(run.model, [run.optimizer], backward_of(run), STEPS)
        assert (sum(run.plugin.balancer.plan.migrate) > 0.1) == (dist.get_rank() < 2)
        slope = run.model.unwrap().blocks[0].mlp.act.weight
        assert float(slope) == pytest.approx(float(expected["blocks.0.mlp.act.weight"]), abs=precision), options


@on(2)
def colossalais_plugin_with_our_policy_trains_like_one_process() -> None:
    for name in list(MODELS)[:2]:
        run = boost(theirs(tp_size=2), MODELS[name]().double(), sgd)
        assert type(run.plugin) is HybridParallelPlugin
        losses = train_in_parts(run.model, [run.optimizer], backward_of(run), STEPS)
        assert_equal(run, losses, alone(name), name)
