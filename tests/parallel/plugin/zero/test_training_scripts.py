"""What training scripts for Colossal-AI do beside training works with HeteroZeroPlugin too: transformers, loaders with
a batch size, frozen parameters, adapters (LoRA), and an optimizer of some of the parameters only."""

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.nn.optimizer import Lamb
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from tests.support import zero_runs
from tests.support.checks import of_all_ranks, on
from tests.support.training import zero_plugin
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
