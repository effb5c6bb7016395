"""Trained parameters inside blocks, which all ranks have whole, get the gradients that one process gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster.plugin import HybridParallelPlugin
from timm.layers import set_reentrant_ckpt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.parallel.layers.test_migration_families import Migration
from tests.support.checks import Checks
from tests.support.harness import run_ranks
from tests.support.model_families import BUILDERS, allow_cpu, family_loss
from tests.support.random_examples import IS_THOROUGH
from tests.support.sharding import assert_same_as_unsharded, randomize
from tests.support.training import Trained, batch, boost, ours, theirs, tiny_vit
from tests.support.uneven_runs import relieve, relieved_run

checks = Checks()


STEPS = 4
"""An ordinary one, one in which units migrate, and two after they were permanently re-sharded."""


class Curve(nn.Module):
    """An activation with a scale, and a slope for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.1))
        self.slopes = nn.Parameter(torch.linspace(0.5, 1.5, 5)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.slopes[: x.shape[1]]) * self.log_scale.exp()


def shared_slope() -> nn.Module:
    """All MLPs and the end of the model have the same slope."""
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
    for block in model.blocks:
        block.norm2.register_forward_hook(lambda module, inputs, output: stream.append(output))
    return model


def checkpointed(reentrant: bool) -> nn.Module:
    set_reentrant_ckpt(reentrant)
    model = tiny_vit(depth=1, act_layer=nn.PReLU, qk_norm=True)
    model.set_grad_checkpointing()
    return model


def thawing() -> nn.Module:
    """The slopes are trained from the second step on."""
    model = tiny_vit(depth=1, act_layer=nn.PReLU)
    slopes = [parameter for name, parameter in model.named_parameters() if "act" in name]
    passes: list[None] = []

    def thaw(*_: Any) -> None:
        for slope in slopes:
            slope.requires_grad_(len(passes) > 1)
        passes.append(None)

    thaw()
    model.register_forward_pre_hook(thaw)
    return model


def frozen_base() -> nn.Module:
    """Only what is inside of blocks is trained, and the head."""
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


@dataclass
class Run:
    """Losses and final values of one training run."""

    losses: list[float]
    parameters: dict[str, Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[Tensor], None],
    parts: int = 1,
    before_second: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train for some steps; ``before_second`` is called before the second one."""
    losses = []
    for step in range(STEPS):
        if step == 1:
            before_second()
        images, labels = batch(step)
        for part in range(parts):
            loss = cross_entropy(model(images[part::parts].double()), labels[part::parts]) / parts
            backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def alone(make: Callable[[], nn.Module], parts: int = 1) -> Run:
    """One process."""
    model = make().double().train()
    losses = train(model, sgd(model), lambda loss: loss.backward(), parts)
    return Run(losses, {name: each.detach() for name, each in model.named_parameters()})


def assert_equal(run: Trained, losses: list[float], expected: Run, what: str) -> None:
    """Assert equal losses, and equal values of what each rank has whole."""
    assert losses == pytest.approx(expected.losses, rel=1e-10), what
    for name, value in run.model.unwrap().named_parameters():
        if value.shape == expected.parameters[name].shape:
            difference = float((value - expected.parameters[name]).abs().max())
            assert difference < 1e-10, f"{what}: {name} differs by {difference}"


def _train_with_each_straggler(names: list[str], parts: int) -> None:
    ranks = dist.get_world_size()
    for number, name in enumerate(names):
        expected = alone(MODELS[name], parts)
        for straggler in range(ranks) if IS_THOROUGH else (number % ranks,):
            what = f"{name}, rank {straggler} is slow"
            run = relieved_run(None, MODELS[name]().double(), sgd)
            backward = partial(run.booster.backward, optimizer=run.optimizer)
            losses = train(run.model, run.optimizer, backward, parts, partial(relieve, run.plugin, straggler))
            assert run.plugin.balancer.has_resharded, what
            assert_equal(run, losses, expected, what)


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_is_that_of_one_process(ranks: int) -> None:
    names = list(MODELS) if ranks == 2 else list(MODELS)[:3]
    run_ranks(ranks, _train_with_each_straggler, names, ranks - 1)


def _with_images_in(dtype: torch.dtype, model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.to(dtype) for each in inputs)


@checks.on(4)
def options_of_the_plugin() -> None:
    """Over two replicas, in ZeRO stage 1 and in bf16: all ranks have equal slopes, those of one process."""
    expected = alone(MODELS["PReLU"])
    for options in (dict(zero_stage=1), dict(precision="bf16")):
        run = relieved_run(1, MODELS["PReLU"](), sgd, tp_size=2, **options)
        dtype = torch.bfloat16 if "precision" in options else torch.float32
        run.model.register_forward_pre_hook(partial(_with_images_in, dtype))
        train(run.model, run.optimizer, partial(run.booster.backward, optimizer=run.optimizer))
        precision = 0.05 if "precision" in options else 1e-5
        assert (sum(run.plugin.balancer.plan.migrate) > 0.1) == (dist.get_rank() < 2)
        for name, value in run.model.unwrap().named_parameters():
            if "act" in name:
                assert float(value) == pytest.approx(float(expected.parameters[name]), abs=precision), options


@checks.on(2)
def colossalais_plugin_with_our_policy_trains_like_one_process() -> None:
    for name in ("PReLU", "own activation, norm of heads"):
        run = boost(theirs(tp_size=2), MODELS[name]().double(), sgd)
        assert type(run.plugin) is HybridParallelPlugin
        losses = train(run.model, run.optimizer, partial(run.booster.backward, optimizer=run.optimizer))
        assert_equal(run, losses, alone(MODELS[name]), name)


# Models of transformers ----------------------------------------------------------------------------------------------


def _with_slopes(family: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The family's tiny model with other options of its configuration, and its inputs."""
    torch.manual_seed(0)
    model, inputs = BUILDERS[family]()
    return type(model)(type(model.config)(**(model.config.to_diff_dict() | options))), inputs


FAMILIES: dict[str, dict[str, Any]] = {
    "bert": dict(hidden_act="prelu", position_embedding_type="relative_key"),
    "gpt2": dict(activation_function="prelu"),
    "llama": dict(hidden_act="prelu"),
    "vit": dict(hidden_act="prelu"),
}


@checks.on(2)
def models_of_transformers_have_the_gradients_of_one_process() -> None:
    allow_cpu()
    for number, (family, options) in enumerate(FAMILIES.items()):
        model, inputs = _with_slopes(family, **options)
        migration = Migration(number)
        try:
            assert_same_as_unsharded(randomize(model).train(), family_loss(inputs), migration.cases())
            migration.finish()
        except Exception as error:
            raise AssertionError(f"{family}: {error}") from error
    # Colossal-AI computes other outputs of SAM than one process does, but not other features of images.
    model, inputs = BUILDERS["sam"]()
    assert_same_as_unsharded(
        randomize(model).train(),
        lambda sam: sam.vision_encoder(inputs["pixel_values"]).last_hidden_state.square().mean(),
    )


# Refused -------------------------------------------------------------------------------------------------------------


class Scales(nn.Module):
    """An activation with a scale for each feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales


@checks.on(2)
def a_parameter_with_an_element_for_each_feature_is_refused() -> None:
    for make in (partial(Scales, 60), partial(nn.PReLU, 60)):
        with pytest.raises(ValueError, match=r"^blocks\.0\.mlp\.act\.\w+ has an element for each of the 60 features"):
            boost(ours(tp_size=2), tiny_vit(act_layer=make), sgd)


test_on_ranks = checks.test()
