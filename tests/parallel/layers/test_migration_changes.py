"""Migration is exact while plans change, weights are frozen, and columns are pruned."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from colossal_hetero.balance import BalancePlan, pruning
from colossal_hetero.layers import hetero_layers
from tests.support.checks import Checks
from tests.support.migration_runs import (
    ITERATIONS,
    Watch,
    assert_equal,
    deciding_run,
    methods_for,
    migrating_run,
    reference_run,
)
from tests.support.training import (
    SlowdownScript,
    Trained,
    batch,
    loss_of,
    tiny_vit,
    train,
)

checks = Checks()

PHASE = 3


def each_rank_slow_in_turn(rank: int, iteration: int) -> float:
    """No rank is slow in the first phase, then rank 0, then none, then rank 1, and so on."""
    phase = iteration // PHASE
    return 4.0 if phase % 2 == 1 and phase // 2 == rank else 1.0


def one_rank_always_slow(rank: int, iteration: int) -> float:
    """Rank 0 is slow in the first phase, rank 1 in the second, and so on; some rank is slow at any time."""
    return 4.0 if iteration // PHASE == rank else 1.0


@checks.on(2, each_rank_slow_in_turn)
@checks.on(3, one_rank_always_slow)
def stragglers_that_come_and_go_or_follow_each_other(slowdown: SlowdownScript) -> None:
    world = dist.get_world_size()
    phases = world if slowdown is one_rank_always_slow else 2 * world + 1
    expected = train(reference_run(tp_size=world), PHASE * phases)
    for method in methods_for(phases):
        run = deciding_run(slowdown, method)
        watch = Watch(run)
        train(run, PHASE * phases, each=watch)
        senders = [tuple(rank for rank, share in enumerate(plan.migrate) if share > 0) for plan in watch.plans]
        turns = [pair[1] for pair in zip([(), *senders], senders, strict=False) if pair[0] != pair[1] and pair[1]]
        assert turns == [(rank,) for rank in range(world)], f"{method}: {senders}"
        assert_equal(run, expected, method)


class First:
    """A priority rule that keeps the first columns or units, so that a test knows which are pruned."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        return torch.arange(count)

    def end_interval(self, weight: Tensor) -> None: ...


def _pruned_columns(run: Trained) -> dict[str, tuple[int, int]]:
    """The contraction columns ``[start, stop)`` that this rank prunes, by layer."""
    found = {}
    for name, layer in hetero_layers(run.model.unwrap()).items():
        if layer.block is not None and layer.block.output is not layer:
            continue
        if layer.block is None:
            columns = layer.contraction_columns
            assert layer.workload is not None and layer._migration is not None
            given = layer._migration.given
            start, size, units = max(1, layer.workload.kept_count(columns) - given), 1, columns
        else:
            assert layer.block.workload is not None
            start, given, units = layer.block.workload.kept, layer.block.workload.given, layer.block.units
            size = layer.block.places[-1][0].size
        assert given > 0, name
        found[name] = (start * size, (units - given) * size)
    assert any(start < stop for start, stop in found.values()), "nothing is pruned"
    return found


def _train_without(run: Trained, iterations: int, left_out: dict[str, tuple[int, int]]) -> Trained:
    """Continue ``run``, which uses Colossal-AI's plugin, with these columns set to zero in forward and backward."""
    weights = {name: module.weight for name, module in run.model.unwrap().named_modules() if name in left_out}
    assert len(weights) == len(left_out)
    for iteration in range(iterations):
        kept = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, (start, stop) in left_out.items():
            weights[name].data[:, start:stop] = 0
        images, labels = batch(iteration)
        loss = loss_of(run.model(images), labels)
        run.losses.append(loss.item())
        run.booster.backward(loss, run.optimizer)
        for name, (start, stop) in left_out.items():
            weights[name].data.copy_(kept[name])
            weights[name].grad[:, start:stop] = 0
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run


@checks.on(2)
def a_rank_that_prunes_and_migrates_trains_the_remaining_columns_exactly() -> None:
    for sender, method in ((0, "block"), (1, "block"), (1, "broadcast-reduce")):
        what = f"{method}, sender {sender}"
        with patch.object(pruning, "make_selector", First):
            run = migrating_run(method, (), choices=dict(mode="semi"), tp_size=2)
            own, other = ((0.3, 0.0), (0.0, 0.3))[:: 1 - 2 * sender]
            run.plugin.balancer.follow(BalancePlan(resize=own, migrate=own, receive=other))
            left_out = _pruned_columns(run) if dist.get_rank() == sender else {}
            train(run, ITERATIONS)
        assert_equal(run, _train_without(reference_run(tp_size=2), ITERATIONS, left_out), what)


def _partly_frozen_vit() -> torch.nn.Module:
    """The weights of the first transformer block are frozen, as when only the last layers are trained."""
    model = tiny_vit()
    model.blocks[0].requires_grad_(False)
    return model


def _train_and_change(run: Trained) -> Trained:
    """Change frozen weights after some iterations, and train them in the end."""
    frozen = run.model.unwrap().blocks[0]
    train(run, 2)
    with torch.no_grad():
        for parameter in frozen.parameters():
            parameter.data.mul_(1.1)  # without a trace
    train(run, 2)
    frozen.requires_grad_(True)
    return train(run, 2)


@checks.on(2)
def frozen_weights_may_change() -> None:
    expected = _train_and_change(reference_run(_partly_frozen_vit(), tp_size=2))
    run = migrating_run("block", 1, _partly_frozen_vit(), tp_size=2)
    _train_and_change(run)
    assert_equal(run, expected, "frozen")


test_on_ranks = checks.test()
