"""Several plugins in one process, whose tensor-parallel groups differ, save the weights of their own models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoints import read_weights
from tests.support.harness import run_ranks
from tests.support.planning import make_plan, planned
from tests.support.training import boost, sgd, tiny_vit

ORDERS = {
    2: ([[[0, 1]]], [[[1, 0]]], [[[0, 1]]]),
    3: ([[[0, 1, 2]]], [[[2, 0, 1]]]),
    4: ([[[0, 1]], [[2, 3]]], [[[3, 0]], [[1, 2]]], [[[0], [2]], [[1], [3]]], [[[1, 3]], [[0, 2]]]),
}


def check(folder: Path) -> None:
    runs = []
    for number, order in enumerate(ORDERS[dist.get_world_size()]):
        stages = len(order[0])
        model = tiny_vit()
        expected = model.state_dict()
        run = boost(planned(make_plan(order, (2 // stages,) * stages, 2, 2)), model, sgd)
        runs.append(run)  # so that no group is destroyed
        for each in range(2):
            path = folder / f"{number}-{each}"
            run.booster.save_model(run.model, str(path), shard=True)
            dist.barrier()
            saved = read_weights(path)
            assert saved.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(saved[name], value, rtol=0, atol=0, msg=f"{order}: {name}")


@pytest.mark.parametrize("ranks", ORDERS)
def test_weights_are_gathered_over_the_groups_of_their_own_plugin(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, check, tmp_path, timeout_seconds=60)
