"""What training scripts for Colossal-AI do beside training works with HeteroZeroPlugin too."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import Lamb
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from tests.parallel.plugin.zero.test_lowest_zero_stage import at_each_stage, stage_of
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import zero_plugin
from tests.support.zero_runs import (
    Numbered,
    assert_trained,
    fit,
    flat,
    global_batches,
    make_model,
    make_optimizer,
    sizes_by_rank,
    unmeasured,
)

DIVISIONS = {2: [[3, 2], [1, 2]], 3: [[2, 1], [1, 0], [3, 1]]}
"""For each number of ranks, the sizes of the micro-batches of each rank for a global batch of 8."""


def train_from(folder: str, stage: int | str, shard: bool, resume: bool) -> dict[str, Any]:
    """Train two epochs and save a checkpoint during the second; if ``resume``, continue from that checkpoint."""
    plugin = zero_plugin(stage, 8)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(Numbered(), shuffle=True, seed=11)
    model = make_model()
    if resume:
        for value in model.parameters():
            value.data.add_(1.0)
    optimizer = make_optimizer(model, "adamw")
    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=2 * len(loader), warmup_steps=2)
    model, optimizer, criterion, loader, schedule = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), loader, schedule
    )
    division = DIVISIONS[torch.distributed.get_world_size()]
    loader.divide_by(lambda samples: sizes_by_rank(division, samples))
    suffix = "" if shard else ".pt"
    paths = [f"{folder}/{name}{suffix}" for name in ("model", "optimizer")]
    first, steps = 0, 0
    if resume:
        booster.load_model(model, paths[0])
        booster.load_optimizer(optimizer, paths[1])
        booster.load_lr_scheduler(schedule, f"{folder}/schedule.pt")
        state = torch.load(f"{folder}/loader.pt")
        loader.load_state_dict(state)
        first = state["epoch"]
    rates = []
    for epoch in range(first, 2):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            booster.backward(criterion(model(inputs), targets), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if not loader.current.is_last:
                continue
            steps += 1
            rates.append(optimizer.param_groups[0]["lr"])
            if not resume and steps == 6:
                booster.save_model(model, paths[0], shard=shard)
                booster.save_optimizer(optimizer, paths[1], shard=shard)
                booster.save_lr_scheduler(schedule, f"{folder}/schedule.pt")
                if torch.distributed.get_rank() == 0:
                    torch.save(loader.state_dict(), f"{folder}/loader.pt")
    return {"parameters": flat(model), "rates": rates, "stage": plugin.stage}


Case = tuple[int | str, bool]
"""Stage, and whether checkpoints are sharded."""


@unmeasured
def train_from_each(folder: str, cases: list[Case], resume: bool) -> list[dict[str, Any]]:
    results = []
    for stage, shard in cases:
        place = Path(folder, f"{stage}, {shard}")
        place.mkdir(exist_ok=True)
        results.append(train_from(str(place), stage, shard, resume))
    return results


def test_resuming_from_a_checkpoint(tmp_path: Path) -> None:
    whether_sharded = (False, True) if IS_THOROUGH else (True,)
    cases: list[Case] = [(stage, shard) for stage in (0, 1, 2, 3) for shard in whether_sharded] + [("auto", False)]
    sharded = [case for case in cases if case[1]]
    whole = dict(zip(cases, run_ranks(2, train_from_each, str(tmp_path), cases, False)[0], strict=True))
    # Training resumes on the same number of ranks, and on more.
    for ranks, resumed in ((2, cases), (3, sharded)):
        for rank, results in enumerate(run_ranks(ranks, train_from_each, str(tmp_path), resumed, True)):
            for case, result in zip(resumed, results, strict=True):
                assert result["stage"] == (0 if case[0] == "auto" else case[0]), (case, rank, ranks)
                assert result["rates"] == pytest.approx(whole[case]["rates"][-2:]), (case, rank, ranks)
            # Sums in another order have other rounding errors, and AdamW amplifies them.
            rtol, atol = (1e-3, 1e-4) if ranks != 2 else (1e-5, 1e-6)
            size = min(len(result["parameters"]) for result in (*results, *whole.values()))  # FSDP pads
            expected = [whole[case]["parameters"][:size] for case in resumed]
            assert_trained([[result["parameters"] for result in results]], resumed, expected, rtol, atol)


def save_and_load(folder: str, stage: int | str, precision: str, fits: int) -> int:
    """Let steps below stage ``fits`` run out of memory; save and load at the chosen stage. Returns that stage."""

    def step(model: nn.Module, criterion: Callable, batch: Any) -> torch.Tensor:
        if stage_of(model) < fits:
            raise MemoryError("no room")
        return criterion(model(batch[0]), batch[1])

    plugin = zero_plugin(stage, 8, precision=precision, training_step=step)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(Numbered())
    model = make_model()
    model, optimizer, criterion, loader, _ = booster.boost(
        model, make_optimizer(model, "adamw"), nn.CrossEntropyLoss(), loader
    )
    expected = fit(model, optimizer, loader, lambda model, batch: criterion(model(batch[0]), batch[1]))
    for shard in (False, True):
        booster.save_model(model, f"{folder}/model{shard}", shard=shard)
        booster.save_optimizer(optimizer, f"{folder}/optimizer{shard}", shard=shard)
        torch.distributed.barrier()
        booster.load_model(model, f"{folder}/model{shard}")
        booster.load_optimizer(optimizer, f"{folder}/optimizer{shard}")
        assert torch.equal(flat(model), expected)
    return plugin.stage


@unmeasured
def save_and_load_each(folder: str) -> list[int]:
    return [save_and_load(folder, 0, "fp16", 0), save_and_load(folder, "auto", "fp32", 3)]


def test_checkpoints_of_nested_wrappers_and_of_a_stage_that_auto_chooses_can_be_loaded(tmp_path: Path) -> None:
    assert run_ranks(2, save_and_load_each, str(tmp_path)) == [[0, 3]] * 2


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
    plugin = zero_plugin(stage, 8)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(Sentences())
    model = make_transformer(recomputes)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer(model.parameters(), lr=0.05), dataloader=loader)
    loader.divide_by(lambda samples: sizes_by_rank([[3, 2], [1, 2]], samples))
    return fit(model, optimizer, loader, own_loss)


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


def boosted(
    stage: int | str, model: nn.Module | None = None, dataset: Dataset | None = None, **options: Any
) -> tuple[Any, Any, Any, Any]:
    plugin = zero_plugin(stage, 8, **options)
    loader = plugin.prepare_dataloader(dataset or Numbered())
    model = model or make_model()
    optimizer = make_optimizer(model, "sgd")
    return Booster(plugin=plugin).boost(model, optimizer, nn.CrossEntropyLoss(), loader)[:4]


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
    model, optimizer, criterion, loader = boosted(stage)
    loader.divide_by(lambda samples: sizes_by_rank([[8], [0]], samples))
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
    kept = boosted(stage, model, Watched())
    gc.collect()
    assert kept
    return len(seen), sum(each() is not None for each in seen)


def test_tensors_of_measuring_are_freed() -> None:
    for counts in run_ranks(2, at_each_stage, count_leftovers):
        for stage, (made, left) in enumerate(counts):
            assert made > 8 and left == 0, stage


@unmeasured
def refused_optimizers() -> list[str]:
    """By stage, with an optimizer that looks at whole matrices: the stage that "auto" chooses, or the error."""
    answers = []
    for stage in (1, 2, 3, "auto"):
        model = make_model()
        plugin = zero_plugin(stage, 8, profile_cache="")
        loader = plugin.prepare_dataloader(Numbered())
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
        try:
            Booster(plugin=plugin).boost(model, optimizer, nn.CrossEntropyLoss(), loader)
            answers.append(str(plugin.stage))
        except ValueError as error:
            answers.append(str(error))
    return answers


def test_optimizers_of_whole_matrices_are_not_sharded() -> None:
    for answers in run_ranks(2, refused_optimizers):
        for stage, words in zip((1, 2, 3), answers, strict=False):
            assert words.startswith(f"Adafactor cannot be sharded by ZeRO (stage={stage}), because"), words
        assert answers[3] == "0"
