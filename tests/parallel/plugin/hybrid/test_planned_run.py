"""Places of ranks in a plan, and its checkpoints. ``test_unequal_replicas.py`` trains with plans."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.cluster import ProcessGroupMesh
from torch.utils.data import TensorDataset

from colossal_hetero.plugin.hybrid.plan_agreement import as_launched
from tests.parallel.plugin.unequal.test_unequal_replicas import CROSSED
from tests.support.checkpoints import load_checkpoint, save_checkpoint
from tests.support.checks import of_all_ranks, on
from tests.support.planned_runs import MICRO_BATCH, MICRO_BATCHES, train_alone, train_planned
from tests.support.planning import boosted, make_plan, planned
from tests.support.training import assert_same_parameters, tiny_vit


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
