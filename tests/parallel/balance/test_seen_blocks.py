"""Blocks in which somebody sees what a rank computes: their units stay, and training is as in Colossal-AI's plugin."""

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
from tests.support.checks import on
from tests.support.migration_runs import give
from tests.support.model_families import BUILDERS
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import Trained, batch, boost, ours, scripted, sgd, theirs, tiny_vit
from tests.support.uneven_runs import config

MIGRATES, MOVED, STEPS = 2, 4, 6
"""Steps before which units have migrated, and were permanently re-sharded, for the first time; and all steps."""

Remove = Callable[[], Any]
Look = Callable[[nn.Module, list[Tensor]], Remove]
"""Lets all that is seen in a model be added to a list, until the result is called."""


def _hooked(path: str, takes_input: bool = False) -> Look:
    def look(model: nn.Module, seen: list[Tensor]) -> Remove:
        def hook(_: nn.Module, inputs: Any, output: Tensor) -> None:
            seen.append(inputs[0] if takes_input else output)

        return model.get_submodule(path).register_forward_hook(hook).remove

    return look


def _keeping(kept: list[Tensor], x: Tensor) -> Tensor:
    kept.append(gelu(x))
    return kept[-1]


def _other_forward(model: nn.Module, seen: list[Tensor]) -> Remove:
    activation = model.get_submodule("blocks.0.mlp.act")
    activation.forward = MethodType(lambda _, x: _keeping(seen, x), activation)
    return lambda: delattr(activation, "forward")


def _hooked_everywhere(model: nn.Module, seen: list[Tensor]) -> Remove:
    watched = model.get_submodule("blocks.0.mlp.drop1")
    return register_module_forward_hook(
        lambda module, _, output: seen.append(output) if module is watched else None
    ).remove


class Keeping(nn.Module):
    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        return _keeping(self.kept, x)


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


def nothing(model: nn.Module, seen: list[Tensor]) -> Remove:
    return lambda: None


@dataclass(frozen=True)
class Case:
    """From which step on and until which step the model is looked into; step −1 is before ``boost``."""

    look: str
    first: int = -1
    last: int = STEPS
    rank: int | None = None  # the only rank that looks, without using what it sees; None: all do


CASES = [
    *(Case(look) for look in LOOKS if "row" not in look),
    Case("input of a row-parallel layer", 0),  # Colossal-AI drops hooks of layers that it replaces
    Case("activation", MIGRATES, MOVED - 1),
    Case("maps of attention", MOVED, MOVED + 1),
    Case("maps of attention", rank=0),
    Case("activation", 0, MIGRATES + 1, rank=1),
]


def train(plugin: Any, case: Case, straggler: int | None = None) -> tuple[Trained, list[list[int]]]:
    """Returns the run, and the shape of what is seen in each step."""
    model, seen = tiny_vit(depth=1).double(), list[Tensor]()
    model.blocks[0].attn.fused_attn = False
    look = LOOKS[case.look] if case.rank in (None, dist.get_rank()) else nothing
    remove = look(model, seen) if case.first < 0 else lambda: None
    run, shapes = boost(plugin, model, sgd), []
    for step in range(STEPS):
        if step == case.first:
            remove = look(run.model.unwrap(), seen)
        if step == case.last:
            remove()
        images, labels = batch(step)
        loss = cross_entropy(run.model(images.double()), labels)
        run.losses.append(loss.item())
        shapes.append([list(each.shape) for each in seen])
        finish(run, step, loss, seen if case.rank is None else (), straggler)
        seen.clear()
    if case.last == STEPS:
        remove()
    return run, shapes


def finish(run: Trained, step: int, loss: Tensor, seen: Any, straggler: int | None) -> None:
    """Make a step, also with a penalty on what was seen. After the first one the balancer knows what modules keep."""
    run.finish(loss + sum(each.square().mean() for each in seen))
    if straggler is not None and step == 0:
        give(run.plugin, straggler)


def assert_equal(run: Trained, expected: Trained, what: str) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=1e-10), what
    with run.plugin.balancer.ordinary_shards():
        for name, value in run.parameters.items():
            assert torch.allclose(value, expected.parameters[name], 1e-9, 1e-10), f"{what}: {name}"


@on(2, CASES)
@on(3, CASES[1::4])
def seen_blocks_stay(cases: list[Case]) -> None:
    ranks = dist.get_world_size()
    for number, case in enumerate(cases):
        expected, wanted = train(theirs(tp_size=ranks), case)
        for straggler in range(ranks) if IS_THOROUGH else (number % ranks,):
            what = f"{case}, rank {straggler} is slow"
            with scripted():
                run, shapes = train(ours(config(reshard_after=MOVED - 1), tp_size=ranks), case, straggler)
            assert shapes == wanted, what
            everything = case.look == "a hook on all modules"
            assert run.plugin.balancer.has_resharded != everything, what
            assert_equal(run, expected, what)


def _configured_maps(model: nn.Module, step: int) -> dict[str, Any]:
    model.config.output_attentions = True
    return {}


ASKS: list[tuple[str, str, Callable[[nn.Module, int], dict[str, Any]]]] = [
    ("maps", "vit", lambda model, step: dict(output_attentions=True)),
    ("later maps", "bert", lambda model, step: dict(output_attentions=step in (MIGRATES, MOVED))),
    ("configured maps", "vit", _configured_maps),
    ("mask", "bert", lambda model, step: dict(head_mask=torch.linspace(0.5, 1.5, 8 // dist.get_world_size()).double())),
]


def train_family(plugin: Any, family: str, ask: Callable[..., Any], straggler: int | None = None) -> Trained:
    torch.manual_seed(0)
    model, inputs = BUILDERS[family]()
    model = type(model)(type(model.config)(**(model.config.to_diff_dict() | dict(attn_implementation="eager"))))
    run = boost(plugin, model.double(), sgd)
    inputs = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    for step in range(STEPS):
        outputs = run.model(**inputs, **ask(run.model.unwrap(), step))
        run.losses.append(outputs["loss"].item())
        finish(run, step, outputs["loss"], outputs.get("attentions") or (), straggler)
    return run


@on(2)
def attention_stays_while_a_caller_asks_for_something_of_each_head() -> None:
    for number, (name, family, ask) in enumerate(ASKS):
        expected = train_family(theirs(tp_size=2, custom_policy=None), family, ask)
        for straggler in (0, 1) if IS_THOROUGH else (number // 2,):
            what = f"{family}, {name}, rank {straggler} is slow"
            with scripted():
                run = train_family(ours(config(reshard_after=MOVED - 1), tp_size=2), family, ask, straggler)
            assert run.plugin.balancer.plan.migrate[straggler] > 0.1, what
            assert_equal(run, expected, what)


@on(2)
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
