"""Losses that are a mean over tokens: each micro-batch gets the weight of its tokens, as one process gives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import zero_plugin
from tests.support.zero_runs import assert_trained, flat, sizes_by_rank, unmeasured

SAMPLES, GLOBAL_BATCH, LENGTH, WORDS = 16, 8, 9, 31
IGNORED = -100
STEPS = 4

WHOLE = [[5], [3]]
PARTS = [[3, 2], [2, 1]]
EMPTY = [[6, 0], [0, 2]]


class Sentences(Dataset):
    """Sequences of which between one and all labels count."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = words.clone()
        labels[: index * 5 % LENGTH] = IGNORED
        if index == 13:
            labels[:] = IGNORED
        return {"input_ids": words, "labels": labels}


def causal() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config)


def masked() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


MODELS = {"causal": causal, "masked": masked}


def batches(loader: Any) -> Iterator[dict[str, Tensor]]:
    done = 0
    while done < STEPS:
        for batch in loader:
            yield batch
            done += loader.is_last


@unmeasured
def train(
    stage: int, model_name: str, division: list[list[int]], folder: str, weight_by: Any = None, every: int = 1
) -> dict[str, Any]:
    plugin = zero_plugin(
        stage, GLOBAL_BATCH, max_micro_batch=8, profile=f"{folder}/{stage}-{model_name}.json", weight_by=weight_by
    )
    booster = Booster(plugin=plugin)
    model = MODELS[model_name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = plugin.prepare_dataloader(Sentences())
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
    loader.divide_by(lambda samples: sizes_by_rank(division, samples))
    means, steps = [], 0
    for batch in batches(loader):
        loss = model(**batch).loss
        booster.backward(loss / every, optimizer)
        mean = loader.mean(loss)
        if loader.is_last:
            means.append(mean)
            steps += 1
            if steps % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return {"parameters": flat(model), "means": means}


def train_alone(model_name: str, every: int = 1) -> dict[str, Any]:
    model, data, means = MODELS[model_name](), Sentences(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, STEPS + 1):
        first = (step - 1) * GLOBAL_BATCH % SAMPLES
        batch = [data[index] for index in range(first, first + GLOBAL_BATCH)]
        loss = model(**{key: torch.stack([sample[key] for sample in batch]) for key in batch[0]}).loss
        (loss / every).backward()
        means.append(loss.item())
        if step % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {"parameters": torch.cat([value.detach().flatten() for value in model.parameters()]), "means": means}


def train_each(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    return [train(folder=folder, **case) for case in cases]


def test_tokens_are_found_and_counted_at_each_stage(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        dict(stage=stage, model_name=name, division=division)
        for stage in (0, 1, 2, 3)
        for number, name in enumerate(MODELS)
        for index, division in enumerate((WHOLE, PARTS, EMPTY))
        if IS_THOROUGH or index == (stage + number) % 3
    ]
    cases += [dict(stage=stage, model_name="causal", division=WHOLE, every=2) for stage in (0, 1)]
    cases += [dict(stage=1, model_name="masked", division=PARTS, weight_by=lambda_weight)]
    expected = [train_alone(case["model_name"], case.get("every", 1)) for case in cases]
    results = run_ranks(2, train_each, cases, str(tmp_path))
    found = [[result["parameters"] for result in of_rank] for of_rank in results]
    assert_trained(found, cases, [each["parameters"] for each in expected], atol=1e-5)
    for of_rank in results:
        for case, result, wanted in zip(cases, of_rank, expected, strict=True):
            assert result["means"] == pytest.approx(wanted["means"], rel=1e-4), case


def lambda_weight(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] >= 0).sum()


class Pairs(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(5, generator=torch.Generator().manual_seed(index)), index % 3


def weighted_by_class(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, weight=torch.tensor([1.0, 5.0, 20.0]))


def class_weight(batch: Any) -> Tensor:
    return torch.tensor([1.0, 5.0, 20.0])[batch[1]].sum()


def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits @ logits.T * 9, torch.arange(len(logits)))


class Rare(Sentences):
    """Very few samples have labels that are ignored."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return sample if 8 <= index < 16 else {"input_ids": sample["input_ids"], "labels": sample["input_ids"]}


@unmeasured
def boost(dataset: Dataset, model: nn.Module, criterion: Any, **options: Any) -> Any:
    plugin = zero_plugin(0, GLOBAL_BATCH, max_micro_batch=8, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Booster(plugin=plugin).boost(model, optimizer, criterion, plugin.prepare_dataloader(dataset))


def refuse() -> None:
    torch.manual_seed(1)
    for criterion in (weighted_by_class, contrastive):
        with pytest.raises(ValueError, match="give weight_by"):
            boost(Pairs(), nn.Linear(5, 3), criterion)
    boost(Pairs(), nn.Linear(5, 3), contrastive, weight_by="samples")
    boost(Pairs(), nn.Linear(5, 3), weighted_by_class, weight_by=class_weight)
    *_, loader, _ = boost(Rare(), causal(), None)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(
        RuntimeError, match="has labels of -100, which the samples that were compared before training did not have"
    ):
        next(iterator)


def test_losses_whose_weights_cannot_be_found_are_refused() -> None:
    run_ranks(2, refuse)
