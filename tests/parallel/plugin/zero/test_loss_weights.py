"""Losses that are a mean over tokens: each micro-batch gets the weight of its tokens, as one process gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from tests.support.checks import Checks
from tests.support.random_examples import IS_THOROUGH
from tests.support.zero_runs import assert_trained, boosted, flat, global_batches, unmeasured

checks = Checks()
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
WEIGHTS = {"causal": "next_tokens", "masked": "tokens"}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def batches(loader: Any) -> Iterator[dict[str, Tensor]]:
    done = 0
    while done < STEPS:
        for batch in loader:
            yield batch
            done += loader.is_last


def train(
    stage: int, model_name: str, division: list[list[int]], weight_by: Any, every: int = 1
) -> tuple[Tensor, list[float]]:
    """The parameters, and the mean loss of each global batch, of which ``every`` so many are accumulated."""
    options: dict[str, Any] = dict(criterion=None, division=division, max_micro_batch=8, weight_by=weight_by)
    _, booster, model, optimizer, _, loader, _ = boosted(stage, MODELS[model_name](), sgd, Sentences(), **options)
    means = []
    for batch in batches(loader):
        loss = model(**batch).loss
        booster.backward(loss / every, optimizer)
        mean = loader.mean(loss)
        if loader.is_last:
            means.append(mean)
            if len(means) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return flat(model), means


def train_alone(model_name: str, every: int = 1) -> tuple[Tensor, list[float]]:
    model, means = MODELS[model_name](), []
    optimizer = sgd(model)
    for batch in 2 * global_batches(Sentences(), GLOBAL_BATCH):
        loss = model(**batch).loss
        (loss / every).backward()
        means.append(loss.item())
        if len(means) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return flat(model), means


@checks.on(2)
@unmeasured
def tokens_are_counted_at_each_stage() -> None:
    cases: list[dict[str, Any]] = [
        dict(stage=stage, model_name=name, division=division, weight_by=WEIGHTS[name])
        for stage in (0, 1, 2, 3)
        for number, name in enumerate(MODELS)
        for index, division in enumerate((WHOLE, PARTS, EMPTY))
        if IS_THOROUGH or index == (stage + number) % 3
    ]
    cases += [
        dict(stage=stage, model_name="causal", division=WHOLE, weight_by="next_tokens", every=2) for stage in (0, 1)
    ]
    cases += [dict(stage=1, model_name="masked", division=PARTS, weight_by=lambda_weight)]
    for case in cases:
        parameters, means = train(**case)
        expected, wanted = train_alone(case["model_name"], case.get("every", 1))
        assert_trained([[parameters]], [case], expected, atol=1e-5)
        assert means == pytest.approx(wanted, rel=1e-4), case


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


@checks.on(2)
@unmeasured
def losses_whose_weights_cannot_be_found_are_refused() -> None:
    torch.manual_seed(1)
    for criterion in (weighted_by_class, contrastive):
        with pytest.raises(ValueError, match="give weight_by"):
            boosted(0, nn.Linear(5, 3), sgd, Pairs(), criterion=criterion, max_micro_batch=8)
    for make in MODELS.values():
        with pytest.raises(ValueError, match=r"give weight_by.*causal language models"):
            boosted(0, make(), sgd, Sentences(), criterion=None, max_micro_batch=8)
    for criterion, weight_by in ((contrastive, "samples"), (weighted_by_class, class_weight)):
        boosted(0, nn.Linear(5, 3), sgd, Pairs(), criterion=criterion, max_micro_batch=8, weight_by=weight_by)
    iterator = iter(boosted(0, causal(), sgd, Rare(), criterion=None, max_micro_batch=8).loader)
    next(iterator)
    with pytest.raises(
        RuntimeError, match="has labels of -100, which the samples that were compared before training did not have"
    ):
        next(iterator)


test_on_ranks = checks.test()
