"""What cannot be saved or resumed says so in words; and kinds of states that are less common than AdamW's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from colossalai.nn.optimizer import Lamb
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_hetero import CheckpointConfig
from tests.support.checkpoint_runs import Run, boosted, different_tensors, gathered, hybrid, load, saving, train
from tests.support.harness import run_ranks
from tests.support.training import adamw, sgd, zero_plugin


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=0.01)


def boost_fully_sharded(folder: Path) -> tuple[Any, ...]:
    plugin = zero_plugin(3, 4, max_micro_batch=4, checkpoints=CheckpointConfig(shared=folder))
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    data = TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.int64))
    return plugin, *Booster(plugin=plugin).boost(
        model, sgd(model), nn.CrossEntropyLoss(), plugin.prepare_dataloader(data)
    )


def check_refusals(folder: Path) -> None:
    run = boosted("vit", saving(folder))
    plain = DataLoader(TensorDataset(torch.zeros(4)))
    with pytest.raises(TypeError, match=r"a DataLoader has no state_dict, .* save at the end of an epoch"):
        run.plugin.save(run.model, run.optimizer, None, plain, step=1)
    with pytest.raises(ValueError, match=r"not one that booster\.boost returned"):
        run.plugin.save(nn.Linear(2, 2), run.optimizer, step=1)
    without = boosted("vit", hybrid())
    with pytest.raises(ValueError, match=r"checkpoints=CheckpointConfig\(local=\.\.\., shared=\.\.\.\)"):
        without.plugin.resume(without.model, without.optimizer)

    run.plugin.save(run.model, run.optimizer, step=1)
    run.plugin.wait_for_saves()
    with pytest.raises(RuntimeError, match="there is none of step 7; the steps are: 1"):
        run.plugin.resume(run.model, run.optimizer, step=7)
    other = boosted("vit", saving(folder), sgd)
    with pytest.raises(ValueError, match="has the state of AdamW, but this run trains with SGD"):
        other.plugin.resume(other.model, other.optimizer)
    wider = boosted("vit", saving(folder), embed_dim=48)
    with pytest.raises(ValueError, match="the checkpoint is of another model: cls_token has shape"):
        wider.plugin.resume(wider.model, wider.optimizer)

    factored = boosted("vit", saving(folder), adafactor)
    train(factored, [0])
    with pytest.raises(ValueError, match=r"Adafactor keeps 'row_var' of a parameter .* use one of these"):
        factored.plugin.save(factored.model, factored.optimizer, step=2)
    plugin, model, optimizer, *_ = boost_fully_sharded(folder)
    with pytest.raises(ValueError, match="layer checkpoints are for ZeRO stages 0 to 2"):
        plugin.save(model, optimizer, step=2)


def test_what_cannot_be_saved_or_resumed_says_so(tmp_path: Path) -> None:
    run_ranks(1, check_refusals, tmp_path)
    with pytest.raises(ValueError, match="needs a folder"):
        CheckpointConfig()
    with pytest.raises(ValueError, match="keep=0 must be a whole number of at least 1"):
        CheckpointConfig(shared=tmp_path, keep=0)


def frozen(options: dict[str, Any], seed: int) -> Run:
    """A run in which the embedding is not trained."""

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        for parameter in model.patch_embed.parameters():  # type: ignore[union-attr]
            parameter.requires_grad = False
        return adamw(model)

    return boosted("vit", hybrid(**options), make_optimizer, seed=seed)


def check_kinds() -> None:
    """Frozen parameters, which ZeRO keeps in half precision only; and counts of steps that are numbers of Python."""
    zero: dict[str, Any] = dict(zero_stage=1, precision="bf16")
    run = frozen(zero, 0)
    train(run, range(2))
    saved, loaded = gathered(run), frozen(dict(pp_size=2, precision="bf16"), 1)
    assert saved.tensors["param.patch_embed.proj.bias"].dtype == torch.bfloat16
    load(loaded, saved)
    assert different_tensors(gathered(loaded), saved) == []

    run = boosted("vit", hybrid(**zero), lamb)
    train(run, range(2))
    saved, loaded = gathered(run), boosted("vit", hybrid(pp_size=2), lamb)
    assert saved.kinds["step"] == "number.int64"
    load(loaded, saved)
    assert different_tensors(gathered(loaded), saved) == []
    assert {state["step"] for state in loaded.optimizer.optim.state.values()} == {2}


def test_other_kinds_of_states_are_restored() -> None:
    run_ranks(2, check_kinds)
