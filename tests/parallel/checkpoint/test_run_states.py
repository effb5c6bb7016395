"""What is restored besides tensors, so that a resumed run is the undisturbed one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.shardformer.layer.utils import Randomizer
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from colossal_hetero import CheckpointConfig
from colossal_hetero.checkpoint.layer_checkpoint import Start
from colossal_hetero.checkpoint.reader import export
from tests.support.checkpoint_runs import MODELS, boosted, different_tensors, gathered, saving, train
from tests.support.harness import run_ranks
from tests.support.training import zero_plugin
from tests.support.zero_runs import full_parameters

DROPOUT = dict(pos_drop_rate=0.1, proj_drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.1)
"""Drawn equally on all ranks of a group, differently on each of them, and per sample."""


def check_hybrid(folder: Path, options: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[Start]:
    """Train four steps, and resume after the second: in the same plan, and in others, which compute in other orders."""

    def start(seed: int, **options: Any) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        run = boosted(name, saving(folder, **options), **drops)
        return run, CosineAnnealingLR(run.optimizer.optim, 9)

    name, drops = ("gpt2", {}) if others else ("vit", DROPOUT)
    undisturbed, schedule = start(0, **options)
    losses = []
    for step in range(1, 5):
        losses += train(undisturbed, [step])
        schedule.step()
        if step == 2:
            saved = gathered(undisturbed)
            assert undisturbed.plugin.save(undisturbed.model, undisturbed.optimizer, schedule, step=2, epoch=1)
    undisturbed.plugin.wait_for_saves()
    dist.barrier()
    expected, starts = gathered(undisturbed), []
    for plan in (options, *others):
        resumed, schedule = start(1, **plan)
        starts.append(resumed.plugin.resume(resumed.model, resumed.optimizer, schedule))
        assert (starts[-1].step, starts[-1].epoch, starts[-1].same_plan) == (2, 1, plan == options)
        assert schedule.last_epoch == 2 and different_tensors(gathered(resumed), saved) == []
        found = []
        for step in range(3, 5):
            found += train(resumed, [step])
            schedule.step()
        if plan == options:
            assert found == losses[2:]
            assert different_tensors(gathered(resumed), expected) == []
        else:
            assert found == pytest.approx(losses[2:], rel=1e-5)
    return starts


def test_the_resumed_run_is_the_undisturbed_one_with_dropout(tmp_path: Path) -> None:
    run_ranks(4, check_hybrid, tmp_path, dict(tp_size=2, pp_size=2), [])


def test_another_plan_continues_with_the_same_losses(tmp_path: Path) -> None:
    run_ranks(4, check_hybrid, tmp_path, dict(tp_size=2, pp_size=2), [dict(pp_size=2)])
    export(tmp_path, tmp_path / "model.pt")
    model = MODELS["gpt2"]()
    found = model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=False)
    assert found == (["lm_head.weight"], [])  # which is the embedding


class Net(nn.Module):
    """A model with statistics, dropout, and sizes that cannot be divided evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.BatchNorm1d(13)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(13, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.norm(self.first(inputs)))))


def check_zero(folder: Path, stages: Sequence[int], precision: str, at: int) -> list[bool]:
    """Train two epochs of five global batches, and resume after the step ``at``."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 7, generator=generator), torch.arange(40) % 3)

    def start(seed: int, stage: int) -> tuple[Any, ...]:
        Randomizer.reset_index()
        torch.manual_seed(seed)
        checkpoints = CheckpointConfig(shared=folder, save_every=at)
        plugin = zero_plugin(stage, 8, max_micro_batch=8, precision=precision, checkpoints=checkpoints)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = plugin.prepare_dataloader(data, shuffle=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        boosted = Booster(plugin=plugin).boost(model, optimizer, nn.CrossEntropyLoss(), loader, schedule)
        boosted[3].divide_by(lambda samples: [[samples - 3], [3]])
        return plugin, *boosted

    def run(plugin: Any, model: Any, optimizer: Any, criterion: Any, loader: Any, schedule: Any, start: Start) -> list:
        losses, step = [], start.step
        for epoch in range(start.epoch, 2):
            loader.set_epoch(epoch)
            for inputs, labels in loader:
                loss = criterion(model(inputs), labels)
                optimizer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
                losses.append(loss.item())
                if step == at:
                    assert plugin.save(model, optimizer, schedule, loader, step=step, epoch=epoch)
        return losses

    undisturbed = start(0, stages[0])
    plugin, model, optimizer, _, loader, schedule = undisturbed
    assert plugin.resume(model, optimizer, schedule, loader) == Start()
    losses = run(*undisturbed, Start())
    plugin.wait_for_saves()
    dist.barrier()
    same = []
    for stage in stages:
        plugin, model, optimizer, _, loader, schedule = resumed = start(1, stage)
        found = plugin.resume(model, optimizer, schedule, loader)
        assert (found.step, found.epoch) == (at, 0)
        same.append(found.same_plan)
        if found.same_plan:
            assert run(*resumed, found) == losses[at:]
            for own, other in zip(full_parameters(model), full_parameters(undisturbed[1]), strict=True):
                assert torch.equal(own, other)
        else:
            assert len(run(*resumed, found)) == len(losses[at:])
    return same


@pytest.mark.parametrize(
    "stages, precision, at",
    [
        pytest.param((0, 1), "fp32", 3, id="stages 0 and 1"),
        pytest.param((2, 0), "bf16", 5, id="stages 2 and 0, at the end of an epoch"),
        pytest.param((1,), "fp16", 3, id="loss scale, and a sampler with a state"),
    ],
)
def test_a_run_of_the_zero_plugin_resumes_where_it_was(
    tmp_path: Path, stages: Sequence[int], precision: str, at: int
) -> None:
    for same in run_ranks(2, check_zero, tmp_path, stages, precision, at):
        assert same == [True] + [False] * (len(stages) - 1)
