"""Places of ranks in a plan, and its checkpoints; ``test_unequal_replicas.py`` trains with plans. A plan with stages
that recompute trains as the same plan without, bit for bit, and these stages keep less."""

import time
from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.cluster import ProcessGroupMesh
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from colossal_hetero import BalanceConfig
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.plugin.hybrid.plan_agreement import as_launched
from tests.parallel.plugin.unequal import test_unequal_replicas as unequal
from tests.parallel.plugin.unequal.test_unequal_replicas import CROSSED, loss_of, samples
from tests.support.checks import if_thorough, of_all_ranks, on
from tests.support.counted_memory import CountedMemory
from tests.support.model_families import allow_cpu
from tests.support.planning import MICRO_BATCH, MICRO_BATCHES, boosted, make_plan, planned, train_alone, train_planned
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import (
    assert_same_parameters,
    boost,
    load_checkpoint,
    pipeline_step,
    save_checkpoint,
    scripted,
    sgd,
    tiny_vit,
)


@on(4)
def zero_and_precision_follow_from_the_plan() -> None:
    plan = make_plan([[[3], [0]], [[1], [2]]], [3, 1], 2, 3, zero_stage=1, precision="bf16")
    run = boosted(plan, precision="bf16")
    assert run.plugin.zero_stage == 1 and run.plugin.precision == "bf16"
    assert train_planned(run) == pytest.approx(train_alone(plan.blocks, plan.global_batch)[0], rel=0.02)


@on(4)
def stages_of_a_replica_load_the_same_samples() -> None:
    plugin = planned(make_plan(CROSSED, (1, 3), MICRO_BATCH, MICRO_BATCHES))
    assert hybrid_parallel_plugin.ProcessGroupMesh is ProcessGroupMesh, "Colossal-AI's mesh class is still replaced"
    assert [plugin.dp_size, plugin.pp_size, plugin.tp_size] == [2, 2, 1]
    assert plugin.scheduler.num_microbatches == MICRO_BATCHES and plugin.scheduler.microbatch_size == MICRO_BATCH
    loader = plugin.prepare_dataloader(TensorDataset(torch.arange(32)), shuffle=True)
    assert loader.batch_size == MICRO_BATCH * MICRO_BATCHES
    assert dist.get_rank(plugin.dp_group) == plugin.pg_mesh.coordinate(plugin.dp_axis)
    places = of_all_ranks([plugin.pg_mesh.coordinate(axis) for axis in (0, 1)])
    # Rank 0 writes files that belong to no group, so it is in the first replica. Its stage is the planned one.
    assert places == [[0, 1], [1, 0], [1, 1], [0, 0]]
    drawn = of_all_ranks([int(number) for (batch,) in loader for number in batch])
    assert drawn[0] == drawn[3] and drawn[1] == drawn[2] and sorted(drawn[0] + drawn[1]) == list(range(32))


@pytest.mark.parametrize(
    "rank_order, expected",
    [
        ([[[3, 1], [2, 0]]], (((3, 1), (0, 2)),)),
        (CROSSED, (((3,), (0,)), ((1,), (2,)))),
        ([[[5, 4], [2, 3]]], (((3, 2), (0, 1)),)),
    ],
)
def test_rank_0_is_in_the_first_replica_and_first_in_its_tensor_parallel_group(rank_order: Any, expected: Any) -> None:
    with patch.object(dist, "get_world_size", lambda: 4):
        assert as_launched(make_plan(rank_order, (1, 3))).rank_order == expected


@on(4, False, {})
@on(4, True, dict(precision="bf16", zero_stage=1))
def checkpoints_of_a_permuted_plan(sharded: bool, options: dict[str, Any], folder: Path) -> None:
    run = boosted(make_plan(CROSSED, (1, 3)), **options)
    train_planned(run, 2)
    saved = run.parameters
    save_checkpoint(run, folder, sharded)
    again = load_checkpoint(boosted(make_plan(CROSSED, (1, 3)), seed=5, **options), folder, sharded)
    assert_same_parameters(again.parameters, saved, "loaded")
    # A plan with ranks in ascending order loads the checkpoint too. Sums over two replicas do not depend on the order.
    ascending = [[[0], [1]], [[2], [3]]]
    elsewhere = load_checkpoint(boosted(make_plan(ascending, (1, 3)), seed=6, **options), folder, sharded)
    losses = train_planned(again, 3, first=2)
    assert losses == train_planned(elsewhere, 3, first=2)
    if options:
        return  # a checkpoint of half-precision training has no fp32 weights
    assert losses == train_planned(run, 3, first=2)
    assert_same_parameters(again.parameters, run.parameters, "training continued")
    elsewhere = load_checkpoint(boosted(make_plan(ascending, (3, 1)), seed=7, **options), folder, sharded)
    assert train_planned(elsewhere, 3, first=2) == pytest.approx(losses, rel=1e-5)
    # The checkpoint is complete, and a model outside of any plugin can load it.
    tiny_vit(depth=4).load_state_dict(torch.load(folder / "model.pt", weights_only=True))


# Recomputation -------------------------------------------------------------------------------------------------------


DROPOUT = 0.2


def vit_with_dropout() -> nn.Module:
    return tiny_vit(depth=4, proj_drop_rate=DROPOUT, attn_drop_rate=DROPOUT, drop_path_rate=DROPOUT)


MODELS = unequal.MODELS | dict(
    gpt2_with_dropout=partial(unequal.gpt2, dropout=DROPOUT),
    llama_with_cache=partial(unequal.llama, use_cache=True),
    vit_with_dropout=vit_with_dropout,
)


def recomputing(plan: Plan, stages: Collection[tuple[int, int]]) -> Plan:
    replicas = []
    for number, one in enumerate(plan.replicas):
        changed = (each.model_copy(update={"recompute": (number, k) in stages}) for k, each in enumerate(one.stages))
        replicas.append(one.model_copy(update={"stages": tuple(changed)}))
    return plan.model_copy(update={"replicas": tuple(replicas)})


def train(plan: Plan, name: str, switched_on: bool = False) -> tuple[list[float | None], dict[str, Tensor], int]:
    """Losses of this rank's replica, its parameters, and the bytes that its first micro-batch keeps for backward."""
    allow_cpu()
    torch.manual_seed(3)
    Randomizer.reset_index()  # an earlier model of this process has counted
    # Colossal-AI divides the vocabulary of tensor-parallel models; their own loss is in fp32.
    dtype = torch.float64 if plan.tensor_parallel == 1 else torch.float32
    module = MODELS[name]().to(dtype)
    if switched_on:
        enable = getattr(module, "gradient_checkpointing_enable", None) or module.set_grad_checkpointing
        enable()
    run = boost(planned(plan), module, sgd)
    micro_batches = run.plugin.plan.replicas[run.plugin.replica()[0]].micro_batches
    losses: list[float | None] = []
    memory, kept = CountedMemory(), list[int]()

    def keep(*_: Any) -> None:
        if not kept:
            time.sleep(0.1)  # A thread of Gloo may still hold what it has summed.
            kept.append(memory.used_bytes())

    run.model.register_forward_hook(keep)
    for step in range(2):
        batch = samples("vit" if "vit" in name else name, step, plan.micro_batch * micro_batches, dtype)
        with nullcontext() if kept else memory:
            losses.append(pipeline_step(run, iter([batch]), loss_of))
    return losses, run.parameters, kept[0]


PLANS: dict[str, Plan] = unequal.PLANS | {
    "pp1": make_plan([[[0]]], [4], 2, 3),
    "pp2": make_plan([[[0], [1]]], [3, 1], 2, 4),
    "pp3": make_plan([[[2], [0], [1]]], [2, 1, 1], 2, 5),
    "dp2 pp2": make_plan([[[0], [1]], [[2], [3]]], [3, 1], 2, 3),
    "tp2": make_plan([[[0, 1]]], [4], 2, 2),
    "tp2 pp2": make_plan([[[0, 1], [2, 3]]], [1, 3], 2, 3),
}

CASES: list[tuple[str, list[tuple[int, int]], str]] = [
    ("pp2", [(0, 0)], "llama_with_cache"),
    ("pp2", [(0, 0)], "vit_with_dropout"),
    ("pp3", [(0, 1), (0, 2)], "gpt2_with_dropout"),
    ("1+2", [(0, 0), (1, 1)], "llama_with_cache"),
    # Dropout of tensor-parallel layers has a random state of its own.
    ("tp2 pp2", [(0, 1)], "gpt2_with_dropout"),
]
"""Plan, its stages (replica, stage) that recompute, and model."""
if IS_THOROUGH:
    CASES += [("pp2", [(0, 0)], "bert"), ("pp2", [(0, 0)], "gpt2"), ("pp1", [(0, 0)], "gpt2_with_dropout")]
    CASES += [("dp2 pp2", [(0, 0), (1, 1)], "vit_with_dropout"), ("tp2", [(0, 0)], "vit_with_dropout")]
    CASES += [("2+1", [(0, 1)], "vit_with_dropout")]


@if_thorough(1)
@on(2)
@on(3)
@on(4)
def stages_recompute() -> None:
    for plan, stages, name in CASES:
        if PLANS[plan].world_size != dist.get_world_size():
            continue
        usual, found = train(PLANS[plan], name), train(recomputing(PLANS[plan], stages), name)
        assert usual[0] == found[0], (plan, name)
        assert_same_parameters(found[1], usual[1], f"{plan}, {name}")
        if any(dist.get_rank() in PLANS[plan].replicas[number].stages[index].ranks for number, index in stages):
            assert found[2] < 0.5 * usual[2], (plan, name)
        else:
            assert found[2] == usual[2], (plan, name)


@on(1)
def what_the_script_switched_on_is_not_done_twice() -> None:
    plan = recomputing(PLANS["pp1"], [(0, 0)])
    for name in ("gpt2", "vit"):
        _, usual, once = train(plan, name)
        _, found, both = train(plan, name, True)
        assert_same_parameters(found, usual, name)
        assert both == once, name


def train_balanced(plan: Plan) -> list[float]:
    with scripted(lambda rank, iteration: 4.0 if rank == 3 else 1.0):
        run = boost(planned(plan, balance=BalanceConfig(mode="migrate")), tiny_vit(depth=4), sgd)
        losses = train_planned(run, 6)
    if dist.get_rank() > 1:
        assert max(run.plugin.balancer.plan.migrate) > 0
    return losses


@on(4)
def a_stage_that_recomputes_migrates_work_of_a_slow_rank() -> None:
    plan = PLANS["tp2 pp2"]
    assert train_balanced(recomputing(plan, [(0, 1)])) == pytest.approx(train_balanced(plan), rel=1e-6)
