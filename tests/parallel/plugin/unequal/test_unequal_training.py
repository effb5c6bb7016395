"""What a training script uses besides plain steps, with replicas that are not alike."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.pipeline import p2p
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from colossal_hetero import BalanceConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.colossalai_support.corrections import ModuleProxy
from tests.parallel.plugin.unequal.test_unequal_replicas import PLANS, exact_zero, gpt2, samples, vit
from tests.support import training
from tests.support.checks import of_all_ranks, on
from tests.support.planning import images_and_labels, make_plan, planned, share, train_planned, unequal_plan
from tests.support.training import Trained, boost, loss_of, pipeline_step, save_checkpoint, sgd

GLOBAL_BATCH = PLANS["1+2"].global_batch


def plugin_for(plan: str = "1+2", **options: Any) -> HeteroHybridParallelPlugin:
    return planned(PLANS[plan], **options)


def execute(run: Any, inputs: Tensor, labels: Tensor) -> None:
    run.booster.execute_pipeline(iter([(inputs, labels)]), run.model, training.by_labels, run.optimizer)


def own_batch(run: Any, number: int = 0) -> list[Tensor]:
    return [part[share(run.plugin)] for part in images_and_labels(number, run.plugin.plan.global_batch)]


def alone(iterations: int, model: nn.Module | None = None, optimizer: Any = None) -> list[float]:
    model = vit() if model is None else model
    batches = [images_and_labels(number, GLOBAL_BATCH) for number in range(iterations)]
    return training.train_alone(model, optimizer or sgd(model), batches)


# Data -------------------------------------------------------------------------------------------------------------


@on(3, 2 * GLOBAL_BATCH, False)
@on(3, 2 * GLOBAL_BATCH + 8, False)
@on(3, 25, True)
def an_epoch_has_every_sample_once(size: int, drop_last: bool) -> None:
    plugin, data = plugin_for(), TensorDataset(*images_and_labels(0, size), torch.arange(size))
    loader, model = plugin.prepare_dataloader(data, shuffle=True, drop_last=drop_last), vit()
    optimizer, booster = sgd(model), Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer, loss_of, loader)
    run, drawn, losses = Trained([], model, optimizer, booster, plugin), list[list[int]](), []

    def batches() -> Any:
        for inputs, labels, numbers in loader:
            drawn.append(numbers.tolist())
            yield inputs, labels

    iterator = batches()
    for _ in range(len(loader)):
        loss = pipeline_step(run, iterator)
        losses.append(training.mean_over_replicas(loss, len(drawn[-1])))
    first, second, third = of_all_ranks(drawn)
    assert second == third  # stages of one replica
    assert len(first) == len(second) == (size // GLOBAL_BATCH if drop_last else -(-size // GLOBAL_BATCH))
    seen = sorted(number for batch in (*first, *second) for number in batch)
    assert len(seen) == len(set(seen)) == (size - size % GLOBAL_BATCH if drop_last else size)
    # One process on the same global batches.
    model = vit()
    whole = [[data[index][:2] for index in (*mine, *theirs)] for mine, theirs in zip(first, second, strict=True)]
    assert losses == pytest.approx(training.train_alone(model, sgd(model), map(default_collate, whole)), rel=1e-5)
    # Also after the last batch, which may be smaller.
    wanted = {name: model.get_parameter(name) for name in run.parameters}
    torch.testing.assert_close(run.parameters, wanted, rtol=1e-4, atol=1e-6)


@on(3)
def training_goes_on_after_an_evaluation() -> None:
    run, model = boost(plugin_for(), vit(), sgd), vit()
    optimizer = sgd(model)
    for number in range(3):
        expected = training.train_alone(model, optimizer, [images_and_labels(number, GLOBAL_BATCH)])
        assert train_planned(run, 1, first=number) == pytest.approx(expected, rel=1e-5)
        batch = images_and_labels(9, 4)
        with torch.no_grad():
            result = run.booster.execute_pipeline(iter([batch]), run.model, training.by_labels, return_loss=True)
            wanted = training.loss_of_batch(model, batch).item()
        found = training.mean_over_replicas(None if result["loss"] is None else float(result["loss"]), 4)
        assert found == pytest.approx(wanted, rel=1e-5)


@on(2)
def gradients_are_not_summed_over_groups_of_messages() -> None:
    plan = make_plan([[[0], [1]]], [1, 3], 2, 2)
    used: set[Any] = set()

    def recorded(operations: list[dist.P2POp]) -> Any:
        used.update(each.group for each in operations)
        return start(operations)

    start = p2p.dist.batch_isend_irecv
    with patch.object(p2p, "dist", ModuleProxy(p2p.dist, batch_isend_irecv=recorded)):
        run = boost(planned(plan, planning=PlanConfig(layer_sums=True)), gpt2(), sgd)
        batch = samples("gpt2", 0, plan.global_batch, torch.float32)
        run.booster.execute_pipeline(iter([batch]), run.model, lambda outputs, _: outputs["loss"], run.optimizer)
    summed = {bucket.group for bucket in run.model.gradients.sums.buckets if bucket.is_shared}
    assert summed  # the embedding is tied
    assert used and not used & summed


# Precision, frozen parameters, passes that fail ----------------------------------------------------------------------


def train_precisely(scaled: bool = False, **options: Any) -> tuple[list[float], Any, list[bool]]:
    """Losses, the mixed precision, and whether parameters changed, by step. If ``scaled``, the pipeline overflows in
    the third step."""
    run = boost(plugin_for(**options), vit(), sgd)
    losses, changed = [], []
    for number in range(4):
        before, (inputs, labels) = run.parameters, own_batch(run, number)
        if number == 2 and scaled and run.plugin.replica()[0] == 1:
            inputs = inputs * float("inf")
        losses.append(training.mean_over_replicas(pipeline_step(run, iter([(inputs, labels)])), len(labels)))
        changed.append(any(not torch.equal(before[name], each) for name, each in run.parameters.items()))
    optimizer = run.optimizer
    return losses, getattr(optimizer, "mixed_precision", getattr(optimizer, "mixed_precision_mixin", None)), changed


@on(3)
def half_precision_trains_like_one_process_and_an_overflow_in_one_replica_stops_the_step_of_all() -> None:
    expected = alone(4)
    for zero_stage in (0, 1):
        common = dict(zero_stage=zero_stage, initial_scale=2.0**8)
        for precision in ("bf16", "fp16"):
            losses, _, changed = train_precisely(precision=precision, max_norm=100.0, **common)
            assert all(changed) and losses == pytest.approx(expected, rel=2e-2), (precision, zero_stage)
        losses, mixed, changed = train_precisely(True, precision="fp16", hysteresis=1, **common)
        assert changed == [True, True, False, True] and mixed.loss_scale == 2.0**7
        # The weights of the last step are those before the overflow.
        model = vit()
        batches = [images_and_labels(number, GLOBAL_BATCH) for number in (0, 1, 3)]
        assert losses[3] == pytest.approx(training.train_alone(model, sgd(model), batches)[2], rel=2e-2)


@on(4, 0)
@on(4, 1)
def equal_replicas_may_be_summed_layer_by_layer(zero_stage: int) -> None:
    plan = make_plan([[[0], [1]], [[2], [3]]], [1, 3], 2, 3)
    make = partial(exact_zero, plan, zero_stage=1) if zero_stage else partial(planned, plan)
    usual, layer_sums = (
        train_planned(boost(make(planning=PlanConfig(layer_sums=way)), vit(), sgd)) for way in (False, True)
    )
    assert usual == pytest.approx(layer_sums, rel=1e-6)


@on(3, False)
@on(3, True)
def frozen_and_unused_parameters_stay(has_zero: bool) -> None:
    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)

    reference, model = vit(), vit()
    for each in (reference, model):
        each.patch_embed.requires_grad_(False)
    model.head_unused = nn.Linear(3, 3)
    still = {name: each.clone() for name, each in model.named_parameters() if name.startswith(("patch", "head_unused"))}
    run = boost(exact_zero(PLANS["1+2"], zero_stage=1) if has_zero else plugin_for(), model, adamw)
    assert train_planned(run) == pytest.approx(alone(3, reference, adamw(reference)), rel=1e-5)
    held = dict(run.model.unwrap().named_parameters())
    assert all(torch.equal(held[name], each) for name, each in still.items() if name in held)


def fail_in(passes: list[int], gradient: Tensor) -> None:
    passes[0] -= 1
    assert passes[0] > 0, "the last pass fails"


@on(2, 0)
@on(2, 1)
def gradients_of_a_pass_that_failed_are_forgotten(zero_stage: int) -> None:
    plan = unequal_plan(*(make_plan([[[rank]]], [4], 2, count) for rank, count in enumerate((3, 1))))
    small = dict(zero_stage=1, zero_bucket_size_in_m=500 / 2**20)
    values = []
    for fails in (False, True):
        run = boost(exact_zero(plan, **small) if zero_stage else planned(plan), vit(), sgd)
        for number in range(3):
            inputs, labels = own_batch(run, number)
            if fails and number == 1:
                execute(run, inputs + 2, labels)
                first = next(run.model.unwrap().parameters())
                hook = first.register_hook(partial(fail_in, [plan.replicas[dist.get_rank()].micro_batches]))
                with pytest.raises(AssertionError, match="the last pass fails"):
                    execute(run, inputs + 1, labels)
                run.optimizer.zero_grad()
                hook.remove()
            pipeline_step(run, iter([(inputs, labels)]))
        values.append(torch.cat([each.detach().flatten() for each in run.model.unwrap().parameters()]))
    assert torch.equal(*values)


# Balancing and checkpoints --------------------------------------------------------------------------------------------


def train_balanced(balance: BalanceConfig | None) -> list[float]:
    with training.scripted(lambda rank, iteration: 4.0 if rank == 3 else 1.0):
        plugin = plugin_for("tp2 1+2", balance=balance)
        losses = train_planned(boost(plugin, vit(), sgd), 6)
    if balance is not None and dist.get_rank() in (2, 3):
        assert max(plugin.balancer.plan.migrate) > 0
    return losses


@on(6)
def a_stage_migrates_work_of_a_slow_rank() -> None:
    usual, migrated = (train_balanced(way) for way in (None, BalanceConfig(mode="migrate")))
    assert migrated == pytest.approx(usual, rel=1e-5)


@on(3)
def plain_checkpoints_are_loaded_again(folder: Path) -> None:
    for sharded in (True, False):
        run, loaded = (
            boost(plugin_for(), vit(), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)) for _ in range(2)
        )
        train_planned(run, 2)
        save_checkpoint(run, folder / str(sharded), sharded)
        undisturbed = train_planned(run, 3, first=2)
        training.load_checkpoint(loaded, folder / str(sharded), sharded)
        assert train_planned(loaded, 3, first=2) == pytest.approx(undisturbed, rel=1e-6)


@on(3)
def clipping_by_value_is_exact() -> None:
    for precision, scale in (("fp32", 1.0), ("bf16", 1.0), ("fp16", 2.0**6)):
        options = dict(initial_scale=scale) if precision == "fp16" else {}
        run = boost(plugin_for(precision=precision, **options), vit(), sgd)
        execute(run, *own_batch(run))
        limit, trained = 2.0**-9 * scale, list(run.model.parameters())
        expected = [each.grad.clamp(-limit, limit) for each in trained]
        assert any(not torch.equal(each.grad, value) for each, value in zip(trained, expected, strict=True))
        run.optimizer.clip_grad_by_value(2.0**-9)
        assert all(torch.equal(each.grad, value) for each, value in zip(trained, expected, strict=True)), precision
        run.optimizer.step()
