"""What training scripts for Colossal-AI do beside training works with HeteroZeroPlugin too: transformers, loaders with
a batch size, frozen parameters, adapters (LoRA), an optimizer of some of the parameters only, and checkpoints, which
continue the training as if it had not been interrupted, or are refused at another ZeRO stage."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.interface import OptimizerWrapper
from colossalai.nn.optimizer import Lamb
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from colossal_hetero.profiling.preserved_state import inner_optimizer
from tests.support import zero_runs
from tests.support.checks import of_all_ranks, on
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import load_checkpoint, save_checkpoint, zero_plugin
from tests.support.zero_runs import Numbered, assert_trained, boosted, fit, flat, global_batches, make_model, unmeasured

GLOBAL_BATCH = 8
DIVISION = [[3, 2], [1, 2]]


class Sentences(Dataset):
    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(1, 50, (8,), generator=torch.Generator().manual_seed(index))
        words[3 + index % 5 :] = 0
        return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": torch.tensor(index % 2)}


def make_transformer(recomputes: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    drops = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(BertConfig(**sizes, **drops, max_position_embeddings=8))
    model.train()
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def fine_tune(stage: int, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, recomputes: bool = True) -> Any:
    model = make_transformer(recomputes)
    made = optimizer(model.parameters(), lr=0.05)
    return boosted(stage, model, made, Sentences(), criterion=None, division=DIVISION).fit(own_loss)


@on(2)
@unmeasured
def fine_tuning_a_transformer_equals_that_of_one_process() -> None:
    model = make_transformer()
    expected = fit(model, torch.optim.SGD(model.parameters(), lr=0.05), global_batches(Sentences(), 8), own_loss)
    stages = (0, 1, 2, 3)
    assert_trained([[fine_tune(stage) for stage in stages]], stages, expected, atol=1e-5)
    one, other = of_all_ranks(fine_tune(1, Lamb, False))
    assert one.isfinite().all() and torch.equal(one, other)


@on(2, 0)
@on(2, 3)
@unmeasured
def a_loader_with_a_batch_size_is_used(stage: int) -> None:
    plugin = zero_plugin(stage, GLOBAL_BATCH)
    plain = plugin.prepare_dataloader(Numbered(), batch_size=4, shuffle=True)
    evaluation = plugin.prepare_dataloader(Numbered(), batch_size=4)
    model = make_model()
    optimizer, criterion = zero_runs.make_optimizer(model, "sgd"), nn.CrossEntropyLoss()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, _, loader, _ = Booster(plugin=plugin).boost(model, optimizer, criterion, plain)
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


@on(2)
def a_model_without_an_optimizer_is_evaluated() -> None:
    for stage in (0, 2, 3):
        model = Booster(plugin=zero_plugin(stage, 8)).boost(make_model())[0]
        assert model.eval()(torch.zeros(2, 8)).shape == (2, 3), stage


@on(2)
@unmeasured
def a_placeholder_whose_loss_is_not_a_number_has_no_effect() -> None:
    """A rank without samples has a placeholder sample, and the loss is a mean over zero labels."""
    for stage in range(4):
        run = boosted(stage, division=[[8], [0]])

        def loss_of(model: nn.Module, batch: Any, run: Any = run) -> torch.Tensor:
            inputs, targets = batch
            has_samples = run.loader.current.samples > 0
            labels = targets if has_samples else torch.full_like(targets, run.criterion.ignore_index)
            loss = run.criterion(model(inputs), labels)
            assert loss.isfinite() or not has_samples
            return loss

        assert run.fit(loss_of).isfinite().all(), stage


@on(2)
def tensors_of_measuring_are_freed() -> None:
    for stage in range(4):
        seen: list[weakref.ref] = []

        class Watched(Numbered):
            def __getitem__(self, index: int, seen: Any = seen) -> tuple[torch.Tensor, torch.Tensor]:
                inputs, targets = super().__getitem__(index)
                seen.append(weakref.ref(inputs))
                return inputs, targets

        model = make_model()
        model.second.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(weakref.ref(output)))
        kept = boosted(stage, model, data=Watched())
        gc.collect()
        assert kept and len(seen) > 8 and all(each() is None for each in seen), stage


@on(2)
@unmeasured
def an_optimizer_of_whole_matrices_is_not_sharded() -> None:
    assert boosted("auto", None, lambda model: torch.optim.Adafactor(model.parameters())).plugin.stage == 0


def make_lora(booster: Booster | None = None) -> nn.Module:
    config = LoraConfig(task_type="SEQ_CLS", r=3, lora_alpha=6, lora_dropout=0.0, init_lora_weights=False)
    base = make_transformer()
    torch.manual_seed(7)
    return get_peft_model(base, config) if booster is None else booster.enable_lora(base, lora_config=config)


def sgd_of_adapters(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.05, momentum=0.9)


@on(2)
@unmeasured
def adapters_are_trained_as_in_one_process(folder: Path) -> None:
    alone, shapes = make_lora(), []
    optimizer: Any = sgd_of_adapters(alone)
    once, twice = (fit(alone, optimizer, global_batches(Sentences(), GLOBAL_BATCH), own_loss) for _ in range(2))
    for stage in (0, 1, 2):
        plugin, path = zero_plugin(stage, GLOBAL_BATCH), folder / str(stage)
        booster, loader = Booster(plugin=plugin), plugin.prepare_dataloader(Sentences())
        model = make_lora(booster)
        model, optimizer, _, loader, _ = booster.boost(model, sgd_of_adapters(model), dataloader=loader)
        loader.divide_by(lambda samples: zero_runs.sizes_by_rank(DIVISION, samples))
        found = [fit(model, optimizer, loader, own_loss)]
        path.mkdir(exist_ok=True)
        booster.save_lora_as_pretrained(model, str(path / "adapters"))
        booster.save_model(model, str(path / "model.pt"))
        booster.save_optimizer(optimizer, str(path / "optimizer"), shard=True)
        dist.barrier()
        for _ in range(2):
            found.append(fit(model, optimizer, loader, own_loss))
            booster.load_model(model, str(path / "model.pt"))
            booster.load_optimizer(optimizer, str(path / "optimizer"))
        cases = [f"stage {stage}, {when}" for when in ("saved", "trained on", "loaded and trained on")]
        assert_trained([found], cases, (once, twice, twice), atol=1e-5)
        saved = PeftModel.from_pretrained(make_transformer(), str(path / "adapters"))
        assert_trained([[flat(saved)]], [cases[0]], once, atol=1e-5)
        # A model that was saved at one stage can be loaded at any other: names and shapes are the same.
        weights = torch.load(path / "model.pt", weights_only=True)
        shapes.append({name: value.shape for name, value in weights.items()})
        assert shapes[-1] == shapes[0]


def of_the_last_layer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.second.parameters(), lr=0.1, momentum=0.9)


@on(2)
@unmeasured
def parameters_that_are_not_in_the_optimizer_stay_as_they_are() -> None:
    model = make_model()
    expected = fit(model, of_the_last_layer(model), global_batches(Numbered(), GLOBAL_BATCH))
    found = [boosted(stage, None, of_the_last_layer, division=DIVISION).fit() for stage in (0, 3)]
    assert_trained([found], (0, 3), expected)


# Checkpoints ---------------------------------------------------------------------------------------------------------


STEPS_BEFORE = 2  # of the second epoch, before a checkpoint is saved
DIVISIONS = {2: [[3, 2], [1, 2]], 3: [[2, 1], [1, 0], [3, 1]]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(13), nn.Linear(13, 13)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


class Tower(nn.Module):
    """Blocks between layers of the model itself, some with equal shapes: if a checkpoint's parameters are taken in
    another order, the shapes alone do not show it. The first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(7, 13).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mix, self.last = nn.Linear(13, 13), nn.Linear(13, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs[:, :7])
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(torch.tanh(self.mix(hidden)))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    # Files of stage 2 are those of stage 1.
    **{f"stage {stage}": (stage, {}) for stage in ((0, 1, 2, 3) if IS_THOROUGH else (0, 1, 3))},
    "stage 3 in blocks": (3, {"auto_wrap_policy": ModuleWrapPolicy({Block})}),
}
"""By name: stage, and options of the plugin."""


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices, rest = ([v for v in model.parameters() if (v.ndim > 1) == wanted] for wanted in (True, False))
    groups: Any = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    # A large eps, because a division by numbers near 0 amplifies the rounding errors of another order of sums.
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.05, eps=1e-3)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


class Run:
    def __init__(self, layout: str, **more: Any) -> None:
        (stage, options), model = LAYOUTS[layout], Tower()
        fixed = dict(division=DIVISIONS[dist.get_world_size()], schedule=make_schedule, max_micro_batch=8)
        run = boosted(stage, model, make_optimizer(model), **fixed, **options, **more)
        _, self.booster, self.model, self.optimizer, _, self.loader, self.schedule = run

    def train(self, epoch: int, steps: int | None = None) -> None:
        """``steps`` optimizer steps of an epoch, or all that are left of it."""
        self.loader.set_epoch(epoch)
        fit(self.model, self.optimizer, self.batches(steps), schedule=self.schedule)

    def batches(self, steps: int | None) -> Iterator[Any]:
        done = 0
        for batch in self.loader:
            yield batch
            done += self.loader.current.is_last
            if done == steps:
                return

    def save(self, folder: Path, sharded: bool) -> None:
        save_checkpoint(self, folder, sharded)
        self.booster.save_lr_scheduler(self.schedule, str(folder / "schedule.pt"))
        if dist.get_rank() == 0:
            torch.save(self.loader.state_dict(), folder / "loader.pt")
        dist.barrier()

    def load(self, folder: Path, sharded: bool) -> None:
        load_checkpoint(self, folder, sharded)
        self.booster.load_lr_scheduler(self.schedule, str(folder / "schedule.pt"))
        self.loader.load_state_dict(torch.load(folder / "loader.pt"))

    def states(self) -> list[torch.Tensor]:
        inner = inner_optimizer(self.optimizer)
        found = [inner.state[value] for group in inner.param_groups for value in group["params"]]
        return [each[key] for each in found for key in sorted(each) if isinstance(each[key], torch.Tensor)]

    def spoil(self) -> None:
        """Change all weights, states and options, so that what is not loaded shows."""
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                group["lr"], group["weight_decay"] = 7.0, 3.0
                for value in group["params"]:
                    value.add_(1.0)
            for entry in self.states():
                entry.add_(5.0)


def can_load(source: str, target: str) -> bool:
    """True if parameters have the same numbers: at stage 0 frozen ones have some, and at stage 3 names count."""
    stages = LAYOUTS[source][0], LAYOUTS[target][0]
    return stages[0] == stages[1] or set(stages) == {1, 2}


@unmeasured
def exchange(place: Path) -> dict[str, torch.Tensor]:
    runs = {layout: Run(layout) for layout in LAYOUTS}
    for layout, run in runs.items():
        run.train(0)
        run.train(1, STEPS_BEFORE)
        for sharded in (False, True):
            run.save(place / layout, sharded)
    found = {}
    for number, (target, run) in enumerate(runs.items()):
        for other, source in enumerate(LAYOUTS):
            for sharded in (False, True) if IS_THOROUGH else ((number + other) % 2 == 1,):
                run.spoil()
                if not can_load(source, target):
                    stage, _ = LAYOUTS[source]
                    with pytest.raises(RuntimeError, match=f"ZeRO stage {stage}.*; use stage={stage}, the model"):
                        run.load(place / source, sharded)
                    continue
                run.load(place / source, sharded)
                run.train(1)
                found[f"{source}, {target}, {sharded}"] = flat(run.model)
    return found


@unmeasured
def resume(place: Path) -> dict[str, torch.Tensor]:
    found = {}
    for layout in LAYOUTS:
        run = Run(layout)
        run.load(place / layout, True)
        run.train(1)
        found[layout] = flat(run.model)
    return found


def test_training_continues_at_the_same_stage_and_on_more_ranks(tmp_path: Path) -> None:
    model = Tower()
    optimizer = make_optimizer(model)
    expected = fit(model, optimizer, global_batches(Numbered(), 8) * 2, schedule=make_schedule(optimizer))
    for ranks, function in ((2, exchange), (3, resume)):
        for found in run_ranks(ranks, function, tmp_path, timeout_seconds=280):
            assert len(found) >= len(LAYOUTS)
            assert_trained([list(found.values())], [f"{case}, {ranks} ranks" for case in found], expected, atol=1e-5)


@on(2)
@unmeasured
def nested_wrappers_are_loaded_and_what_is_no_checkpoint_is_refused(folder: Path) -> None:
    """In fp16 and at stage 0, a wrapper is in another one."""
    run = Run("stage 0", precision="fp16")
    run.train(0)
    before = [value.clone() for value in (*run.states(), flat(run.model))]
    for sharded in (False, True):
        run.save(folder, sharded)
        run.spoil()
        run.load(folder, sharded)
        for value, wanted in zip((*run.states(), flat(run.model)), before, strict=True):
            assert torch.equal(value, wanted)
    if dist.get_rank() == 0:
        torch.save({"first.weight": torch.zeros(2)}, folder / "other.pt")
    dist.barrier()
    for path, words in (
        ("none", "no such file"),
        (".", "has no index file"),
        ("model", "no file of parameter groups"),
        ("other.pt", "is not a checkpoint of an optimizer"),
    ):
        with pytest.raises(RuntimeError, match=words):
            run.booster.load_optimizer(run.optimizer, str(folder / path))
    unboosted = OptimizerWrapper(torch.optim.SGD(Tower().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="is not one that booster"):
        run.booster.load_optimizer(unboosted, str(folder / "optimizer"))
