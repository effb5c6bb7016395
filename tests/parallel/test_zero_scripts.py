"""What training scripts for Colossal-AI do beside training, under HeteroZeroPlugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from torch import nn

from colossal_hetero import HeteroZeroPlugin

from .harness import run_ranks
from .test_zero_plugin import Numbered, full_parameters, make_model, make_optimizer, sizes_by_rank

DIVISIONS = {2: [[3, 2], [1, 2]], 3: [[2, 1], [1, 0], [3, 1]]}
"""Of a global batch of 8, by the number of ranks."""


def train_from(folder: str, stage: int | str, shard: bool, resume: bool) -> dict[str, Any]:
    """Train for two epochs and save after some global batches of the second; or go on from there."""
    plugin = HeteroZeroPlugin(stage, 8)
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
    return {"parameters": torch.cat(full_parameters(model)), "rates": rates, "stage": plugin.stage}


@pytest.mark.parametrize(
    ("stage", "shard", "ranks"),
    [
        *((stage, shard, 2) for stage in (0, 1, 2, 3) for shard in (False, True)),
        ("auto", False, 2),
        *((stage, True, 3) for stage in (0, 1, 2, 3)),
    ],
)
def test_going_on_from_a_checkpoint(tmp_path: Path, stage: int | str, shard: bool, ranks: int) -> None:
    whole = run_ranks(2, train_from, str(tmp_path), stage, shard, False)
    resumed = run_ranks(ranks, train_from, str(tmp_path), stage, shard, True)
    for result in resumed:
        assert result["stage"] == (0 if stage == "auto" else stage)
        assert result["rates"] == pytest.approx(whole[0]["rates"][-2:])
        expected = whole[0]["parameters"]
        size = min(len(expected), len(result["parameters"]))  # FSDP pads
        # Sums in another order: rounding, which AdamW enlarges where it divides by little.
        rtol, atol = (1e-3, 1e-4) if ranks != 2 else (1e-5, 1e-6)
        torch.testing.assert_close(result["parameters"][:size], expected[:size], rtol=rtol, atol=atol)
