"""What is restored besides tensors, under any plan, and what cannot be saved or resumed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.nn.optimizer import Lamb
from colossalai.shardformer.layer.utils import Randomizer
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Subset, TensorDataset

from colossal_hetero import CheckpointConfig, HeteroHybridParallelPlugin
from colossal_hetero.checkpoint.layer_checkpoint import Start
from colossal_hetero.checkpoint.reader import export
from colossal_hetero.planner.cost.plan import Plan
from tests.parallel.plugin.unequal.test_unequal_replicas import PLANS, gpt2
from tests.support import zero_runs
from tests.support.checkpoint_runs import MODELS, Run, boosted, different_tensors, gathered, hybrid, load, saving, train
from tests.support.checks import on
from tests.support.elastic_jobs import Texts
from tests.support.harness import run_ranks
from tests.support.planning import make_plan
from tests.support.training import Trained, adamw, make_step, mean_over_replicas, pipeline_step, zero_plugin

DROPOUT = dict(pos_drop_rate=0.1, proj_drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.1)
"""Drawn equally on all ranks of a group, differently on each of them, and per sample."""


@on(4, "vit", DROPOUT, [])
@on(4, "gpt2", {}, [dict(pp_size=2)])
def the_resumed_run_is_the_undisturbed_one_and_another_plan_continues(
    name: str, drops: dict[str, float], others: Sequence[dict[str, Any]], folder: Path
) -> None:
    options = dict(tp_size=2, pp_size=2)

    def start(seed: int, **options: Any) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        run = boosted(name, saving(folder, **options), **drops)
        return run, CosineAnnealingLR(run.optimizer.optim, 9)

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
    expected = gathered(undisturbed)
    for plan in (options, *others):
        resumed, schedule = start(1, **plan)
        found = resumed.plugin.resume(resumed.model, resumed.optimizer, schedule)
        assert (found.step, found.epoch, found.same_plan) == (2, 1, plan == options)
        assert schedule.last_epoch == 2 and different_tensors(gathered(resumed), saved) == []
        after = []
        for step in range(3, 5):
            after += train(resumed, [step])
            schedule.step()
        if plan == options:
            assert after == losses[2:]
            assert different_tensors(gathered(resumed), expected) == []
        else:
            assert after == pytest.approx(losses[2:], rel=1e-5)
    if name == "gpt2" and dist.get_rank() == 0:
        export(folder, folder / "model.pt")
        content = torch.load(folder / "model.pt", weights_only=True)
        assert MODELS["gpt2"]().load_state_dict(content, strict=False) == (["lm_head.weight"], [])  # the embedding


@on(2, (0, 1), "fp32", 3)
@on(2, (2, 0), "bf16", 5)  # at the end of an epoch
@on(2, (1,), "fp16", 3)  # with a loss scale
def a_run_of_the_zero_plugin_resumes_where_it_was(stages: Sequence[int], precision: str, at: int, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 7, generator=generator), torch.arange(40) % 3)

    def start(seed: int, stage: int) -> tuple[Any, ...]:
        Randomizer.reset_index()
        torch.manual_seed(seed)
        checkpoints = CheckpointConfig(shared=folder, save_every=at)
        plugin = zero_plugin(stage, 8, max_micro_batch=8, precision=precision, checkpoints=checkpoints)
        # With statistics, dropout, and sizes that cannot be divided evenly.
        model = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Dropout(0.2), nn.Linear(13, 3))
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
                make_step(optimizer, loss)
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
    for stage in stages:
        plugin, model, optimizer, _, loader, schedule = resumed = start(1, stage)
        found = plugin.resume(model, optimizer, schedule, loader)
        assert (found.step, found.epoch, found.same_plan) == (at, 0, stage == stages[0])
        if found.same_plan:
            assert run(*resumed, found) == losses[at:]
            for own, other in zip(
                zero_runs.full_parameters(model), zero_runs.full_parameters(undisturbed[1]), strict=True
            ):
                assert torch.equal(own, other)
        else:
            assert len(run(*resumed, found)) == len(losses[at:])


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=0.01)


def frozen(options: dict[str, Any], seed: int) -> Run:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        for parameter in model.patch_embed.parameters():  # type: ignore[union-attr]
            parameter.requires_grad = False
        return adamw(model)

    return boosted("vit", hybrid(**options), make_optimizer, seed=seed)


@on(2)
def other_kinds_of_states_are_restored() -> None:
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


STEPS, AT = 5, 2
EQUAL = make_plan([[[0], [1]]], [2, 2], 2, 5)


def run(plan: Plan, folder: Path, options: dict[str, Any], resumes: bool, keeps_position: bool) -> list[float]:
    """Mean losses of the global batches: all of an epoch, or those after the checkpoint."""
    checkpoints = CheckpointConfig(shared=folder, save_every=AT)
    plugin = HeteroHybridParallelPlugin(plan=plan, **(dict(precision="fp32") | options), checkpoints=checkpoints)
    batch_size = plan.global_batch if plan.symmetric else None
    loader = plugin.prepare_dataloader(Subset(Texts(), range(10 * STEPS)), batch_size, shuffle=False)
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
