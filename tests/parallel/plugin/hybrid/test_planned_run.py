"""Training with a plan, with any split and any order of ranks, in stage 0 or ZeRO, equals training in one process,
also if stages train nothing or have no parameter of some group of the optimizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.cluster import ProcessGroupMesh
from colossalai.shardformer.layer.utils import Randomizer
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.plugin.hybrid.plan_agreement import as_launched
from tests.parallel.plugin.unequal.test_unequal_replicas import PLANS
from tests.support import training
from tests.support.checkpoints import load_checkpoint, save_checkpoint
from tests.support.checks import of_all_ranks, on
from tests.support.planned_runs import ITERATIONS, MICRO_BATCH, MICRO_BATCHES, images_and_labels, train_planned
from tests.support.planning import boosted, make_plan, planned
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import Trained, assert_same_parameters, boost, tiny_vit

MAX_NORM = 0.5
CROSSED = [[[1], [2]], [[3], [0]]]
"""Two replicas. In one data-parallel group the first replica has the lower rank, in the other group the higher one."""


class Case(NamedTuple):
    plan: Plan
    options: dict[str, Any] | None = None
    trained: str = ""  # what is trained, with clipped gradients; all, without clipping
    loop_clips: bool = False  # the loop clips, and not the step


def of(rank_order: list[Any], *splits: tuple[int, ...], **options: Any) -> Iterator[Case]:
    for split in splits:
        yield Case(make_plan(rank_order, split, MICRO_BATCH, MICRO_BATCHES), options)


def in_zero(plan: Plan, **changes: Any) -> Plan:
    return plan.model_copy(update={"zero_stage": 1, **changes})


DP2_PP2 = make_plan([[[3], [0]], [[1], [2]]], [3, 1], 2, 3)
PP2 = make_plan([[[0], [1]]], [3, 1], 2, 4)
CASES: dict[int, list[Case]] = {
    2: [
        *of([[[0], [1]]], (1, 5), (2, 4), enable_metadata_cache=False),
        *of([[[1], [0]]], (5, 1)),
        *of([[[1]], [[0]]], (2,)),
        *of([[[1, 0]]], (2,)),
    ],
    3: [
        *of([[[0], [1], [2]]], (1, 4, 1), (3, 1, 2)),
        *of([[[2], [0], [1]]], (1, 4, 1)),
        Case(in_zero(make_plan([[[0]], [[1]], [[2]]], [4], 2, 1))),
    ],
    4: [
        *of([[[3, 1], [2, 0]]], (3, 1)),
        *of([[[3], [2]], [[1], [0]]], (1, 3)),
        *of(CROSSED, (3, 1)),
        *of([[[3], [0]], [[1], [2]]], (3, 1), dp_outside=False),
        *of([[[0, 2]], [[3, 1]]], (2,)),
        # In ZeRO stage 1, without being told so.
        *(Case(in_zero(plan)) for plan in (DP2_PP2, make_plan([[[0, 1]], [[2, 3]]], [4], 2, 2))),
        Case(in_zero(DP2_PP2, precision="bf16")),
    ],
}
FROZEN = ("first stages are frozen", "last stage is frozen", "a group for each block", "nothing in the first group")
PARTLY = [(PP2, True), (in_zero(PLANS["1+2"]), False), (DP2_PP2, False)]
if IS_THOROUGH:
    CASES[2].append(Case(in_zero(make_plan([[[0]], [[1]]], [4], 2, 2))))
    PARTLY += [(DP2_PP2, True), (PP2, False), (in_zero(PP2), False), (PLANS["1+2"], False), (in_zero(DP2_PP2), False)]
for plan, loop_clips in PARTLY:
    CASES[plan.world_size] += [Case(plan, None, trained, loop_clips) for trained in FROZEN]


def make(case: Case) -> tuple[nn.Module, Optimizer]:
    model = tiny_vit(depth=case.plan.blocks)
    if not case.trained:
        return model, (training.adamw if case.plan.zero_stage else training.sgd)(model)
    blocks = [list(block.parameters()) for block in model.blocks]
    inner = {id(each) for block in blocks for each in block}
    outer = [each for each in model.parameters() if id(each) not in inner]
    if case.trained == "a group for each block":
        groups = [outer, *reversed(blocks)]
    elif case.trained == "nothing in the first group":
        groups = [blocks[3], [*outer, *blocks[0], *blocks[1], *blocks[2]]]
    else:
        groups = [blocks[3], [*model.norm.parameters(), *model.head.parameters()]]
        if case.trained == "last stage is frozen":
            groups = [blocks[0], list(model.patch_embed.parameters())]
        model.requires_grad_(False)
        for each in (each for group in groups for each in group):
            each.requires_grad = True
    rates = [dict(params=group, lr=0.05 / (number + 1)) for number, group in enumerate(groups)]
    return model, torch.optim.SGD(rates, momentum=0.9)


@on(2)
@on(3)
@on(4)
def training_equals_that_of_one_process() -> None:
    for case in CASES[dist.get_world_size()]:
        plan, has_zero, is_half = case.plan, case.plan.zero_stage == 1, case.plan.precision == "bf16"
        Randomizer.reset_index()  # ranks with other numbers of layers have counted differently
        model, optimizer = make(case)
        max_norm = MAX_NORM if case.trained else 0.0
        options = dict(max_norm=0.0 if case.loop_clips else max_norm, precision=plan.precision) | (case.options or {})
        run = boost(planned(plan, **options), model, lambda _, optimizer=optimizer: optimizer)
        if case.loop_clips:
            step = run.optimizer.step
            run.optimizer.step = lambda run=run, step=step: (run.optimizer.clip_grad_by_norm(MAX_NORM), step())
        assert run.plugin.zero_stage == plan.zero_stage and run.plugin.precision == plan.precision
        losses = train_planned(run)
        alone, optimizer = make(case)
        batches = [images_and_labels(number, plan.global_batch) for number in range(ITERATIONS)]
        expected = training.train_alone(alone, optimizer, batches, max_norm=max_norm)
        assert losses == pytest.approx(expected, rel=0.02 if is_half else 1e-5), case
        if plan.tensor_parallel == 1 and not is_half:
            # Adam amplifies rounding errors of gradients that are 0.
            tolerance = dict(rtol=1e-3, atol=2e-4) if has_zero else dict(rtol=1e-4, atol=1e-6)
            check_weights(run, alone, **tolerance)
        if has_zero and not is_half and not case.trained:
            check_shards(run, len(plan.replicas))


def check_weights(run: Trained, alone: nn.Module, **tolerance: float) -> None:
    held = {name: value for name, value in run.model.unwrap().state_dict().items() if value is not None}
    (stage,) = [stage for each in run.plugin.plan.replicas for stage in each.stages if dist.get_rank() in stage.ranks]
    assert {int(name.split(".")[1]) for name in held if name.startswith("blocks.")} == set(range(*stage.blocks))
    torch.testing.assert_close(held, {name: alone.state_dict()[name] for name in held}, **tolerance)


def check_shards(run: Trained, replicas: int) -> None:
    """This rank keeps its share of two moments and a copy; parameters are padded to a multiple of the replicas."""
    optimizer, own = run.optimizer.optim, {each.data_ptr(): each.numel() for each in run.model.unwrap().parameters()}
    kept = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    kept += [each for group in optimizer.param_groups for each in group["params"] if each.data_ptr() not in own]
    assert sum(each.numel() for each in kept) == pytest.approx(sum(own.values()) * 3 / replicas, rel=0.01)


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
