"""Training by a plan: any split, in any order of ranks, is the same training as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.planner.plan import Plan

from .harness import run_ranks
from .planning import make_plan
from .training import boost, loss_of, sgd, tiny_vit

ITERATIONS = 4
MICRO_BATCH, MICRO_BATCHES = 2, 4


def images_and_labels(iteration: int, size: int) -> tuple[Tensor, Tensor]:
    """A global batch: images ``[size, 3, 8, 8]`` and labels ``[size]``."""
    generator = torch.Generator().manual_seed(iteration)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(7, (size,), generator=generator)


def train_alone(depth: int, global_batch: int, iterations: int = ITERATIONS) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of one process with plain torch."""
    model = tiny_vit(depth=depth)
    optimizer = sgd(model)
    losses = []
    for iteration in range(iterations):
        images, labels = images_and_labels(iteration, global_batch)
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def train_planned(run: Any, iterations: int = ITERATIONS, first: int = 0) -> list[float]:
    """Losses of the global batch, on every rank."""
    plugin = run.plugin
    plan: Plan = plugin.plan
    size = plan.global_batch // len(plan.replicas)
    losses = []
    for iteration in range(first, first + iterations):
        images, labels = images_and_labels(iteration, plan.global_batch)
        mine = slice(size * plugin.pg_mesh.coordinate(plugin.dp_axis), None)
        images, labels = images[mine][:size], labels[mine][:size]
        if plugin.pp_size > 1:
            loss = run.booster.execute_pipeline(
                iter([(images, labels)]),
                run.model,
                lambda outputs, inputs: loss_of(outputs, inputs[1]),
                run.optimizer,
                return_loss=True,
            )["loss"]
        else:
            loss = loss_of(run.model(images), labels)
            run.booster.backward(loss, run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()
        # Each replica's loss is on its last stage.
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, None if loss is None else loss.item() / plan.tensor_parallel)
        losses.append(sum(share for share in shares if share is not None) / len(plan.replicas))
    return losses


def check_parity(plan: Plan, expected: list[float], weights: dict[str, Tensor]) -> None:
    run = boost(HeteroHybridParallelPlugin(precision="fp32", plan=plan), tiny_vit(depth=plan.blocks), sgd)
    held = [name for name in run.model.unwrap().state_dict() if name.startswith("blocks.")]
    losses = train_planned(run)
    assert losses == pytest.approx(expected, rel=1e-5), plan.rank_order
    a, b = plan.replicas[0].stages[run.plugin.stage_manager.stage].blocks
    assert {int(name.split(".")[1]) for name in held} >= set(range(a, b))


@pytest.mark.parametrize(
    "rank_order, splits",
    [
        pytest.param([[[0], [1]]], [(3, 3), (1, 5), (5, 1), (2, 4)], id="2-stages"),
        pytest.param([[[1], [0]]], [(3, 3), (1, 5), (5, 1)], id="2-stages-reversed"),
    ],
)
def test_any_split_trains_like_one_process(rank_order: list, splits: list) -> None:
    plans = [make_plan(rank_order, split, MICRO_BATCH, MICRO_BATCHES) for split in splits]
    expected = train_alone(plans[0].blocks, plans[0].global_batch)
    run_ranks(plans[0].world_size, check_all, plans, *expected)


def check_all(plans: list[Plan], expected: list[float], weights: dict[str, Tensor]) -> None:
    for plan in plans:
        check_parity(plan, expected, weights)
