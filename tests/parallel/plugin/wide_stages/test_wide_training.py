"""What a training script uses besides plain steps, with stages of several groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.pipeline import p2p
from torch import Tensor

from colossal_hetero import BalanceConfig, BatchConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.module_proxy import ModuleProxy
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.plans.plan import Plan, save_plan
from colossal_hetero.planner.plans.runnable import why_not_runnable
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.planner.search.make_plans import make_plans
from colossal_hetero.planner.slots.search_space import WHOLE
from tests.parallel.plugin.hybrid.test_recomputation import compare
from tests.parallel.plugin.unequal.test_unequal_replicas import exact_zero, gpt2, samples
from tests.parallel.plugin.unequal.test_unequal_training import NumberedImages, images, of_world, vit
from tests.parallel.plugin.wide_stages.test_wide_stages import PLANS, wide
from tests.support.harness import run_ranks
from tests.support.layer_profiles import layer_times
from tests.support.planning import make_plan, unequal_plan
from tests.support.training import Trained, adamw, boost, loss_of, scripted, sgd, tiny_vit

PLAN = unequal_plan(wide([[0, 1], [2]], [3, 1], [2, 1], 4, 2), wide([[3]], [4], [1], 4, 1))
"""A pipeline with stages of widths 2 and 1 beside a device that has the whole model."""


BALANCED = make_plan([[[0, 1, 2, 3], [4, 5]]], [3, 1], 2, 2, widths=[2, 1])


def plugin_for(plan: Plan | Path = PLAN, **options: Any) -> HeteroHybridParallelPlugin:
    return HeteroHybridParallelPlugin(plan=plan, **(dict(precision="fp32") | options))


def criterion(outputs: Tensor, inputs: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(outputs, inputs[1])


def shares(plan: Plan) -> list[int]:
    """Samples of a global batch by replica."""
    return [replica.micro_batches * plan.micro_batch for replica in plan.replicas]


def step(run: Trained, batches: Iterator[Any]) -> float:
    """The loss of the global batch."""
    result = run.booster.execute_pipeline(batches, run.model, criterion, run.optimizer, return_loss=True)
    run.optimizer.step()
    run.optimizer.zero_grad()
    loss = None if result["loss"] is None else float(result["loss"])
    return of_world(loss, shares(run.plugin.plan)[run.plugin.replica()[0]])


def own(plan: Plan, index: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """The batch of replica ``index`` in global batch ``number``."""
    counts = shares(plan)
    inputs, labels = images(number, plan.global_batch)
    mine = slice(sum(counts[:index]), sum(counts[: index + 1]))
    return [(inputs[mine], labels[mine])]


def train(run: Trained, numbers: range) -> list[float]:
    plan = run.plugin.plan
    return [step(run, iter(own(plan, run.plugin.replica()[0], number))) for number in numbers]


def train_alone(steps: int, skipped: int | None = None) -> list[float]:
    """Losses of one process, whose optimizer does not step after the batch ``skipped``."""
    model = vit()
    optimizer, losses = sgd(model), []
    for number in range(steps):
        inputs, labels = images(number, PLAN.global_batch)
        loss = loss_of(model(inputs), labels)
        loss.backward()
        if number != skipped:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Data -------------------------------------------------------------------------------------------------------------


def draw() -> tuple[list[list[int]], list[float]]:
    plugin = plugin_for()
    loader = plugin.prepare_dataloader(NumberedImages(2 * PLAN.global_batch + PLAN.micro_batch * 3), shuffle=True)
    model = vit()
    optimizer, booster = sgd(model), Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer, loss_of, loader)
    run, drawn, losses = Trained([], model, optimizer, booster, plugin), [], []

    def batches() -> Iterator[Any]:
        for inputs, labels, numbers in loader:
            drawn.append(numbers.tolist())
            yield inputs, labels

    iterator = batches()
    for _ in range(len(loader)):
        result = booster.execute_pipeline(iterator, run.model, criterion, run.optimizer, return_loss=True)
        run.optimizer.step()
        run.optimizer.zero_grad()
        loss = None if result["loss"] is None else float(result["loss"])
        losses.append(of_world(loss, len(drawn[-1])))
    return drawn, losses


def test_the_loader_gives_every_sample_once() -> None:
    results = run_ranks(4, draw)
    assert results[0][0] == results[1][0] == results[2][0]  # groups and stages of one replica
    first, second = results[0][0], results[3][0]
    seen = sorted(number for batch in (*first, *second) for number in batch)
    assert seen == list(range(2 * PLAN.global_batch + PLAN.micro_batch * 3))
    model, data = vit(), NumberedImages(100)
    optimizer = sgd(model)
    for mine, theirs, loss in zip(first, second, results[0][1], strict=True):
        rows = [data[index] for index in mine + theirs]
        alone = loss_of(model(torch.stack([row[0] for row in rows])), torch.stack([row[1] for row in rows]))
        alone.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(alone.item(), rel=1e-5)


# Messages -----------------------------------------------------------------------------------------------------------


def count_sent() -> tuple[int, int]:
    """Numbers that this rank sends in two steps: of tensors of the model, and others."""
    sent = {True: 0, False: 0}

    def counted(operations: list[dist.P2POp]) -> Any:
        for each in operations:
            if each.op is dist.isend:
                sent[each.tensor.is_floating_point()] += each.tensor.numel()
        return start(operations)

    start = p2p.dist.batch_isend_irecv
    with patch.object(p2p, "dist", ModuleProxy(p2p.dist, batch_isend_irecv=counted)):
        run = boost(plugin_for(PLANS["2-3"]), vit(), sgd)
        train(run, range(1))
        shapes = sent[False]
        train(run, range(1, 2))
    assert sent[False] == shapes  # only before the first message
    return sent[True], shapes


def test_every_sample_crosses_a_cut_once_each_way() -> None:
    results = run_ranks(5, count_sent)
    sample = 5 * 36  # tokens and their width
    assert sum(sent for sent, _ in results) == 2 * 2 * PLANS["2-3"].global_batch * sample
    assert all(shapes > 0 for _, shapes in results)


def groups_of_messages_and_sums(plan: Plan) -> tuple[bool, bool]:
    """Whether this rank sends messages, and whether over a group over which gradients are summed."""
    used: set[Any] = set()

    def recorded(operations: list[dist.P2POp]) -> Any:
        used.update(each.group for each in operations)
        return start(operations)

    start = p2p.dist.batch_isend_irecv
    with patch.object(p2p, "dist", ModuleProxy(p2p.dist, batch_isend_irecv=recorded)):
        run = boost(plugin_for(plan, planning=PlanConfig(layer_sums=True)), gpt2(), sgd)
        batch = samples("gpt2", 0, plan.global_batch, torch.float32)
        run.booster.execute_pipeline(iter([batch]), run.model, lambda outputs, _: outputs["loss"], run.optimizer)
    summed = {bucket.group for bucket in run.model.gradients.sums.buckets if bucket.is_shared}
    assert summed  # the embedding is tied
    return bool(used), bool(used & summed)


@pytest.mark.parametrize("plan", [PLANS["2-1"], make_plan([[[0], [1]]], [1, 3], 2, 2)])
def test_gradients_are_not_summed_over_groups_of_messages(plan: Plan) -> None:
    assert run_ranks(plan.world_size, groups_of_messages_and_sums, plan) == [(True, False)] * plan.world_size


# Evaluation -------------------------------------------------------------------------------------------------------

EVALUATED = [12, 11, 6, 2]
"""Samples: of whole micro-batches of 4, and with a smaller last one."""


def evaluate(plan: Plan) -> tuple[list[float], list[tuple[float | None, Tensor | None]], str]:
    """Losses of training, and the losses and outputs of other batches evaluated in between."""
    run, evaluated, losses = boost(plugin_for(plan), vit(), sgd), [], []
    for number, size in enumerate(EVALUATED):
        losses += train(run, range(number, number + 1))
        run.model.eval()
        with torch.no_grad():
            result = run.booster.execute_pipeline(
                iter([images(9, size)]), run.model, criterion, return_loss=True, return_outputs=True
            )
        run.model.train()
        evaluated.append((None if result["loss"] is None else float(result["loss"]), result["outputs"]))
    message = ""
    try:
        with torch.no_grad():
            run.booster.execute_pipeline(iter([images(9, 5)]), run.model, criterion)
    except ValueError as error:
        message = str(error)
    return losses, evaluated, message


@pytest.mark.parametrize(
    "plan", [wide([[0, 1], [2]], [3, 1], [2, 1], 4, 2), wide([[0], [2, 1]], [3, 1], [1, 2], 4, 2), PLANS["2"]]
)
def test_every_rank_of_the_last_stage_has_the_outputs_of_the_whole_batch(plan: Plan) -> None:
    results = run_ranks(plan.world_size, evaluate, plan)
    model = vit()
    optimizer = sgd(model)
    for number, size in enumerate(EVALUATED):
        inputs, labels = images(number, plan.global_batch)
        loss = loss_of(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            inputs, labels = images(9, size)
            outputs = model(inputs)
            # Colossal-AI's schedules average over micro-batches, also if the last one is smaller.
            starts = range(0, size, plan.micro_batch)
            parts = [slice(start, start + plan.micro_batch) for start in starts]
            mean = sum(loss_of(outputs[part], labels[part]).item() for part in parts) / len(parts)
        last = set(plan.replicas[0].stages[-1].ranks)
        for rank, (losses, evaluated, message) in enumerate(results):
            assert losses[number] == pytest.approx(loss.item(), rel=1e-5)
            assert "has a micro-batch of 1" in message and "give a multiple of 4 samples" in message
            found, given = evaluated[number]
            assert (found is not None) == (given is not None) == (rank in last)
            if found is not None and given is not None:
                assert found == pytest.approx(mean, rel=1e-5)
                torch.testing.assert_close(given, outputs, rtol=1e-4, atol=1e-5)


# Precision --------------------------------------------------------------------------------------------------------


def train_precisely(options: dict[str, Any], overflows: bool) -> tuple[list[float], float | None, list[bool]]:
    """Losses, the loss scale at the end, and whether parameters changed, by step."""
    run = boost(plugin_for(**options), vit(), sgd)
    losses, changed = [], []
    for number in range(4):
        before = run.parameters
        [(inputs, labels)] = own(run.plugin.plan, run.plugin.replica()[0], number)
        if overflows and number == 2 and run.plugin.replica()[0] == 0:
            inputs = inputs.clone()
            inputs[-1] = float("inf")  # a sample of the second group only
        losses.append(step(run, iter([(inputs, labels)])))
        changed.append(any(not torch.equal(before[name], each) for name, each in run.parameters.items()))
    mixed = getattr(run.optimizer, "mixed_precision", None) or getattr(run.optimizer, "mixed_precision_mixin", None)
    return losses, getattr(mixed, "loss_scale", None), changed


@pytest.mark.parametrize(("precision", "zero_stage"), [("bf16", 1), ("fp16", 0), ("bf16", 0), ("fp16", 1)])
def test_half_precision_trains_like_one_process(precision: str, zero_stage: int) -> None:
    options = dict(precision=precision, zero_stage=zero_stage, max_norm=100.0, initial_scale=2.0**8)
    for losses, _, changed in run_ranks(4, train_precisely, options, False):
        assert losses == pytest.approx(train_alone(4), rel=2e-2)
        assert all(changed)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_an_overflow_in_one_group_stops_the_step_of_all(zero_stage: int) -> None:
    options = dict(precision="fp16", zero_stage=zero_stage, initial_scale=2.0**8, hysteresis=1)
    for losses, scale, changed in run_ranks(4, train_precisely, options, True):
        assert changed == [True, True, False, True]
        assert scale == 2.0**7
        assert losses[3] == pytest.approx(train_alone(4, skipped=2)[3], rel=2e-2)


# Recomputation, checkpoints -----------------------------------------------------------------------------------------


def test_a_wide_stage_recomputes() -> None:
    compare(PLANS["2-1"], [(0, 0)], "gpt2_with_dropout")


def save_and_load(zero_stage: int, sharded: bool, folder: Path) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint, of the run that saved it and of one that loaded it."""

    def make() -> Trained:
        plugin = exact_zero(PLAN, zero_stage=1) if zero_stage else plugin_for()
        return boost(plugin, vit(), adamw)

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


@pytest.mark.parametrize(("zero_stage", "sharded"), [(0, True), (0, False), (1, True), (1, False)])
def test_plain_checkpoints_are_loaded_again(zero_stage: int, sharded: bool, tmp_path: Path) -> None:
    for undisturbed, loaded in run_ranks(4, save_and_load, zero_stage, sharded, tmp_path):
        assert loaded == pytest.approx(undisturbed, rel=1e-6)
    if not sharded and not zero_stage:
        assert torch.load(tmp_path / "model", weights_only=True).keys() == vit().state_dict().keys()


# Balancing, plans of the planner ------------------------------------------------------------------------------------


def train_balanced(balance: BalanceConfig | None) -> list[float]:
    with scripted(lambda rank, iteration: 4.0 if rank == 3 else 1.0):
        run = boost(plugin_for(BALANCED, balance=balance), vit(), sgd)
        losses = train(run, range(6))
    if balance is not None and dist.get_rank() in (2, 3):
        assert max(run.plugin.balancer.plan.migrate) > 0
    return losses


def test_a_group_of_a_wide_stage_migrates_work_of_a_slow_rank() -> None:
    usual = run_ranks(6, train_balanced, None)
    migrated = run_ranks(6, train_balanced, BalanceConfig(mode="migrate"))
    assert migrated == [pytest.approx(each, rel=1e-5) for each in usual]


def cluster() -> Topology:
    """A fast device and two that are half as fast, in two nodes. None has memory for the model of :func:`profile`."""
    kinds = DeviceKind("fast", 10**7, 2e9), DeviceKind("slow", 10**7, 1e9)
    nodes = tuple(
        Node(name, 0, ranks, Channel("shared memory", 1e9, 1e-5), (Channel("Ethernet", 1e9, 1e-5),))
        for name, ranks in (("a", (0, 1)), ("b", (2,)))
    )
    return Topology(tuple(Device(kinds[rank > 0], rank // 2, 0) for rank in range(3)), nodes, ("here",))


def profile() -> ModelProfile:
    """Two blocks, which a fast device computes in half the time."""
    times = tuple(
        layer_times(kind, (0.0, *(seconds * size,) * 2, 0.0), micro_batch=size)
        for kind, seconds in (("fast", 1e-3), ("slow", 2e-3))
        for size in (1, 2)
    )
    sizes = LayerSizes(
        parameter_bytes=(0, 15 * 10**5, 15 * 10**5, 0), activation_bytes=(1000,) * 4, output_bytes=(1000, 1000, 1000, 0)
    )
    return ModelProfile(name="tiny ViT", times=times, sizes=(sizes,))


def train_planned(path: Path) -> tuple[list[float], dict[str, int]]:
    """Losses, and the sizes of this rank's part of the model."""
    planning = PlanConfig(cluster=cluster(), profile=profile())
    run = boost(plugin_for(path, planning=planning), tiny_vit(depth=2), sgd)
    return train(run, range(3)), {name: each.numel() for name, each in run.parameters.items()}


def test_a_plan_of_the_whole_search_space_is_run(tmp_path: Path) -> None:
    made = make_plans(cluster(), profile(), global_batch=16, micro_batches=[2], space=WHOLE, keep=1)[0].plan
    assert made.has_wide_stages and why_not_runnable(made, 3) is None
    assert [stage.nodes for stage in made.replicas[0].stages] == [("a",), ("a", "b")]
    save_plan(made, tmp_path / "plan.json")
    model = tiny_vit(depth=2)
    optimizer, expected = sgd(model), []
    for number in range(3):
        inputs, labels = images(number, 16)
        loss = loss_of(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    results = run_ranks(3, train_planned, tmp_path / "plan.json")
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=1e-5)
    # The slow devices hold the same block, and the fast one the other.
    assert results[1][1] == results[2][1] and not results[0][1].keys() & results[1][1].keys()


# What is refused ----------------------------------------------------------------------------------------------------


def refused(options: dict[str, Any]) -> str:
    try:
        plugin_for(PLANS["2"], **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(zero_stage=2, precision="bf16"), "use 0 or 1"),
        (dict(batches=BatchConfig(global_batch_size=8)), "leave batches out"),
        (dict(zero_stage=1, precision="bf16", overlap_allgather=True), "overlap_allgather"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], word: str) -> None:
    for message in run_ranks(2, refused, options):
        assert "stages of several tensor-parallel groups" in message and word in message
        assert "choose a plan without widths" in message


def enable_lora() -> str:
    plugin = plugin_for(PLANS["2"])
    dist.barrier()
    try:
        plugin.enable_lora(vit())
    except ValueError as error:
        return str(error)
    return ""


def test_lora_is_refused() -> None:
    for message in run_ranks(2, enable_lora):
        assert "and then LoRA is not possible; choose a plan without widths" in message


def boost_with_samples_in_another_dimension() -> str:
    model: Any = vit()
    model.batch_size_dim = 1
    try:
        boost(plugin_for(PLANS["2"]), model, sgd)
    except ValueError as error:
        return str(error)
    return ""


def test_models_with_samples_in_another_dimension_are_refused() -> None:
    for message in run_ranks(2, boost_with_samples_in_another_dimension):
        assert "has them in dimension 1; choose a plan without widths" in message
