"""Frozen parameters, adapters (LoRA) and an optimizer of some of the parameters only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from colossalai.booster import Booster
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from tests.parallel.plugin.zero.test_training_scripts import Sentences, make_transformer, own_loss
from tests.support.checks import Checks
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import zero_plugin
from tests.support.zero_runs import (
    Numbered,
    assert_trained,
    boosted,
    fit,
    flat,
    global_batches,
    make_model,
    sizes_by_rank,
    unmeasured,
)

checks = Checks()
GLOBAL_BATCH = 8
DIVISION = {2: [[3, 2], [1, 2]], 3: [[2, 1], [1, 0], [3, 1]]}
MAX_NORM = 0.05


def make_lora(booster: Booster | None = None) -> nn.Module:
    """BERT with adapters of random weights; only they and the classifier are trained."""
    config = LoraConfig(task_type="SEQ_CLS", r=3, lora_alpha=6, lora_dropout=0.0, init_lora_weights=False)
    base = make_transformer()
    torch.manual_seed(7)
    if booster is None:
        return get_peft_model(base, config)
    return booster.enable_lora(base, lora_config=config)


def make_lora_optimizer(model: nn.Module, all_parameters: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [value for value in model.parameters() if all_parameters or value.requires_grad], lr=0.05, momentum=0.9
    )


def train_lora(stage: int | str, all_parameters: bool, max_norm: float, folder: str) -> list[torch.Tensor]:
    """Train an epoch, save, train, load, train again. Returns the parameters after each of both trainings."""
    plugin = zero_plugin(stage, GLOBAL_BATCH, max_norm=max_norm)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(Sentences())
    model = make_lora(booster)
    optimizer = make_lora_optimizer(model, all_parameters)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    division = DIVISION[torch.distributed.get_world_size()]
    loader.divide_by(lambda samples: sizes_by_rank(division, samples))
    found = [fit(model, optimizer, loader, own_loss)]
    booster.save_lora_as_pretrained(model, f"{folder}/adapters")
    booster.save_model(model, f"{folder}/model.pt")
    booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
    torch.distributed.barrier()
    for _ in range(2):
        found.append(fit(model, optimizer, loader, own_loss))
        booster.load_model(model, f"{folder}/model.pt")
        booster.load_optimizer(optimizer, f"{folder}/optimizer")
    return found


def train_lora_alone(epochs: int, max_norm: float) -> nn.Module:
    model = make_lora()
    optimizer = make_lora_optimizer(model, all_parameters=False)
    fit(model, optimizer, global_batches(Sentences(), GLOBAL_BATCH) * epochs, own_loss, max_norm)
    return model


LORA_CASES: list[tuple[int | str, bool, float]] = [
    *((stage, False, 0.0) for stage in (0, 1, 2)),
    (0, True, MAX_NORM),
]
"""Stage, whether the optimizer has the frozen parameters, and the norm to clip to."""
if IS_THOROUGH:
    LORA_CASES += [("auto", False, 0.0)]


@unmeasured
def train_each_lora(folder: str) -> list[list[torch.Tensor]]:
    return [train_lora(*case, f"{folder}/{number}") for number, case in enumerate(LORA_CASES)]


@pytest.mark.parametrize("ranks", [2, 3] if IS_THOROUGH else [2])
def test_adapters_are_trained_as_in_one_process(ranks: int, tmp_path: Path) -> None:
    for number in range(len(LORA_CASES)):
        (tmp_path / str(number)).mkdir()
    results = run_ranks(ranks, train_each_lora, str(tmp_path), timeout_seconds=300)
    # A model that was saved at one stage can be loaded at any other: names and shapes are the same.
    weights = [torch.load(tmp_path / str(number) / "model.pt", weights_only=True) for number in range(len(LORA_CASES))]
    shapes = [{name: value.shape for name, value in each.items()} for each in weights]
    assert all(each == shapes[0] for each in shapes)
    for number, (stage, _, max_norm) in enumerate(LORA_CASES):
        models = [train_lora_alone(epochs, max_norm) for epochs in (1, 2)]
        once, twice = map(flat, models)
        cases = [f"stage {stage}, {when}" for when in ("saved", "trained on", "loaded and trained on")]
        assert_trained([result[number] for result in results], cases, (once, twice, twice), atol=1e-5)
        saved = PeftModel.from_pretrained(make_transformer(), str(tmp_path / str(number) / "adapters"))
        trained = {name: value for name, value in models[0].named_parameters() if value.requires_grad}
        there = dict(saved.named_parameters())
        assert trained and trained.keys() <= there.keys()
        for name, value in trained.items():
            torch.testing.assert_close(there[name], value, rtol=1e-4, atol=1e-5, msg=f"stage {stage}: {name}")


def of_the_last_layer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.second.parameters(), lr=0.1, momentum=0.9)


@checks.on(2)
@unmeasured
def parameters_that_are_not_in_the_optimizer_stay_as_they_are() -> None:
    """The optimizer has the last layer only, although no parameter is frozen."""
    model = make_model()
    expected = fit(model, of_the_last_layer(model), global_batches(Numbered(), GLOBAL_BATCH))
    found = [boosted(stage, None, of_the_last_layer, division=DIVISION[2]).fit() for stage in (0, 3)]
    assert_trained([found], (0, 3), expected)


class Angular(nn.Module):
    """A criterion with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs * self.scale, targets)


@checks.on(2)
def optimizers_that_would_train_something_else_are_refused() -> None:
    for stage in (0, 3, "auto"):
        model, criterion = make_model(), Angular()
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        with pytest.raises(ValueError, match="1 of 7 parameters of the optimizer are not in the model"):
            boosted(stage, model, optimizer, criterion=criterion)
    for stage in (0, 1):
        plugin = zero_plugin(stage, GLOBAL_BATCH)
        booster = Booster(plugin=plugin)
        base = make_transformer()
        optimizer = torch.optim.SGD(base.parameters(), lr=0.1)
        model = booster.enable_lora(base, lora_config=LoraConfig(task_type="SEQ_CLS", r=2))
        with pytest.raises(ValueError, match=r"such as .*lora_A.*are not in the optimizer"):
            booster.boost(model, optimizer, dataloader=plugin.prepare_dataloader(Sentences()))


@checks.on(2)
def what_stage_3_cannot_do_is_refused() -> None:
    plugin = zero_plugin(3, GLOBAL_BATCH)
    with pytest.raises(ValueError, match="LoRA at stage 3 is not possible"):
        Booster(plugin=plugin).enable_lora(make_transformer(), lora_config=LoraConfig(task_type="SEQ_CLS", r=2))
    with pytest.raises(RuntimeError, match=r"on the meta device, .*; create the model on a device"):
        boosted(3, make_model().to("meta"))


test_on_ranks = checks.test()
