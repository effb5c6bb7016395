"""The mesh of a planned run, and its data and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.cluster import ProcessGroupMesh
from torch.utils.data import TensorDataset

from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.plugin.hybrid.plan_agreement import as_launched
from tests.parallel.plugin.hybrid.test_planned_run import MICRO_BATCH, MICRO_BATCHES, train_planned
from tests.support.checkpoints import load_checkpoint, save_checkpoint
from tests.support.harness import run_ranks
from tests.support.planning import boosted, make_plan, planned
from tests.support.training import assert_same_parameters, tiny_vit

CROSSED = [[[1], [2]], [[3], [0]]]
"""Two replicas. In one data-parallel group the first replica has the lower rank, in the other group the higher one."""


def check_places(plan: Plan) -> tuple[int, int, int]:
    plugin = planned(plan)
    assert hybrid_parallel_plugin.ProcessGroupMesh is ProcessGroupMesh, "Colossal-AI's mesh class is still replaced"
    assert [plugin.dp_size, plugin.pp_size, plugin.tp_size] == [2, 2, 1]
    assert plugin.scheduler.num_microbatches == MICRO_BATCHES and plugin.scheduler.microbatch_size == MICRO_BATCH
    loader = plugin.prepare_dataloader(TensorDataset(torch.arange(32)), shuffle=True)
    assert loader.batch_size == MICRO_BATCH * MICRO_BATCHES
    assert dist.get_rank(plugin.dp_group) == plugin.pg_mesh.coordinate(plugin.dp_axis)
    return plugin.pg_mesh.coordinate(0), plugin.pg_mesh.coordinate(1), [int(x) for (batch,) in loader for x in batch]


def test_stages_of_a_replica_load_the_same_samples() -> None:
    plan = make_plan(CROSSED, (1, 3), MICRO_BATCH, MICRO_BATCHES)
    places = run_ranks(4, check_places, plan)
    by_place = {place[:2]: place[2] for place in places}
    assert by_place[0, 0] == by_place[0, 1] and by_place[1, 0] == by_place[1, 1]
    assert sorted(by_place[0, 0] + by_place[1, 0]) == list(range(32))
    # Rank 0 writes files that belong to no group, so it is in the first replica. Its stage is the planned one.
    assert places[0][:2] == (0, 1) and places[3][:2] == (0, 0)
    assert places[1][:2] == (1, 0) and places[2][:2] == (1, 1)


@pytest.mark.parametrize(
    "rank_order, expected",
    [
        ([[[3, 1], [2, 0]]], (((3, 1), (0, 2)),)),
        ([[[1], [2]], [[3], [0]]], (((3,), (0,)), ((1,), (2,)))),
        ([[[5, 4], [2, 3]]], (((3, 2), (0, 1)),)),
    ],
)
def test_rank_0_is_in_the_first_replica_and_first_in_its_tensor_parallel_group(
    rank_order: list, expected: tuple
) -> None:
    with patch.object(dist, "get_world_size", lambda: 4):
        assert as_launched(make_plan(rank_order, (1, 3), MICRO_BATCH, MICRO_BATCHES)).rank_order == expected


def check_round_trip(plan: Plan, folder: Path, sharded: bool, options: dict[str, Any]) -> None:
    run = boosted(plan, **options)
    train_planned(run, 2)
    saved = run.parameters
    save_checkpoint(run, folder, sharded)
    again = load_checkpoint(boosted(plan, seed=5, **options), folder, sharded)
    assert_same_parameters(again.parameters, saved, "loaded")
    # A plan with ranks in ascending order loads the checkpoint too. Sums over two replicas do not depend on the order.
    layers = plan.layers_per_stage
    other = make_plan([[[0], [1]], [[2], [3]]], layers, MICRO_BATCH, MICRO_BATCHES)
    elsewhere = load_checkpoint(boosted(other, seed=6, **options), folder, sharded)
    losses = train_planned(again, 3, first=2)
    assert losses == train_planned(elsewhere, 3, first=2)
    if "precision" in options:
        return  # a checkpoint of half-precision training has no fp32 weights
    assert losses == train_planned(run, 3, first=2)
    assert_same_parameters(again.parameters, run.parameters, "training continued")
    other = make_plan([[[0], [1]], [[2], [3]]], layers[::-1], MICRO_BATCH, MICRO_BATCHES)
    elsewhere = load_checkpoint(boosted(other, seed=7, **options), folder, sharded)
    assert train_planned(elsewhere, 3, first=2) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    "sharded, options",
    [
        pytest.param(False, {}, id="unsharded"),
        pytest.param(True, dict(precision="bf16", zero_stage=1), id="sharded-zero"),
    ],
)
def test_checkpoints_of_a_permuted_plan(sharded: bool, options: dict[str, Any], tmp_path: Path) -> None:
    plan = make_plan(CROSSED, (1, 3), MICRO_BATCH, MICRO_BATCHES)
    run_ranks(4, check_round_trip, plan, tmp_path, sharded, options)
    if not sharded:
        # The checkpoint is complete, and a model outside of any plugin can load it.
        alone = tiny_vit(depth=4)
        alone.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


# Balancing inside stages -----------------------------------------------------------------------------------------
