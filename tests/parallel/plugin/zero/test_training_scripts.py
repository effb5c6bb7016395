"""What training scripts for Colossal-AI do beside training works with HeteroZeroPlugin too."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from colossalai.nn.optimizer import Lamb
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from tests.parallel.plugin.zero.test_lowest_zero_stage import at_each_stage
from tests.support.harness import run_ranks
from tests.support.training import zero_plugin
from tests.support.zero_runs import (
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

DIVISION = [[3, 2], [1, 2]]


class Sentences(Dataset):
    """Sentences of unequal lengths as dicts, like the samples of data sets for transformers."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(1, 50, (8,), generator=generator)
        words[3 + index % 5 :] = 0
        return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": torch.tensor(index % 2)}


def make_transformer(recomputes: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = BertForSequenceClassification(
        BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=8)
    )
    model.train()
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def fine_tune(stage: int, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, recomputes: bool = True) -> Any:
    model = make_transformer(recomputes)
    optimizer = optimizer(model.parameters(), lr=0.05)
    return boosted(stage, model, optimizer, Sentences(), criterion=None, division=DIVISION).fit(own_loss)


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


@unmeasured
def fine_tune_each() -> tuple[list[torch.Tensor], torch.Tensor]:
    """A transformer that recomputes at each stage, and one that Colossal-AI's own optimizer trains."""
    return at_each_stage(fine_tune), fine_tune(1, Lamb, False)


def test_fine_tuning_a_transformer_equals_that_of_one_process() -> None:
    model = make_transformer()
    expected = fit(model, torch.optim.SGD(model.parameters(), lr=0.05), global_batches(Sentences(), 8), own_loss)
    (first, one), (second, other) = run_ranks(2, fine_tune_each)
    assert_trained([first, second], (0, 1, 2, 3), expected, atol=1e-5)
    assert one.isfinite().all() and torch.equal(one, other)


def refuse_unequal_collectives() -> None:
    class Synced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = make_model(), nn.SyncBatchNorm(3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

    with pytest.raises(ValueError, match="SyncBatchNorm"):
        boosted(1, Synced(), accumulation="per_rank")


def train_with_a_plain_loader(stage: int) -> None:
    plugin = zero_plugin(stage, 8)
    plain = plugin.prepare_dataloader(Numbered(), batch_size=4, shuffle=True)
    evaluation = plugin.prepare_dataloader(Numbered(), batch_size=4)
    model = make_model()
    optimizer = make_optimizer(model, "sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, criterion, loader, _ = Booster(plugin=plugin).boost(
            model, optimizer, nn.CrossEntropyLoss(), plain
        )
    (warning,) = (each for each in caught if "batch_size=4 is not used" in str(each.message))
    assert warning.filename == __file__  # the warning names the user's line
    inputs, targets = next(iter(DataLoader(Numbered(), 4)))
    with pytest.raises(RuntimeError, match="no forward pass with a batch of the loader"):
        optimizer.backward(criterion(model(inputs), targets))
    fit(model, optimizer, loader)
    assert loader.state_dict()["global_batches_done"] == 4
    model.eval()
    with torch.no_grad():
        assert sum(len(model(inputs)) for inputs, _ in evaluation) == 15


def only_evaluate() -> None:
    for stage in (0, 2, 3):
        model = Booster(plugin=zero_plugin(stage, 8)).boost(make_model())[0]
        model.eval()
        assert model(torch.zeros(2, 8)).shape == (2, 3), stage


@unmeasured
def do_each() -> None:
    refuse_unequal_collectives()
    for stage in (0, 3):
        train_with_a_plain_loader(stage)
    only_evaluate()


def test_loaders_with_a_batch_size_models_without_an_optimizer_and_unequal_collectives() -> None:
    run_ranks(2, do_each)


@unmeasured
def train_without_labels(stage: int) -> bool:
    """Train with a rank without samples, whose placeholder sample has a loss that is not a number.

    The loss is a mean over zero labels. Returns whether all parameters are finite.
    """
    _, _, model, optimizer, criterion, loader, _ = boosted(stage, division=[[8], [0]])
    for inputs, targets in loader:
        labels = targets if loader.current.samples else torch.full_like(targets, criterion.ignore_index)
        loss = criterion(model(inputs), labels)
        assert loss.isfinite() or not loader.current.samples
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return bool(flat(model).isfinite().all())


def test_a_placeholder_whose_loss_is_not_a_number_has_no_effect() -> None:
    """Parameters stay finite at each stage on both ranks."""
    assert run_ranks(2, at_each_stage, train_without_labels) == [[True] * 4] * 2


def count_leftovers(stage: int) -> tuple[int, int]:
    """How many tensors the plugin made while it measured, and how many of them still exist."""
    seen: list[weakref.ref] = []

    class Watched(Numbered):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = super().__getitem__(index)
            seen.append(weakref.ref(inputs))
            return inputs, targets

    model = make_model()
    model.second.register_forward_hook(lambda module, inputs, output: seen.append(weakref.ref(output)))
    kept = boosted(stage, model, data=Watched())
    gc.collect()
    assert kept
    return len(seen), sum(each() is not None for each in seen)


def test_tensors_of_measuring_are_freed() -> None:
    for counts in run_ranks(2, at_each_stage, count_leftovers):
        for stage, (made, left) in enumerate(counts):
            assert made > 8 and left == 0, stage


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


@unmeasured
def refused_optimizers() -> list[str]:
    """By stage, with an optimizer that looks at whole matrices: the stage that "auto" chooses, or the error."""
    answers = []
    for stage in (1, 2, 3, "auto"):
        try:
            answers.append(str(boosted(stage, None, adafactor, profile_cache="").plugin.stage))
        except ValueError as error:
            answers.append(str(error))
    return answers


def test_optimizers_of_whole_matrices_are_not_sharded() -> None:
    for answers in run_ranks(2, refused_optimizers):
        for stage, words in zip((1, 2, 3), answers, strict=False):
            assert words.startswith(f"Adafactor cannot be sharded by ZeRO (stage={stage}), because"), words
        assert answers[3] == "0"
