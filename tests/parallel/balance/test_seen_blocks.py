"""Blocks in which somebody sees what a rank computes: their units stay, and training is as in Colossal-AI's plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.modules.module import register_module_forward_hook

from colossal_hetero.balance import balancer
from tests.support.checks import Checks
from tests.support.model_families import BUILDERS
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import Trained, batch, boost, ours, scripted, sgd, theirs, tiny_vit
from tests.support.uneven_runs import config, relieve

checks = Checks()


MIGRATES, MOVED = 2, 4
"""The first steps before which units have migrated, from the second one on, and were permanently re-sharded."""
STEPS = 6

Remove = Callable[[], None]
Look = Callable[[nn.Module, list[Tensor]], Remove]
"""Lets all that is seen in a model be added to a list, until the result is called."""


def _hooked(path: str, takes_input: bool = False) -> Look:
    def look(model: nn.Module, seen: list[Tensor]) -> Remove:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen.append(inputs[0] if takes_input else output)

        return model.get_submodule(path).register_forward_hook(hook).remove

    return look


def _other_forward(model: nn.Module, seen: list[Tensor]) -> Remove:
    activation = model.get_submodule("blocks.0.mlp.act")

    def forward(_: nn.Module, x: Tensor) -> Tensor:
        seen.append(gelu(x))
        return seen[-1]

    activation.forward = MethodType(forward, activation)
    return lambda: delattr(activation, "forward")


def _hooked_everywhere(model: nn.Module, seen: list[Tensor]) -> Remove:
    watched = model.get_submodule("blocks.0.mlp.drop1")
    return register_module_forward_hook(
        lambda module, _, output: seen.append(output) if module is watched else None
    ).remove


class Keeping(nn.Module):
    """An activation that keeps what it computes, for example for a penalty."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(gelu(x))
        return self.kept[-1]


def _kept(model: nn.Module, seen: list[Tensor]) -> Remove:
    model.get_submodule("blocks.0.mlp").act = Keeping(seen)
    return lambda: None


LOOKS: dict[str, Look] = {
    "activation": _hooked("blocks.0.mlp.act"),
    "maps of attention": _hooked("blocks.0.attn.attn_drop"),
    "input of a row-parallel layer": _hooked("blocks.0.attn.proj", takes_input=True),
    "another forward pass": _other_forward,
    "a hook on all modules": _hooked_everywhere,
    "a module that keeps": _kept,
}


@dataclass(frozen=True)
class Case:
    """From which step on and until which step the model is looked into; step −1 is before ``boost``."""

    look: str
    first: int = -1
    last: int = STEPS
    rank: int | None = None
    """The only rank that looks, without using what it sees; None: all do."""


CASES = [
    *(Case(look) for look in LOOKS if "row" not in look),
    Case("input of a row-parallel layer", 0),  # Colossal-AI drops hooks of layers that it replaces
    Case("activation", MIGRATES, MOVED - 1),
    Case("maps of attention", MOVED, MOVED + 1),
    Case("maps of attention", rank=0),
    Case("activation", 0, MIGRATES + 1, rank=1),
]


def make_vit() -> nn.Module:
    model = tiny_vit(depth=1).double()
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


def train(plugin: Any, case: Case, straggler: int | None = None) -> tuple[Trained, list[list[int]]]:
    """Returns the run, and the shape of what is seen in each step."""
    model, seen = make_vit(), list[Tensor]()
    looks = case.rank in (None, dist.get_rank())
    remove = LOOKS[case.look](model, seen) if looks and case.first < 0 else None
    run = boost(plugin, model, sgd)
    shapes = []
    for step in range(STEPS):
        if looks and step == case.first:
            remove = LOOKS[case.look](run.model.unwrap(), seen)
        if remove is not None and step == case.last:
            remove()
        images, labels = batch(step)
        loss = cross_entropy(run.model(images.double()), labels)
        run.losses.append(loss.item())
        shapes.append([list(each.shape) for each in seen])
        if case.rank is None:
            loss = loss + sum(each.square().mean() for each in seen)
        run.booster.backward(loss, run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if straggler is not None and step == 0:
            relieve(plugin, straggler)  # now the balancer knows what modules keep
        seen.clear()
    if remove is not None:
        remove()
    return run, shapes


@checks.on(2, CASES)
@checks.on(3, CASES[1::4])
def seen_blocks_stay(cases: list[Case]) -> None:
    ranks = dist.get_world_size()
    for number, case in enumerate(cases):
        expected, wanted = train(theirs(tp_size=ranks), case)
        for straggler in range(ranks) if IS_THOROUGH else (number % ranks,):
            what = f"{case}, rank {straggler} is slow"
            with scripted():
                run, shapes = train(ours(config(reshard_after=MOVED - 1), tp_size=ranks), case, straggler)
            balancing = run.plugin.balancer
            assert shapes == wanted, what
            everything = case.look == "a hook on all modules"
            assert balancing.has_resharded != everything, what
            assert run.losses == pytest.approx(expected.losses, rel=1e-10), what
            with balancing.ordinary_shards():
                for name, value in run.parameters.items():
                    assert torch.allclose(value, expected.parameters[name], 1e-9, 1e-10), f"{what}: {name}"


# Callers that ask for something of each head -------------------------------------------------------------------------


def _maps(model: nn.Module, step: int) -> dict[str, Any]:
    return dict(output_attentions=True)


def _later_maps(model: nn.Module, step: int) -> dict[str, Any]:
    return dict(output_attentions=step in (MIGRATES, MOVED))


def _configured_maps(model: nn.Module, step: int) -> dict[str, Any]:
    model.config.output_attentions = True
    return {}


def _mask_of_heads(model: nn.Module, step: int) -> dict[str, Any]:
    return dict(head_mask=torch.linspace(0.5, 1.5, 8 // dist.get_world_size()).double())


ASKS: list[tuple[str, Callable[[nn.Module, int], dict[str, Any]]]] = [
    ("vit", _maps),
    ("bert", _later_maps),
    ("vit", _configured_maps),
    ("bert", _mask_of_heads),
]


def train_family(
    plugin: Any, family: str, ask: Callable[[nn.Module, int], dict[str, Any]], straggler: int | None = None
) -> Trained:
    torch.manual_seed(0)
    model, inputs = BUILDERS[family]()
    model = type(model)(type(model.config)(**(model.config.to_diff_dict() | dict(attn_implementation="eager"))))
    run = boost(plugin, model.double(), sgd)
    inputs = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    for step in range(STEPS):
        outputs = run.model(**inputs, **ask(run.model.unwrap(), step))
        loss = outputs["loss"]
        run.losses.append(loss.item())
        loss = loss + sum(each.square().mean() for each in outputs.get("attentions") or ())
        run.booster.backward(loss, run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if straggler is not None and step == 0:
            relieve(plugin, straggler)
    return run


@checks.on(2)
def attention_stays_while_a_caller_asks_for_something_of_each_head() -> None:
    for number, (family, ask) in enumerate(ASKS):
        expected = train_family(theirs(tp_size=2, custom_policy=None), family, ask)
        for straggler in (0, 1) if IS_THOROUGH else (number // 2,):
            what = f"{family}, {ask.__name__}, rank {straggler} is slow"
            with scripted():
                run = train_family(ours(config(reshard_after=MOVED - 1), tp_size=2), family, ask, straggler)
            assert run.plugin.balancer.plan.migrate[straggler] > 0.1, what
            assert run.losses == pytest.approx(expected.losses, rel=1e-10), what
            with run.plugin.balancer.ordinary_shards():
                for name, value in run.parameters.items():
                    assert torch.allclose(value, expected.parameters[name], 1e-9, 1e-10), f"{what}: {name}"


@checks.on(2)
def a_hook_on_one_rank_or_in_a_part_of_the_model_is_refused() -> None:
    with scripted():
        run, _ = train(ours(config(reshard_after=None), tp_size=2), Case("activation", STEPS), 1)
    images = batch()[0].double()
    model = run.model.unwrap()
    remove = LOOKS["activation"](model, [])
    with pytest.raises(RuntimeError, match=r"inside of \S*blocks\.0\.mlp would see .*; call the whole model"):
        model.forward_features(images)
    remove()
    if dist.get_rank() == 0:
        LOOKS["activation"](model, [])
        with (
            patch.object(balancer, "VOTE_TIMEOUT", timedelta(seconds=1)),
            pytest.raises(RuntimeError, match=r"0:00:01 later other ranks .* do not have them.* add the same hooks"),
        ):
            run.model(images)


test_on_ranks = checks.test()
