"""Training with a plan, with any split and any order of ranks, equals training in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.pipeline import p2p
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.planner.cost.plan import Plan
from tests.support.harness import run_ranks
from tests.support.planning import make_plan
from tests.support.training import Trained, boost, loss_of, mean_over_replicas, pipeline_step, sgd, tiny_vit
from tests.support.training import train_alone as train_model_alone

ITERATIONS = 3
MICRO_BATCH, MICRO_BATCHES = 2, 4


def images_and_labels(iteration: int, size: int) -> tuple[Tensor, Tensor]:
    """A global batch: images ``[size, 3, 8, 8]`` and labels ``[size]``."""
    generator = torch.Generator().manual_seed(iteration)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(7, (size,), generator=generator)


def train_alone(depth: int, global_batch: int, iterations: int = ITERATIONS) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of one process with plain torch."""
    model = tiny_vit(depth=depth)
    batches = [images_and_labels(iteration, global_batch) for iteration in range(iterations)]
    return train_model_alone(model, sgd(model), batches), model.state_dict()


def train_planned(run: Any, iterations: int = ITERATIONS, first: int = 0, sizes: Plan | None = None) -> list[float]:
    """Train. Returns the losses of the global batch on every rank."""
    plugin = run.plugin
    plan: Plan = sizes or plugin.plan
    size = plan.global_batch // len(plan.replicas)
    losses = []
    for iteration in range(first, first + iterations):
        images, labels = images_and_labels(iteration, plan.global_batch)
        mine = slice(size * plugin.pg_mesh.coordinate(plugin.dp_axis), None)
        images, labels = images[mine][:size], labels[mine][:size]
        if plugin.pp_size > 1:
            own = pipeline_step(run, iter([(images, labels)]))
            # No message is kept for longer than a step.
            assert p2p.dist.batch_isend_irecv.__self__.kept == 0
        else:
            loss = loss_of(run.model(images), labels)
            run.booster.backward(loss, run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()
            own = loss.item()
        losses.append(mean_over_replicas(own, size))
    return losses


def check_parity(cases: list[tuple[list, list, dict[str, Any]]]) -> None:
    for rank_order, splits, options in cases:
        for split in splits:
            plan = make_plan(rank_order, split, MICRO_BATCH, MICRO_BATCHES)
            expected, weights = train_alone(plan.blocks, plan.global_batch)
            Randomizer.reset_index()  # ranks with other numbers of layers have counted differently
            plugin = HeteroHybridParallelPlugin(precision="fp32", plan=plan, **options)
            run = boost(plugin, tiny_vit(depth=plan.blocks), sgd)
            losses = train_planned(run)
            assert losses == pytest.approx(expected, rel=1e-5), (plan.rank_order, plan.layers_per_stage)
            if plan.tensor_parallel == 1:
                check_weights(run, weights)


def check_weights(run: Trained, weights: dict[str, Tensor]) -> None:
    """Assert that this stage has the blocks of the plan, with the weights of the reference."""
    held = {name: value for name, value in run.model.unwrap().state_dict().items() if value is not None}
    plugin = run.plugin
    stage = plugin.plan.replicas[0].stages[int(plugin.pg_mesh.coordinate(plugin.pp_axis))]
    assert dist.get_rank() in {
        rank for replica in plugin.plan.rank_order for rank in replica[plugin.plan.replicas[0].stages.index(stage)]
    }
    assert {int(name.split(".")[1]) for name in held if name.startswith("blocks.")} == set(range(*stage.blocks))
    for name, value in held.items():
        torch.testing.assert_close(
            value, weights[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


CASES: dict[int, list[tuple[list, list, dict[str, Any]]]] = {
    2: [
        ([[[0], [1]]], [(1, 5), (2, 4)], {"enable_metadata_cache": False}),
        ([[[1], [0]]], [(5, 1)], {}),
        ([[[1]], [[0]]], [(2,)], {}),
        ([[[1, 0]]], [(2,)], {}),
    ],
    3: [([[[0], [1], [2]]], [(1, 4, 1), (3, 1, 2)], {}), ([[[2], [0], [1]]], [(1, 4, 1)], {})],
    4: [
        ([[[3, 1], [2, 0]]], [(3, 1)], {}),
        ([[[3], [2]], [[1], [0]]], [(1, 3)], {}),
        # In one data-parallel group the first replica has the lower rank, in the other group the higher one.
        ([[[1], [2]], [[3], [0]]], [(3, 1)], {}),
        ([[[3], [0]], [[1], [2]]], [(3, 1)], {"dp_outside": False}),
        ([[[0, 2]], [[3, 1]]], [(2,)], {}),
    ],
}
"""By number of ranks: ranks by replica and stage, splits of the blocks, and options of the plugin."""


@pytest.mark.parametrize("ranks", CASES)
def test_training_with_any_split_equals_that_of_one_process(ranks: int) -> None:
    run_ranks(ranks, check_parity, CASES[ranks])
