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
from tests.support.checks import Checks, of_all_ranks
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

checks = Checks()
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


@checks.on(2)
@unmeasured
def fine_tuning_a_transformer_equals_that_of_one_process() -> None:
    """A transformer that recomputes at each stage, and one that Colossal-AI's own optimizer trains."""
    model = make_transformer()
    expected = fit(model, torch.optim.SGD(model.parameters(), lr=0.05), global_batches(Sentences(), 8), own_loss)
    assert_trained([at_each_stage(fine_tune)], (0, 1, 2, 3), expected, atol=1e-5)
    one, other = of_all_ranks(fine_tune(1, Lamb, False))
    assert one.isfinite().all() and torch.equal(one, other)


@checks.on(2)
@unmeasured
def unequal_collectives_are_refused() -> None:
    class Synced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = make_model(), nn.SyncBatchNorm(3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

    with pytest.raises(ValueError, match="SyncBatchNorm"):
        boosted(1, Synced(), accumulation="per_rank")


@checks.on(2, 0)
@checks.on(2, 3)
@unmeasured
def a_loader_with_a_batch_size_is_used(stage: int) -> None:
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


@checks.on(2)
def a_model_without_an_optimizer_is_evaluated() -> None:
    for stage in (0, 2, 3):
        model = Booster(plugin=zero_plugin(stage, 8)).boost(make_model())[0]
        model.eval()
        assert model(torch.zeros(2, 8)).shape == (2, 3), stage


@checks.on(2)
@unmeasured
def a_placeholder_whose_loss_is_not_a_number_has_no_effect() -> None:
    """A rank without samples has a placeholder sample, and the loss is a mean over zero labels."""
    for stage in range(4):
        _, _, model, optimizer, criterion, loader, _ = boosted(stage, division=[[8], [0]])
        for inputs, targets in loader:
            labels = targets if loader.current.samples else torch.full_like(targets, criterion.ignore_index)
            loss = criterion(model(inputs), labels)
            assert loss.isfinite() or not loader.current.samples
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert flat(model).isfinite().all(), stage


@checks.on(2, 0)
@checks.on(2, 1)
@checks.on(2, 2)
@checks.on(2, 3)
def tensors_of_measuring_are_freed(stage: int) -> None:
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
    assert kept and len(seen) > 8
    assert all(each() is None for each in seen)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


@checks.on(2)
@unmeasured
def optimizers_of_whole_matrices_are_not_sharded() -> None:
    for stage in (1, 2, 3):
        with pytest.raises(ValueError, match=rf"^Adafactor cannot be sharded by ZeRO \(stage={stage}\), because"):
            boosted(stage, None, adafactor)
    assert boosted("auto", None, adafactor).plugin.stage == 0


test_on_ranks = checks.test()
