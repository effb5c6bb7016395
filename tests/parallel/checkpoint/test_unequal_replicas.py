"""Layer checkpoints of replicas that are not alike, loaded under other plans and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from torch.utils.data import Dataset

from colossal_hetero import CheckpointConfig, HeteroHybridParallelPlugin
from colossal_hetero.planner.cost.plan import Plan
from tests.parallel.plugin.unequal.test_unequal_replicas import PLANS, gpt2
from tests.support.harness import run_ranks
from tests.support.planning import make_plan
from tests.support.training import Trained, mean_over_replicas, pipeline_step

STEPS, AT = 5, 2
EQUAL = make_plan([[[0], [1]]], [2, 2], 2, 5)


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(101, (8,), generator=torch.Generator().manual_seed(index))
        return dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)


def run(plan: Plan, folder: Path, options: dict[str, Any], resumes: bool, keeps_position: bool) -> list[float]:
    """Mean losses of the global batches: all of an epoch, or those after the checkpoint."""
    checkpoints = CheckpointConfig(shared=folder, save_every=AT)
    plugin = HeteroHybridParallelPlugin(plan=plan, **(dict(precision="fp32") | options), checkpoints=checkpoints)
    batch_size = plan.global_batch if plan.symmetric else None
    loader = plugin.prepare_dataloader(Texts(), batch_size, shuffle=False)
    model = gpt2()
    optimizer, booster = torch.optim.AdamW(model.parameters(), lr=1e-3), Booster(plugin=plugin)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
    trained = Trained([], model, optimizer, booster, plugin)
    saved = loader if keeps_position else None
    start = plugin.resume(model, optimizer, None, saved) if resumes else None
    # Without the position, an epoch begins again.
    skipped = start.step if start is not None and not keeps_position else 0
    batches, losses = iter(loader), []
    for _ in range(skipped):
        next(batches)
    first = 0 if start is None else start.step
    assert first == (AT if resumes else 0)
    for step in range(first, STEPS):
        own = pipeline_step(trained, batches, lambda outputs, _: outputs["loss"])
        if step + 1 == AT and not resumes:
            assert plugin.save(model, optimizer, None, saved, step=AT)
        samples = plugin.plan.replicas[plugin.replica()[0]].micro_batches * plan.micro_batch
        losses.append(mean_over_replicas(own, samples))
    plugin.wait_for_saves()
    return losses


@pytest.mark.parametrize(
    ("saved", "loaded", "options"),
    [
        (PLANS["1+2"], PLANS["1+2"], {}),
        (PLANS["tp2 1+2"], PLANS["1+2"], {}),
        (EQUAL, PLANS["1+2"], {}),
        (PLANS["1+2"], PLANS["splits"], dict(zero_stage=1, precision="bf16")),
    ],
)
def test_any_plan_continues(saved: Plan, loaded: Plan, options: dict[str, Any], tmp_path: Path) -> None:
    both = not saved.symmetric and not loaded.symmetric
    undisturbed = run_ranks(saved.world_size, run, saved, tmp_path, options, False, both)[0]
    resumed = run_ranks(loaded.world_size, run, loaded, tmp_path, options, True, both)[0]
    if saved == loaded:
        assert resumed == undisturbed[AT:]
    assert resumed == pytest.approx(undisturbed[AT:], rel=1e-5 if not options else 1e-2)
