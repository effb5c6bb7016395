"""What a training script uses besides plain steps, with replicas that are not alike."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.nn.optimizer import Lamb
from colossalai.pipeline import p2p
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from colossal_hetero import BalanceConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.colossalai_support.corrections import ModuleProxy
from tests.parallel.plugin.unequal.test_unequal_replicas import PLANS, exact_zero, gpt2, samples
from tests.support.checks import Checks, of_all_ranks
from tests.support.harness import run_ranks
from tests.support.planning import make_plan, unequal_plan
from tests.support.training import (
    Trained,
    boost,
    by_labels,
    loss_of,
    loss_of_batch,
    mean_over_replicas,
    pipeline_step,
    scripted,
    sgd,
    tiny_vit,
    train_alone,
)

checks = Checks()
GLOBAL_BATCH = PLANS["1+2"].global_batch


class NumberedImages(Dataset[tuple[Tensor, Tensor, int]]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return image, torch.tensor(index % 7), index


def vit() -> nn.Module:
    return tiny_vit(depth=4)


def plugin_for(plan: str = "1+2", **options: Any) -> HeteroHybridParallelPlugin:
    return HeteroHybridParallelPlugin(plan=PLANS[plan], **(dict(precision="fp32") | options))


def boost_with(loader: Any, plugin: Any) -> Trained:
    model = vit()
    optimizer, booster = sgd(model), Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer, loss_of, loader)
    return Trained([], model, optimizer, booster, plugin)


def share(plugin: Any) -> slice:
    counts = [replica.micro_batches * 2 for replica in plugin.plan.replicas]
    index = plugin.replica()[0]
    return slice(sum(counts[:index]), sum(counts[: index + 1]))


def execute(run: Any, inputs: Tensor, labels: Tensor) -> None:
    run.booster.execute_pipeline(iter([(inputs, labels)]), run.model, by_labels, run.optimizer)


def step_on(run: Any, inputs: Tensor, labels: Tensor, mine: slice) -> float:
    """Train on this replica's part of the global batch; the mean loss of all."""
    return mean_over_replicas(pipeline_step(run, iter([(inputs[mine], labels[mine])])), mine.stop - mine.start)


def train(run: Any, numbers: Iterable[int] = range(3), size: int = GLOBAL_BATCH) -> list[float]:
    """Train on this replica's shares of the global batches with these numbers. Returns their mean losses."""
    mine, losses = share(run.plugin), []
    for number in numbers:
        inputs, labels = images(number, size)
        losses.append(step_on(run, inputs, labels, mine))
    return losses


def global_batches(numbers: Iterable[int]) -> list[tuple[Tensor, Tensor]]:
    return [images(number, GLOBAL_BATCH) for number in numbers]


def images(number: int, size: int) -> tuple[Tensor, Tensor]:
    data = NumberedImages(100)
    rows = [data[(number * size + index) % 100] for index in range(size)]
    return torch.stack([image for image, _, _ in rows]), torch.stack([label for _, label, _ in rows])


# Data -------------------------------------------------------------------------------------------------------------


def draw(size: int, drop_last: bool) -> tuple[list[list[int]], list[float]]:
    """Samples of each batch of an epoch of this replica, in an order without shuffling, and the losses."""
    plugin = plugin_for()
    loader = plugin.prepare_dataloader(NumberedImages(size), shuffle=True, drop_last=drop_last)
    run = boost_with(loader, plugin)
    drawn, losses = [], []

    def batches() -> Any:
        for inputs, labels, numbers in loader:
            drawn.append(numbers.tolist())
            yield inputs, labels

    iterator = batches()
    for _ in range(len(loader)):
        loss = pipeline_step(run, iterator)
        losses.append(mean_over_replicas(loss, len(drawn[-1])))
    return drawn, losses


@checks.on(3, 2 * GLOBAL_BATCH, False)
@checks.on(3, 2 * GLOBAL_BATCH + 8, False)
@checks.on(3, 25, True)
def an_epoch_has_every_sample_once(size: int, drop_last: bool) -> None:
    results = of_all_ranks(draw(size, drop_last))
    epochs = -(-size // GLOBAL_BATCH) if not drop_last else size // GLOBAL_BATCH
    first, second = results[0][0], results[1][0]
    assert results[1][0] == results[2][0]  # stages of one replica
    assert len(first) == len(second) == epochs
    seen = sorted(number for batch in (*first, *second) for number in batch)
    assert len(seen) == len(set(seen)) == (size - size % GLOBAL_BATCH if drop_last else size)
    # One process on the same global batches.
    model, data = vit(), NumberedImages(size)
    batches = [[data[index] for index in (*mine, *theirs)] for mine, theirs in zip(first, second, strict=True)]
    assert results[0][1] == pytest.approx(train_alone(model, sgd(model), map(default_collate, batches)), rel=1e-5)


@checks.on(3)
def training_goes_on_after_an_evaluation() -> None:
    run, model = boost(plugin_for(), vit(), sgd), vit()
    optimizer, trained, evaluated = sgd(model), [], []
    for number in range(3):
        trained.append((train(run, [number]), train_alone(model, optimizer, global_batches([number]))))
        with torch.no_grad():
            result = run.booster.execute_pipeline(iter([images(9, 4)]), run.model, by_labels, return_loss=True)
            expected = loss_of_batch(model, images(9, 4)).item()
        found = mean_over_replicas(None if result["loss"] is None else float(result["loss"]), 4)
        evaluated.append(([found], [expected]))
    for found, expected in (*trained, *evaluated):
        assert found == pytest.approx(expected, rel=1e-5)


# Messages -----------------------------------------------------------------------------------------------------------


@checks.on(2)
def gradients_are_not_summed_over_groups_of_messages() -> None:
    plan = make_plan([[[0], [1]]], [1, 3], 2, 2)
    used: set[Any] = set()

    def recorded(operations: list[dist.P2POp]) -> Any:
        used.update(each.group for each in operations)
        return start(operations)

    start = p2p.dist.batch_isend_irecv
    with patch.object(p2p, "dist", ModuleProxy(p2p.dist, batch_isend_irecv=recorded)):
        plugin = HeteroHybridParallelPlugin(plan=plan, precision="fp32", planning=PlanConfig(layer_sums=True))
        run = boost(plugin, gpt2(), sgd)
        batch = samples("gpt2", 0, plan.global_batch, torch.float32)
        run.booster.execute_pipeline(iter([batch]), run.model, lambda outputs, _: outputs["loss"], run.optimizer)
    summed = {bucket.group for bucket in run.model.gradients.sums.buckets if bucket.is_shared}
    assert summed  # the embedding is tied
    assert used and not used & summed


# Precision, checkpointing, schedules -------------------------------------------------------------------------------


def train_precisely(options: dict[str, Any], scale: float | None) -> tuple[list[float], float | None, list[bool]]:
    """Losses, the loss scale at the end, and whether parameters changed, by step."""
    run = boost(plugin_for(**options), vit(), sgd)
    losses, changed = [], []
    for number in range(4):
        before = run.parameters
        inputs, labels = images(number, GLOBAL_BATCH)
        mine = share(run.plugin)
        if number == 2 and scale is not None and run.plugin.replica()[0] == 1:
            inputs = inputs * float("inf")  # only the pipeline overflows
        losses.append(step_on(run, inputs, labels, mine))
        changed.append(any(not torch.equal(before[name], each) for name, each in run.parameters.items()))
    mixed = getattr(run.optimizer, "mixed_precision", None) or getattr(run.optimizer, "mixed_precision_mixin", None)
    return losses, None if scale is None else mixed.loss_scale, changed


HALF = [(precision, zero_stage) for precision in ("bf16", "fp16") for zero_stage in (0, 1)]


@checks.on(3)
def half_precision_trains_like_one_process_and_an_overflow_in_one_replica_stops_the_step_of_all() -> None:
    model = vit()
    expected = train_alone(model, sgd(model), global_batches(range(4)))
    for precision, zero_stage in HALF:
        options = dict(precision=precision, zero_stage=zero_stage, max_norm=100.0, initial_scale=2.0**8)
        losses, _, changed = train_precisely(options, None)
        assert all(changed) and losses == pytest.approx(expected, rel=2e-2), options
    for zero_stage in (0, 1):
        options = dict(precision="fp16", initial_scale=2.0**8, hysteresis=1, zero_stage=zero_stage)
        losses, scale, changed = train_precisely(options, 2.0**8)
        assert changed == [True, True, False, True]
        assert scale == 2.0**7
        assert losses[3] == pytest.approx(expected[2], rel=1e-1)  # trains on from the weights before


def train_equal(planning: PlanConfig, zero_stage: int) -> list[float]:
    plan = make_plan([[[0], [1]], [[2], [3]]], [1, 3], 2, 3)
    if zero_stage:
        plugin = exact_zero(plan, planning=planning, zero_stage=1)
    else:
        plugin = HeteroHybridParallelPlugin(plan=plan, planning=planning, precision="fp32")
    run, replica, losses = boost(plugin, vit(), sgd), plugin.replica()[0], []
    for number in range(3):
        inputs, labels = images(number, 12)
        mine = slice(6 * replica, 6 * replica + 6)
        losses.append(step_on(run, inputs, labels, mine))
    return losses


@checks.on(4, 0)
@checks.on(4, 1)
def equal_replicas_may_be_summed_layer_by_layer(zero_stage: int) -> None:
    usual, layer_sums = (train_equal(PlanConfig(layer_sums=way), zero_stage) for way in (False, True))
    assert usual == pytest.approx(layer_sums, rel=1e-6)


@checks.on(3, {})
@checks.on(3, dict(zero_stage=1))
def frozen_and_unused_parameters_stay(options: dict[str, Any]) -> None:
    alone, model = vit(), vit()
    for each in (alone, model):
        each.patch_embed.requires_grad_(False)
    model.head_unused = nn.Linear(3, 3)
    still = {name: each.clone() for name, each in model.named_parameters() if name.startswith(("patch", "head_unused"))}
    plugin = exact_zero(PLANS["1+2"], **options) if "zero_stage" in options else plugin_for(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    run = Trained([], boosted, optimizer, booster, plugin)
    losses = train(run)
    held = dict(run.model.unwrap().named_parameters())
    assert all(torch.equal(held[name], each) for name, each in still.items() if name in held)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, weight_decay=0.5)
    assert losses == pytest.approx(train_alone(alone, optimizer, global_batches(range(3))), rel=1e-5)


def fail_in(passes: list[int], gradient: Tensor) -> None:
    """A hook that fails in the last of so many backward passes."""
    passes[0] -= 1
    assert passes[0] > 0, "the last pass fails"


@checks.on(2, 0)
@checks.on(2, 1)
def gradients_of_a_pass_that_failed_are_forgotten(zero_stage: int) -> None:
    """The last pass of a batch fails when some sums have been started, after gradients of another batch were summed."""
    plan = unequal_plan(*(make_plan([[[rank]]], [4], 2, count) for rank, count in enumerate((3, 1))))
    values = []
    for fails in (False, True):
        options = dict(zero_stage=1, zero_bucket_size_in_m=500 / 2**20) if zero_stage else {}
        plugin = exact_zero(plan, **options) if zero_stage else HeteroHybridParallelPlugin(plan=plan, precision="fp32")
        run = boost(plugin, vit(), sgd)
        mine = share(run.plugin)
        for number in range(3):
            inputs, labels = images(number, 8)
            if fails and number == 1:
                execute(run, inputs[mine] + 2, labels[mine])
                first = next(run.model.unwrap().parameters())
                hook = first.register_hook(partial(fail_in, [plan.replicas[dist.get_rank()].micro_batches]))
                with pytest.raises(AssertionError, match="the last pass fails"):
                    execute(run, inputs[mine] + 1, labels[mine])
                run.optimizer.zero_grad()
                hook.remove()
            pipeline_step(run, iter([(inputs[mine], labels[mine])]))
        values.append(torch.cat([each.detach().flatten() for each in run.model.unwrap().parameters()]))
    assert torch.equal(*values)


# Balancing and checkpoints --------------------------------------------------------------------------------------------


def train_balanced(balance: BalanceConfig | None) -> list[float]:
    with scripted(lambda rank, iteration: 4.0 if rank == 3 else 1.0):
        plugin = plugin_for("tp2 1+2", balance=balance)
        run = boost(plugin, vit(), sgd)
        losses = train(run, range(6), PLANS["tp2 1+2"].global_batch)
    if balance is not None and dist.get_rank() in (2, 3):
        assert max(plugin.balancer.plan.migrate) > 0
    return losses


@checks.on(6)
def a_stage_migrates_work_of_a_slow_rank() -> None:
    usual, migrated = (train_balanced(way) for way in (None, BalanceConfig(mode="migrate")))
    assert migrated == pytest.approx(usual, rel=1e-5)


def save_and_load(sharded: bool, folder: Path) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint, of the run that saved it and of one that loaded it."""

    def make() -> Trained:
        return boost(plugin_for(), vit(), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))

    folder.mkdir(exist_ok=True)
    run = make()
    train(run, range(2))
    run.booster.save_model(run.model, str(folder / "model"), shard=sharded)
    run.booster.save_optimizer(run.optimizer, str(folder / "optimizer"), shard=sharded)
    dist.barrier()
    undisturbed = train(run, range(2, 5))
    loaded = make()
    loaded.booster.load_model(loaded.model, str(folder / "model"))
    loaded.booster.load_optimizer(loaded.optimizer, str(folder / "optimizer"))
    return undisturbed, train(loaded, range(2, 5))


def save_and_load_each(folder: Path) -> list[Any]:
    return [save_and_load(sharded, folder / str(sharded)) for sharded in (True, False)]


def test_plain_checkpoints_are_loaded_again(tmp_path: Path) -> None:
    for undisturbed, loaded in chain.from_iterable(run_ranks(3, save_and_load_each, tmp_path)):
        assert loaded == pytest.approx(undisturbed, rel=1e-6)


# What is refused ----------------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(zero_stage=2, precision="bf16"), "replicas are not alike.*use 0 or 1"),
    (
        dict(enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all"),
        "replicas are not alike.*sequence parallelism",
    ),
    (dict(use_fp8=True), "replicas are not alike.*fp8"),
    (dict(zero_stage=1, precision="bf16", overlap_allgather=True), "replicas are not alike.*overlap_allgather"),
]


@checks.on(3)
def what_cannot_be_run_is_refused() -> None:
    for options, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            plugin_for(**options)
        dist.barrier()  # before groups are destroyed
    plugin = plugin_for(zero_stage=1, precision="bf16")
    with pytest.raises(ValueError, match="Lamb cannot be sharded"):
        boost(plugin, vit(), lambda model: Lamb(model.parameters(), lr=1e-3))
    run = boost(plugin, vit(), sgd)
    for method in (run.booster.save_optimizer, run.booster.load_optimizer):
        with pytest.raises(NotImplementedError, match=r"use plugin.save and plugin\.resume"):
            method(run.optimizer, "nowhere")
    run = boost(plugin_for(), vit(), sgd)
    with pytest.raises(NotImplementedError, match="max_norm"):
        run.optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(ValueError, match="6, 4 samples of each global batch"):
        pipeline_step(run, iter([images(0, 5)]))


@checks.on(3)
def clipping_by_value_is_exact() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        scaling = dict(initial_scale=2.0**6) if precision == "fp16" else {}
        run = boost(plugin_for(precision=precision, **scaling), vit(), sgd)
        inputs, labels = images(0, GLOBAL_BATCH)
        execute(run, inputs[share(run.plugin)], labels[share(run.plugin)])
        limit, trained = 2.0**-9 * scaling.get("initial_scale", 1.0), list(run.model.parameters())
        expected = [each.grad.clamp(-limit, limit) for each in trained]
        assert any(not torch.equal(each.grad, value) for each, value in zip(trained, expected, strict=True))
        run.optimizer.clip_grad_by_value(2.0**-9)
        assert all(torch.equal(each.grad, value) for each, value in zip(trained, expected, strict=True)), precision
        run.optimizer.step()


@checks.on(2)
def backward_passes_of_the_users_own_are_refused() -> None:
    inputs, labels = images(0, 2)
    for zero_stage in (0, 1):
        for through_booster in (True, False):
            plugin = exact_zero(PLANS["batches"], zero_stage=1) if zero_stage else plugin_for("batches")
            run = boost(plugin, vit(), sgd)
            dist.barrier()
            loss = loss_of(run.model(inputs), labels)
            with pytest.raises(RuntimeError, match="execute_pipeline"):
                if through_booster:
                    run.booster.backward(loss, run.optimizer)
                else:
                    loss.backward()
                    run.optimizer.step()
            dist.barrier()


test_on_ranks = checks.test()
