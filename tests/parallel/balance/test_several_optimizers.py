"""Models with several optimizers: training is that of one process, also after units were permanently re-sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from tests.support.checks import Checks
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import batch, ours, scripted, tiny_vit
from tests.support.uneven_runs import config, relieve

checks = Checks()


STEPS = 4
LATER = 2
"""The step before which more parameters are trained."""

Parameters = list[nn.Parameter]


class OtherSGD(SGD):
    """Another class might update parameters in another way."""


def parts_of(model: nn.Module) -> tuple[Parameters, Parameters]:
    """The matrices of the blocks, and all other parameters."""
    matrices = [each for name, each in model.named_parameters() if "blocks" in name and each.ndim == 2]
    return matrices, [each for each in model.parameters() if all(each is not matrix for matrix in matrices)]


@dataclass(frozen=True)
class Case:
    """How a model is trained."""

    make: Callable[[Parameters, Parameters], Sequence[Optimizer]]
    boosted: tuple[bool, ...] = (True, True)
    """Which of the optimizers are boosted; the others make steps as torch's do."""
    for_good: bool = True
    """Whether units can be permanently re-sharded."""
    adds: bool = False
    """Whether the second optimizer gets the first half of the matrices later."""


def sgd(parameters: Parameters) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Parameters) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


CASES = {
    "two that are boosted": Case(lambda matrices, rest: (sgd(matrices), adamw(rest))),
    "one that is not boosted": Case(lambda matrices, rest: (sgd(rest), adamw(matrices)), (True, False)),
    "the same parameters": Case(lambda matrices, rest: (sgd(matrices + rest), adamw(matrices))),
    "more parameters later": Case(lambda matrices, rest: (sgd(matrices[1::2]), adamw(rest)), adds=True),
    "another kind, boosted": Case(lambda matrices, rest: (sgd(matrices), OtherSGD(rest, lr=0.1)), for_good=False),
    "another kind, not boosted": Case(
        lambda matrices, rest: (sgd(rest), OtherSGD(matrices, lr=0.1)), (True, False), for_good=False
    ),
}


def train(
    model: nn.Module, optimizers: Sequence[Any], backward: Callable[[Tensor], Any], added: Parameters
) -> list[float]:
    losses = []
    for step in range(STEPS):
        if added and step == LATER:
            optimizers[1].add_param_group(dict(params=added))
        images, labels = batch(step)
        loss = cross_entropy(model(images.double()), labels)
        backward(loss)
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if added and step < LATER:
            for parameter in added:
                parameter.grad = None
    return losses


def _run(case: Case, boost: Callable[[nn.Module, Sequence[Optimizer]], tuple[nn.Module, Any, Any]]) -> tuple[Any, ...]:
    model = tiny_vit(depth=1).double().train()
    parts = parts_of(model)
    added = parts[0][::2] if case.adds else []
    trained, optimizers, backward = boost(model, case.make(*parts))
    return trained, optimizers, train(trained, optimizers, backward, added)


def alone(case: Case) -> tuple[nn.Module, list[float]]:
    model, _, losses = _run(case, lambda model, optimizers: (model, optimizers, lambda loss: loss.backward()))
    return model, losses


def _train_with_each_straggler(names: list[str], folder: Path) -> None:
    ranks = dist.get_world_size()
    for number, name in enumerate(names):
        case = CASES[name]
        expected, wanted = alone(case)
        for straggler in range(ranks) if IS_THOROUGH else (number % ranks,):
            what = f"{name}, rank {straggler} is slow"
            booster = Booster(plugin=ours(config(reshard_after=2), tp_size=ranks))

            def boost(
                model: nn.Module,
                optimizers: Sequence[Optimizer],
                booster: Booster = booster,
                case: Case = case,
                straggler: int = straggler,
            ) -> tuple[nn.Module, Any, Any]:
                trained = []
                for optimizer, is_boosted in zip(optimizers, case.boosted, strict=True):
                    if is_boosted:
                        model, optimizer, *_ = booster.boost(model, optimizer)
                    trained.append(optimizer)
                relieve(booster.plugin, straggler)
                return model, trained, lambda loss: booster.backward(loss, trained[0])

            with scripted():
                model, optimizers, losses = _run(case, boost)
            balancer = booster.plugin.balancer
            assert balancer.plan.migrate[straggler] > 0.1, what
            assert balancer.has_resharded == case.for_good, what
            assert losses == pytest.approx(wanted, rel=1e-10), what
            path = folder / f"{name}-{straggler}"
            booster.save_model(model, str(path), shard=False)
            dist.barrier()
            saved = torch.load(path, weights_only=True)
            for key, value in expected.state_dict().items():
                assert torch.allclose(saved[key], value, 1e-9, 1e-10), f"{what}: {key}"
            if name == "two that are boosted":
                _check_saved_states(booster, optimizers, folder / f"states-{straggler}", expected)


def _check_saved_states(booster: Booster, optimizers: Sequence[Any], folder: Path, expected: nn.Module) -> None:
    """Each optimizer is saved with whole states."""
    for number, (optimizer, part) in enumerate(zip(optimizers, parts_of(expected), strict=True)):
        path = Path(f"{folder}-{number}")
        booster.save_optimizer(optimizer, str(path), shard=False)
        dist.barrier()
        states = torch.load(path, weights_only=True)["state"]
        entry = ("momentum_buffer", "exp_avg")[number]
        assert [states[place][entry].shape for place in range(len(part))] == [each.shape for each in part]
        booster.load_optimizer(optimizer, str(path))


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_is_that_of_one_process(ranks: int, tmp_path: Path) -> None:
    names = list(CASES)
    run_ranks(ranks, _train_with_each_straggler, names if ranks == 2 else names[:2], tmp_path)


def _boost_the_model_first(folder: Path) -> None:
    """The model is boosted without an optimizer, for example to load weights into it."""
    booster = Booster(plugin=ours(config(), tp_size=2))
    model, *_ = booster.boost(tiny_vit())
    model, optimizer, *_ = booster.boost(model, adamw(list(model.parameters())))
    loss = cross_entropy(model(batch()[0]), batch()[1])
    booster.backward(loss, optimizer)
    optimizer.step()
    booster.save_optimizer(optimizer, str(folder / "states"), shard=False)
    dist.barrier()
    states = torch.load(folder / "states", weights_only=True)["state"]
    shapes = [each.shape for each in tiny_vit().parameters()]
    assert [states[place]["exp_avg"].shape for place in range(len(shapes))] == shapes


def test_states_are_saved_whole_if_the_model_is_boosted_before_the_optimizer(tmp_path: Path) -> None:
    run_ranks(2, _boost_the_model_first, tmp_path)


@checks.on(2)
def what_cannot_be_boosted_is_refused() -> None:
    booster = Booster(plugin=ours(config(), tp_size=2))
    model = tiny_vit(depth=1).double()
    matrices, rest = parts_of(model)
    with scripted():
        boosted, optimizer, *_ = booster.boost(model, sgd(matrices))
    with pytest.raises(ValueError, match=r"given to booster.boost before.* give booster.boost the model that it has"):
        booster.boost(model, adamw(rest))
    with pytest.raises(ValueError, match="another plugin has boosted this model"):
        Booster(plugin=ours(config(), tp_size=2)).boost(boosted, adamw(rest))
    balancer = booster.plugin.balancer
    assert booster.boost(boosted, adamw(rest))[0] is boosted
    assert booster.plugin.balancer is balancer
    relieve(booster.plugin, 1)
    train(boosted, [optimizer], lambda loss: booster.backward(loss, optimizer), [])
    assert balancer.has_resharded
    with pytest.raises(
        ValueError, match=r"permanently re-sharded, and now OtherSGD is not known.* before the first step"
    ):
        booster.boost(boosted, OtherSGD(rest, lr=0.1))


test_on_ranks = checks.test()
