"""Batches that are smaller than planned, that must have a multiple of samples, and what a loop counts by batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, default_collate

from tests.parallel.plugin.zero.test_zero_plugin import full_parameters, sizes_by_rank
from tests.support.harness import run_ranks
from tests.support.training import zero_plugin

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


def boost(stage: int, data: Dataset, division: Any, ranks: int = 2, **options: Any) -> Any:
    collate = options.pop("collate_fn", None)
    plugin = zero_plugin(
        stage, GLOBAL_BATCH, profile_cache="", reallocate_above=float("inf"), max_micro_batch=8, **options
    )
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = plugin.prepare_dataloader(data, collate_fn=collate)
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, nn.CrossEntropyLoss(), loader)
    loader.divide_by(lambda samples: sizes_by_rank(division, samples))
    return booster, model, optimizer, criterion, loader


DIVISIONS = {2: ([[5], [3]], [[3, 2], [2, 1]]), 3: ([[2], [4], [2]], [[2, 1], [2, 1], [1, 1]])}


def train_with_broken_samples(ranks: int, stages: tuple[int, ...]) -> list[Tensor]:
    found = []
    for stage in stages:
        for division in DIVISIONS[ranks]:
            booster, model, optimizer, criterion, loader = boost(stage, Images(BROKEN), division, collate_fn=readable)
            for inputs, targets in loader:
                booster.backward(criterion(model(inputs), targets), optimizer)
                optimizer.step()
                optimizer.zero_grad()
            found.append(torch.cat(full_parameters(model)))
    return found


def train_alone_with_broken_samples() -> Tensor:
    model, data = net(), Images(BROKEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in range(0, SAMPLES, GLOBAL_BATCH):
        inputs, targets = readable([data[index] for index in range(first, first + GLOBAL_BATCH)])
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.detach().flatten() for value in model.parameters()])


@pytest.mark.parametrize("ranks, stages", [(2, (0, 1, 2, 3)), (3, (0, 1))])
def test_samples_that_collate_fn_leaves_out_count_nothing(ranks: int, stages: tuple[int, ...]) -> None:
    expected = train_alone_with_broken_samples()
    for found in run_ranks(ranks, train_with_broken_samples, ranks, stages):
        for parameters in found:
            size = min(len(parameters), len(expected))  # FSDP pads
            torch.testing.assert_close(parameters[:size], expected[:size], rtol=1e-4, atol=1e-6)


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


def loss_of_packed(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    rows, lengths, labels = batch
    means = torch.stack([each.mean(0) for each in model(rows).split(lengths.tolist())])
    return criterion(means, labels)


def train_packed(ranks: int) -> list[Tensor]:
    found = []
    for division in DIVISIONS[ranks]:
        options = dict(collate_fn=packed, training_step=loss_of_packed, weight_by="samples")
        booster, model, optimizer, criterion, loader = boost(0, Sequences(), division, ranks, **options)
        for batch in loader:
            booster.backward(loss_of_packed(model, criterion, batch), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat(full_parameters(model)))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_packed_sequences_are_not_taken_for_samples(ranks: int) -> None:
    model, data = net(), Sequences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in range(0, SAMPLES, GLOBAL_BATCH):
        batch = packed([data[index] for index in range(first, first + GLOBAL_BATCH)])
        loss_of_packed(model, cross_entropy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(ranks, train_packed, ranks):
        for parameters in found:
            torch.testing.assert_close(parameters, _flat(model), rtol=1e-4, atol=1e-6)


def train_on_one_batch() -> Tensor:
    options = dict(collate_fn=readable, accumulation="per_rank")
    booster, model, optimizer, criterion, loader = boost(0, Images(BROKEN), [[5], [3]], **options)
    inputs, targets = next(iter(loader))
    for _ in range(3):
        booster.backward(criterion(model(inputs), targets), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat(full_parameters(model))


def test_one_batch_can_be_trained_on_again() -> None:
    model, data = net(), Images(BROKEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = readable([data[index] for index in range(GLOBAL_BATCH)])
    for _ in range(3):
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in run_ranks(2, train_on_one_batch):
        torch.testing.assert_close(parameters, _flat(model), rtol=1e-4, atol=1e-6)


def leave_out_in_the_loop() -> None:
    for stage in (0, 1):
        booster, model, optimizer, criterion, loader = boost(stage, Images(), [[5], [3]])
        for inputs, targets in loader:
            for part in (slice(0, 1), slice(1, None)):  # in parts, but all of them
                loss = criterion(model(inputs[part]), targets[part]) * len(inputs[part]) / len(inputs)
                booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            break
        inputs, targets = next(iter(loader))
        booster.backward(criterion(model(inputs[1:] * 2), targets[1:]), optimizer)
        with pytest.raises(RuntimeError, match=r"the model was given \d+% of the samples of micro-batch 0"):
            optimizer.step()


def test_samples_that_the_loop_leaves_out_are_refused() -> None:
    run_ranks(2, leave_out_in_the_loop)


def mixed_step(mixup: Mixup) -> Any:
    def step(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
        inputs, targets = mixup(batch[0].view(-1, 1, 2, 3), batch[1])
        return criterion(model(inputs.flatten(1)), targets)

    return step


def train_with_mixup() -> list[list[int]]:
    mixup = Mixup(mixup_alpha=0.8, num_classes=3)
    found = []
    for stage in (0, 1, "auto"):
        plugin = zero_plugin(stage, 12, profile_cache="", training_step=mixed_step(mixup))  # type: ignore[arg-type]
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        booster = Booster(plugin=plugin)
        loader = plugin.prepare_dataloader(Images(), drop_last=True)
        model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, nn.CrossEntropyLoss(), loader)
        assert loader.multiple_of == 2
        for batch in loader:
            booster.backward(mixed_step(mixup)(model, criterion, batch), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            found.append(len(batch[0]))
        with pytest.raises(
            ValueError, match="the last global batch of an epoch has 8 samples, which is not a multiple of 3"
        ):
            plugin = zero_plugin(0, 12, profile_cache="", multiple_of=3)
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = plugin.prepare_dataloader(Images())
            Booster(plugin=plugin).boost(model, optimizer, nn.CrossEntropyLoss(), loader)
    return [found]


def test_mixup_gets_even_batches() -> None:
    for found in run_ranks(2, train_with_mixup):
        assert all(size % 2 == 0 for size in found[0]), found


def average(model: nn.Module, kind: str) -> tuple[Any, Any]:
    """An average of weights, and the function that updates it from a model."""
    if kind == "torch":
        averaged: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        return averaged.module, lambda model: averaged.update_parameters(model)
    averaged = ModelEmaV3(model, decay=0.5)
    return averaged.module, lambda model: averaged.update(model)


def train_with_averages() -> list[tuple[str, Tensor]]:
    found = []
    for division in DIVISIONS[2]:
        booster, model, optimizer, criterion, loader = boost(1, Images(), division)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            getattr(optimizer, "optim", optimizer), max_lr=0.5, total_steps=loader.global_batches
        )
        averages = {kind: average(model.module, kind) for kind in ("torch", "timm")}
        for inputs, targets in loader:
            booster.backward(criterion(model(inputs), targets), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            for _, update in averages.values():
                update(model.module)
        found += [(f"{kind} {division}", _flat(averaged)) for kind, (averaged, _) in averages.items()]
    return found


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def train_alone_with_average(kind: str) -> Tensor:
    model, data = net(), Images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=SAMPLES // GLOBAL_BATCH)
    averaged, update = average(model, kind)
    for first in range(0, SAMPLES, GLOBAL_BATCH):
        inputs, targets = default_collate([data[index] for index in range(first, first + GLOBAL_BATCH)])
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        update(model)
    return _flat(copy.deepcopy(averaged))


def test_schedules_and_averages_of_weights_count_steps() -> None:
    for found in run_ranks(2, train_with_averages):
        for case, parameters in found:
            kind = case.split()[0]
            expected = train_alone_with_average(kind)
            torch.testing.assert_close(
                parameters, expected, rtol=1e-4, atol=1e-6, msg=lambda text, case=case: f"{case}: {text}"
            )
