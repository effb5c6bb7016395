"""Stages that train nothing, and stages that have no parameter of some group of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.parallel.plugin.hybrid.test_planned_zero import EQUAL, in_zero
from tests.parallel.plugin.unequal.test_unequal_replicas import PLANS
from tests.parallel.plugin.unequal.test_unequal_training import images, share, step_on
from tests.support.harness import run_ranks
from tests.support.planning import make_plan, planned
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import boost, tiny_vit, train_alone

STEPS, MAX_NORM = 3, 0.5
CASES = ("first stages are frozen", "last stage is frozen", "a group for each block", "nothing in the first group")
ALL_PLANS = {**EQUAL, **PLANS, "pp2": make_plan([[[0], [1]]], [3, 1], 2, 4)}


def partly_trained(case: str) -> tuple[nn.Module, Optimizer]:
    model = tiny_vit(depth=4)
    blocks = {number: list(block.parameters()) for number, block in enumerate(model.blocks)}
    inner = {id(each) for block in blocks.values() for each in block}
    outer = [each for each in model.parameters() if id(each) not in inner]
    if case == "a group for each block":
        groups = [outer, *reversed(blocks.values())]
    elif case == "nothing in the first group":
        groups = [blocks[3], [*outer, *blocks[0], *blocks[1], *blocks[2]]]
    else:
        trained = [blocks[3], [*model.norm.parameters(), *model.head.parameters()]]
        if case == "last stage is frozen":
            trained = [blocks[0], list(model.patch_embed.parameters())]
        model.requires_grad_(False)
        groups = trained
        for each in (each for group in groups for each in group):
            each.requires_grad = True
    rates = [dict(params=group, lr=0.05 / (number + 1)) for number, group in enumerate(groups)]
    return model, torch.optim.SGD(rates, momentum=0.9)


def train(name: str, zero: bool, case: str, by_optimizer: bool) -> list[float]:
    plan = in_zero(ALL_PLANS[name]) if zero else ALL_PLANS[name]
    model, optimizer = partly_trained(case)
    run = boost(planned(plan, max_norm=0 if by_optimizer else MAX_NORM), model, lambda _: optimizer)
    if by_optimizer:
        take = run.optimizer.step
        run.optimizer.step = lambda: (run.optimizer.clip_grad_by_norm(MAX_NORM), take())
    losses, mine = [], share(run.plugin)
    if len({len(replica.stages) for replica in plan.replicas}) == 1 and plan.symmetric:
        size = plan.global_batch // len(plan.replicas)
        index = int(run.plugin.pg_mesh.coordinate(run.plugin.dp_axis))
        mine = slice(index * size, (index + 1) * size)
    for number in range(STEPS):
        inputs, labels = images(number, plan.global_batch)
        losses.append(step_on(run, inputs, labels, mine))
    return losses


RUNS = [("pp2", False, True), ("1+2", True, False), ("dp2 pp2", False, False)]
"""Plan, whether in ZeRO stage 1, and whether the loop clips instead of the step."""
if IS_THOROUGH:
    RUNS += [("dp2 pp2", False, True), ("pp2", False, False), ("pp2", True, False), ("1+2", False, False)]
    RUNS += [("dp2 pp2", True, False)]


def train_all(runs: list[tuple[str, bool, bool]]) -> dict[Any, list[float]]:
    return {(run, case): train(*run[:2], case, run[2]) for run in runs for case in CASES}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_are_those_of_one_process(ranks: int) -> None:
    runs = [run for run in RUNS if ALL_PLANS[run[0]].world_size == ranks]
    sizes = {ALL_PLANS[run[0]].global_batch for run in runs}
    batches = {size: [images(number, size) for number in range(STEPS)] for size in sizes}
    alone = {
        (size, case): train_alone(*partly_trained(case), batches[size], max_norm=MAX_NORM)
        for size in sizes
        for case in CASES
    }
    for found in run_ranks(ranks, train_all, runs, timeout_seconds=280):
        for (run, case), losses in found.items():
            assert losses == pytest.approx(alone[ALL_PLANS[run[0]].global_batch, case], rel=1e-5), (run, case)
