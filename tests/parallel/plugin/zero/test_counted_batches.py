"""Batches that are smaller than planned, that must have a multiple of samples, and what a loop counts by batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, default_collate

from tests.support.checks import Checks
from tests.support.zero_runs import Boosted, assert_trained, boosted, fit, loss_of, unmeasured

checks = Checks()
SAMPLES, GLOBAL_BATCH = 32, 8
BROKEN = {0, 3, 9, 12, 16, 28}
"""Samples that cannot be read; each micro-batch of the divisions has others."""


class Images(Dataset):
    def __init__(self, broken: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self._broken = broken

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        if index in self._broken:
            return None
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 3


def readable(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@unmeasured
def boost(stage: int | str, data: Dataset, division: Any, collate: Any = None, **options: Any) -> Boosted:
    fixed = dict(reallocate_above=float("inf"), max_micro_batch=8, loader=dict(collate_fn=collate))
    return boosted(stage, net(), sgd, data, division=division, **fixed, **options)


def train_alone(batches: list[Any], loss_of: Any = loss_of) -> Tensor:
    model = net()
    return fit(model, sgd(model), batches, loss_of)


def collated(data: Any, collate: Any) -> list[Any]:
    return [collate([data[index] for index in range(first, first + 8)]) for first in range(0, SAMPLES, GLOBAL_BATCH)]


def divisions() -> list[list[list[int]]]:
    return DIVISIONS[torch.distributed.get_world_size()]


DIVISIONS = {2: [[[5], [3]], [[3, 2], [2, 1]]], 3: [[[2], [4], [2]], [[2, 1], [2, 1], [1, 1]]]}


@checks.on(2, (0, 1, 2, 3))
@checks.if_thorough(3, (0, 1))
def samples_that_collate_fn_leaves_out_count_nothing(stages: tuple[int, ...]) -> None:
    cases = [(stage, division) for stage in stages for division in divisions()]
    found = [boost(stage, Images(BROKEN), division, readable).fit() for stage, division in cases]
    assert_trained([found], cases, train_alone(collated(Images(BROKEN), readable)))


class Sequences(Dataset):
    """Sequences of unlike lengths, ``[length, 6]``, each with a label."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(1 + index % 4, 6, generator=torch.Generator().manual_seed(index)), index % 3


def packed(samples: list[Any]) -> Any:
    """All sequences in one tensor, the length of each, and the labels."""
    sequences, labels = zip(*samples, strict=True)
    return torch.cat(sequences), torch.tensor([len(each) for each in sequences]), torch.tensor(labels)


def loss_of_packed(model: nn.Module, batch: Any) -> Tensor:
    rows, lengths, labels = batch
    means = torch.stack([each.mean(0) for each in model(rows).split(lengths.tolist())])
    return cross_entropy(means, labels)


def packed_step(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    return loss_of_packed(model, batch)


@checks.on(2)
@checks.if_thorough(3)
def rows_of_packed_sequences_are_not_taken_for_samples() -> None:
    options = dict(training_step=packed_step, weight_by="samples")
    found = [boost(0, Sequences(), division, packed, **options).fit(loss_of_packed) for division in divisions()]
    assert_trained([found], divisions(), train_alone(collated(Sequences(), packed), loss_of_packed))


@checks.on(2)
def one_batch_can_be_trained_on_again() -> None:
    run = boost(0, Images(BROKEN), [[5], [3]], readable, accumulation="per_rank")
    found = fit(run.model, run.optimizer, [next(iter(run.loader))] * 3)
    assert_trained([[found]], ["one batch"], train_alone(collated(Images(BROKEN), readable)[:1] * 3))


@checks.on(2)
def samples_that_the_loop_leaves_out_are_refused() -> None:
    for stage in (0, 1):
        _, _, model, optimizer, _, loader, _ = boost(stage, Images(), [[5], [3]])
        inputs, targets = next(iter(loader))
        for part in (slice(0, 1), slice(1, None)):  # in parts, but all of them
            optimizer.backward(cross_entropy(model(inputs[part]), targets[part]) * len(inputs[part]) / len(inputs))
        optimizer.step()
        optimizer.zero_grad()
        inputs, targets = next(iter(loader))
        optimizer.backward(cross_entropy(model(inputs[1:] * 2), targets[1:]))
        with pytest.raises(RuntimeError, match=r"the model was given \d+% of the samples of micro-batch 0"):
            optimizer.step()


def mixed_step(mixup: Mixup) -> Any:
    def step(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
        inputs, targets = mixup(batch[0].view(-1, 1, 2, 3), batch[1])
        return criterion(model(inputs.flatten(1)), targets)

    return step


@checks.on(2)
def mixup_gets_even_batches() -> None:
    mixup = Mixup(mixup_alpha=0.8, num_classes=3)
    for stage in (0, 1, "auto"):
        step, options = mixed_step(mixup), dict(samples=12)
        run = boosted(stage, net(), sgd, Images(), loader=dict(drop_last=True), training_step=step, **options)
        assert run.loader.multiple_of == 2
        for batch in run.loader:
            run.booster.backward(step(run.model, run.criterion, batch), run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()
            assert len(batch[0]) % 2 == 0
        with pytest.raises(
            ValueError, match="the last global batch of an epoch has 8 samples, which is not a multiple of 3"
        ):
            boosted(0, net(), sgd, Images(), multiple_of=3, **options)


def average(model: nn.Module, kind: str) -> tuple[Any, Any]:
    """An average of weights, and the function that updates it from a model."""
    if kind == "torch":
        averaged: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        return averaged.module, lambda model: averaged.update_parameters(model)
    averaged = ModelEmaV3(model, decay=0.5)
    return averaged.module, lambda model: averaged.update(model)


def train_with_average(batches: Any, model: nn.Module, optimizer: Any, kind: str, total_steps: int) -> Tensor:
    """The average of weights, with a schedule that was not boosted."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        getattr(optimizer, "optim", optimizer), max_lr=0.5, total_steps=total_steps
    )
    inner = getattr(model, "module", model)
    averaged, update = average(inner, kind)
    for batch in batches:
        fit(model, optimizer, [batch])
        schedule.step()
        update(inner)
    return torch.cat([value.detach().flatten() for value in averaged.parameters()])


AVERAGES = [(kind, division) for kind in ("torch", "timm") for division in DIVISIONS[2]]


@checks.on(2)
def schedules_and_averages_of_weights_count_steps() -> None:
    batches = collated(Images(), default_collate)
    for kind, division in AVERAGES:
        run, model = boost(1, Images(), division), net()
        found = train_with_average(run.loader, run.model, run.optimizer, kind, run.loader.global_batches)
        expected = train_with_average(batches, model, sgd(model), kind, len(batches))
        assert_trained([[found]], [(kind, division)], expected)


test_on_ranks = checks.test()
