"""Units that are permanently re-sharded: training and evaluation are those of the unsharded model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.checkpoints import read_weights
from tests.support.harness import run_ranks
from tests.support.migration_runs import migrate
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import SlowdownScript, boost, ours, scripted
from tests.support.uneven_runs import MAX_NORM, adamw, largest_difference, loss_of, small_vit, train, train_alone

AFTER = 2
"""Iterations in which a rank is relieved before its units are permanently re-sharded."""
FASTER, RECOVERY, STEPS = 6, 13, 19
"""The iterations in which the slow rank becomes faster, and as fast as the others again."""


def slow_until_recovery(straggler: int) -> SlowdownScript:
    """The straggler is slow, and the other ranks differ a little; later the next rank becomes slow, if there are more
    than two."""

    def slowdown(rank: int, iteration: int) -> float:
        if iteration >= RECOVERY:
            return 1.0
        if rank == straggler:
            return 2.5 if iteration >= FASTER else 4.0
        if iteration >= FASTER and dist.get_world_size() > 2 and rank == (straggler + 1) % dist.get_world_size():
            return 4.0
        return 1.0 + 0.2 * (rank % 3)

    return slowdown


def _train_with_a_straggler(straggler: int, folder: Path) -> dict[str, Any]:
    with scripted(slow_until_recovery(straggler)):
        plugin = ours(migrate("block", reshard_after=AFTER), tp_size=dist.get_world_size(), max_norm=MAX_NORM)
        run = boost(plugin, small_vit(), adamw)
    balancer = run.plugin.balancer
    weight = run.model.unwrap().blocks[0].mlp.fc1.weight
    sent, widths = [], []

    def watch(step: int) -> None:
        widths.append(len(weight))
        sent.append(sum(found.messages for found in balancer.traffic.sent.values()))
        balancer.traffic.reset()

    train(run, RECOVERY, watch)
    evaluated = evaluate(run.model)
    run.booster.save_model(run.model, str(folder / "uneven"), shard=True)
    train(run, STEPS - RECOVERY, watch)
    run.booster.save_model(run.model, str(folder / "even"), shard=True)
    if (records := balancer.collect()) is not None:
        moved = [(record.ranks[straggler].migrated > 0, record.ranks[straggler].resharded > 0) for record in records]
        # An iteration without a plan, some in which units migrate, then those in which they are permanently re-sharded.
        assert list(dict.fromkeys(moved)) == [(False, False), (True, False), (False, True)], moved
        assert moved[-1] == (False, False)
    return dict(widths=widths, sent=sent, losses=[*run.losses, evaluated, evaluate(run.model)])


def evaluate(model: nn.Module) -> float:
    """The loss of a batch of its own, in evaluation."""
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, STEPS).item()
    model.train()
    return loss


def _train_with_each_straggler(folder: Path) -> list[dict[str, Any]]:
    return [_train_with_a_straggler(rank, folder / str(rank)) for rank in range(dist.get_world_size())]


@pytest.mark.parametrize("ranks", [2, 3, 4] if IS_THOROUGH else [2, 3])
def test_training_is_that_of_the_unsharded_model_in_one_process(ranks: int, tmp_path: Path) -> None:
    expected = {steps: train_alone(steps) for steps in (RECOVERY, STEPS)}
    losses = [*expected[STEPS][1], *(evaluate(model) for model, _ in expected.values())]
    even = 60 // ranks
    for straggler, found in enumerate(zip(*run_ranks(ranks, _train_with_each_straggler, tmp_path), strict=True)):
        held = [of_rank["widths"][FASTER - 1] for of_rank in found]
        assert sum(held) == 60
        assert held[straggler] < even < max(held)
        assert ranks == 2 or len({*held[:straggler], *held[straggler + 1 :]}) > 1, held
        # When speeds changed, some units moved, and the straggler did not take all of its own back.
        later = [of_rank["widths"][RECOVERY - 1] for of_rank in found]
        assert held[straggler] < later[straggler] < even
        assert ranks == 2 or later[(straggler + 1) % ranks] < even, later
        assert even not in found[straggler]["widths"][FASTER:RECOVERY]
        for rank, of_rank in enumerate(found):
            where = f"rank {rank}, straggler {straggler}"
            assert of_rank["losses"] == pytest.approx(losses, rel=1e-10), where
            assert of_rank["widths"][-1] == even, where
            # Weights migrate before; nothing is sent while units are permanently re-sharded.
            assert rank != straggler or max(of_rank["sent"]) > 0, where
            assert of_rank["sent"][FASTER - 1] == of_rank["sent"][RECOVERY - 1] == 0, f"{where}: {of_rank['sent']}"
        for name, steps in (("uneven", RECOVERY), ("even", STEPS)):
            weights = read_weights(tmp_path / str(straggler) / name)
            assert largest_difference(weights, expected[steps][0].state_dict()) <= 1e-10, f"{name}, {straggler}"
