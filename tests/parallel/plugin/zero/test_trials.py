"""Measuring before training: models in evaluation mode, with batch normalization, and with losses that are no mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.support.checks import Checks
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.zero_runs import (
    SAMPLES,
    Numbered,
    assert_trained,
    boosted,
    fit,
    flat,
    global_batches,
    make_model,
    make_optimizer,
    unmeasured,
)

checks = Checks()
ZERO = (0, 1, 2, 3)
DROP_LAST = dict(drop_last=True)
PLUGINS = (*ZERO, "hybrid")


class Normalized(nn.Module):
    """A model with a batch normalization of inputs ``[N, C]``, which needs two samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(inputs[:, :7]))))


@checks.on(2)
def models_in_evaluation_mode_can_be_boosted() -> None:
    """``from_pretrained`` of transformers returns models in evaluation mode."""
    alone, trained = make_model(), []
    expected = fit(alone, make_optimizer(alone, "sgd"), global_batches(Numbered(), 8))
    for kind in PLUGINS:
        modes: list[bool] = []
        model = make_model().eval()
        model.norm.train()  # modes of parts are restored, too
        handle = model.second.register_forward_hook(lambda module, *_, modes=modes: modes.append(module.training))
        run = boosted(kind, model, division=[[5], [3]])
        handle.remove()
        assert any(modes), kind
        assert [module.training for module in model.modules()] == [False, False, True, False], kind
        run.model.train()
        trained.append(run.fit())
    assert_trained([trained], PLUGINS, expected)


def summed(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


def without_a_loss_in_evaluation_mode(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
    if not model.training:
        raise RuntimeError("losses are computed in training mode only")
    return summed(model, criterion, batch)


def no_number(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
    return criterion(model(batch[0]), batch[1]) * (float("nan") if torch.distributed.get_rank() == 1 else 1.0)


def for_each_sample(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none").expand(2)


@unmeasured
def refuse_losses(folder: str) -> None:
    cases: list[tuple[Callable, type[Exception], str]] = [
        (summed, ValueError, "the loss is a sum over the samples"),
        (without_a_loss_in_evaluation_mode, ValueError, "the loss is a sum over the samples"),
        (no_number, ValueError, r"rank 1: the loss of each of the first samples is not a finite number \(it is nan"),
        (for_each_sample, RuntimeError, r"returned a tensor of shape \[2\] instead of a scalar"),
    ]
    for kind in PLUGINS:
        path = f"{folder}/{kind}.json"
        for step, error, words in cases:
            if kind != "hybrid" and step is for_each_sample:
                continue  # the search for a stage fails first
            with pytest.raises(error, match=words):
                boosted(kind, training_step=step)
        boosted(kind, profile=path)
        with pytest.raises(ValueError, match="the loss is a sum"):
            boosted(kind, profile=path, training_step=summed)


def test_losses_that_are_no_mean_are_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, refuse_losses, str(tmp_path))


@checks.on(2)
def the_check_of_the_loss_does_not_compile() -> None:
    for in_place in (False, True):
        modes: list[bool] = []
        model = make_model()

        def backend(graph: Any, inputs: Any, modes: list[bool] = modes) -> Any:
            modes.append(torch.is_grad_enabled())
            return graph.forward

        if in_place:
            model.compile(backend=backend)
        else:
            model = torch.compile(model, backend=backend)  # type: ignore[assignment]
        boosted(1, model)
        assert modes and all(modes), in_place  # the check of the loss, without gradients, compiles nothing


def chosen(kinds: tuple[Any, ...], division: list[list[int]]) -> tuple[Any, ...]:
    """On three ranks some of the plugins, unless all are asked for."""
    return kinds if IS_THOROUGH or len(division) == 2 else kinds[1::2]


@checks.on(2, [[0], [8]])
@checks.on(2, [[3, 0], [2, 3]])
@checks.on(3, [[4], [0], [4]])
def batch_normalization_of_single_values_trains_with_two_samples_or_more(division: list[list[int]]) -> None:
    trained = []
    for kind in chosen(ZERO, division):  # on a CPU the hybrid plugin cannot train models with batch normalization
        run = boosted(kind, Normalized(), loader=DROP_LAST)
        sizes = [size for share in run.plugin.batch_balancer.allocation.shares for size in share.sizes]
        assert sum(sizes) == 8 and 1 not in sizes, (kind, sizes)
        run.divide(division)
        for batch in run.loader:
            assert len(batch[0]) == (run.loader.current.samples or 2), kind
            parameters = fit(run.model, run.optimizer, [batch])
        trained.append(parameters)
    assert_trained([trained], chosen(ZERO, division), train_normalized_alone(division), atol=1e-5)


def train_normalized_alone(division: list[list[int]]) -> torch.Tensor:
    """Train one process, which normalizes each micro-batch by itself."""
    data, model = Numbered(), Normalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for begin in range(0, SAMPLES - SAMPLES % 8, 8):
        done = begin
        for size in [size for sizes in division for size in sizes if size]:
            inputs, targets = zip(*(data[index] for index in range(done, done + size)), strict=True)
            (cross_entropy(model(torch.stack(inputs)), torch.stack(targets)) * size / 8).backward()
            done += size
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def refuse_single_samples(folder: str) -> None:
    path = f"{folder}/profile.json"
    with pytest.raises(RuntimeError, match="batch normalization needs more than one value per channel"):
        boosted(1, Normalized(), max_micro_batch=1)
    with pytest.raises(ValueError, match=r"a global batch of 1 .* use drop_last=True"):
        boosted(1, Normalized(), samples=7, profile=path)
    assert json.loads(Path(path).read_text())["kinds"][0]["min_batch"] == 2
    with pytest.raises(ValueError, match="at least 2 samples, but max_micro_batch=1"):
        boosted(1, Normalized(), profile=path, max_micro_batch=1)
    with pytest.raises(ValueError, match="accumulation='per_rank' is not possible"):
        boosted(1, Normalized(), loader=DROP_LAST, accumulation="per_rank")


def test_what_batch_normalization_cannot_do_is_refused(tmp_path: Path) -> None:
    run_ranks(2, refuse_single_samples, str(tmp_path))


test_on_ranks = checks.test()
