"""Waiting for other ranks does not count as a rank's own work, also while work migrates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from colossal_hetero import BalanceConfig
from colossal_hetero.balance import BalancePlan
from colossal_hetero.layers import hetero_layers
from tests.support.checks import Checks
from tests.support.language_models import gpt2, plan_of, train_on_tokens
from tests.support.training import Trained, boost, ours, sgd, train

checks = Checks()


LATE = 0.4
"""Seconds by which one rank starts each iteration late. An iteration takes a twentieth of that."""

NEVER = BalanceConfig(mode="migrate", warmup_iterations=10**6, measure_costs=False)


@checks.on(2, "block", 0, 0)
@checks.on(2, "block", 1, 0)
@checks.on(2, "broadcast-reduce", 0, 1)
def waiting_for_migrated_work_is_no_work(migration: str, giver: int, late: int) -> None:
    """The late rank sleeps before its forward pass; the others wait for what it sends, or for its collectives."""
    run = boost(ours(BalanceConfig(**{**vars(NEVER), "migration": migration}), tp_size=dist.get_world_size()))
    train(run, 1)
    run.plugin.balancer.follow(plan_of(giver, 2))
    if dist.get_rank() == late:
        run.model.unwrap().register_forward_pre_hook(lambda *_: time.sleep(LATE), prepend=True)
    train(run, 2)
    records = run.plugin.balancer.collect()
    if records is not None:
        for record in records[-2:]:
            for rank, seconds in enumerate(record.ranks):
                assert seconds.work_seconds < LATE / 2, f"rank {rank} worked {seconds.work_seconds} s: {record}"
            waited = max(seconds.communication_seconds for seconds in record.ranks)
            assert waited > LATE / 2, f"nobody waited: {record}"


@checks.on(2)
def a_giver_does_not_wait_for_a_late_receiver_before_its_own_products() -> None:
    late, giver = 0, 1
    run = boost(ours(NEVER, tp_size=2))
    train(run, 2)
    run.plugin.balancer.follow(plan_of(giver, 2))
    train(run, 1)
    seconds: list[float] = []
    model = run.model.unwrap()
    first = next(iter(hetero_layers(model).values()))

    def begin(*_: Any) -> None:
        seconds.append(-time.perf_counter())
        if dist.get_rank() == late:
            time.sleep(LATE)

    def end_first(product: Callable[[], Any]) -> Any:
        result = product()
        if len(seconds) % 2:
            seconds.append(time.perf_counter())
        return result

    model.register_forward_pre_hook(begin, prepend=True)
    first.slow_down = end_first  # units of blocks with hooks do not migrate
    for _ in range(2):
        dist.barrier()
        train(run, 1)
    if dist.get_rank() == giver:
        elapsed = [start + end for start, end in zip(seconds[::2], seconds[1::2], strict=True)]
        assert max(elapsed) < LATE / 2, f"the first product ended after {elapsed} s"


@checks.on(2)
def a_late_rank_that_is_also_slow_is_relieved_and_the_others_are_not() -> None:
    """Rank 1 starts each iteration late, and its products take four times as long."""
    config = BalanceConfig(mode="auto", measure_costs=False)
    run = boost(ours(config, tp_size=2))
    if dist.get_rank() == 1:
        run.model.unwrap().register_forward_pre_hook(lambda *_: time.sleep(LATE / 2), prepend=True)
    for layer in hetero_layers(run.model).values():
        outputs: list[int] = []

        def slow_down(product: Any, outputs: list[int] = outputs) -> Any:
            result = product()
            outputs.append(result.numel())
            # Half of the products become smaller with the units of a block; the others do not.
            time.sleep((0.004 if dist.get_rank() == 1 else 0.001) * result.numel() / max(outputs[:3]))
            return result

        layer.slow_down = slow_down
    train(run, 12)
    records = run.plugin.balancer.collect()
    if records is not None:
        given = [[rank.migrated for rank in record.ranks] for record in records]
        assert all(fast == 0.0 for fast, _ in given), given
        assert given[-1][1] > 0.2, given


@checks.on(4)
def the_cost_of_migration_is_learned_without_the_bubble_of_a_pipeline() -> None:
    """The first stage is late in every micro-batch, and units migrate in the second one."""
    run = boost(ours(NEVER, tp_size=2, pp_size=2, num_microbatches=2))
    train(run, 2)
    is_first = run.plugin.stage_manager.is_first_stage()
    run.plugin.balancer.follow(BalancePlan.idle(2) if is_first else plan_of(1, 2))
    layers = list(hetero_layers(run.model).values())
    clock = layers[0].clock
    measured: list[Any] = []

    def read() -> list[Any]:
        times = type(clock).read(clock)
        measured.extend(times)
        return times

    with patch.object(clock, "read", read):
        if is_first:
            layers[0].register_forward_pre_hook(lambda *_: time.sleep(LATE / 2))
        train(run, 2)
    assert len(measured) == 2
    waits = torch.tensor([times.migration_seconds for times in measured])
    dist.all_reduce(waits, op=dist.ReduceOp.MIN, group=run.plugin.tp_group)
    assert waits.max() < LATE / 4, f"costs of migration would be learned from {waits.tolist()} s"
    if not is_first:
        assert max(times.communication_seconds + times.other_seconds for times in measured) > LATE / 2


def sleep_late(*_: Any) -> None:
    if dist.get_rank() == 1:
        time.sleep(LATE)


def before_the_last_gradient(run: Trained) -> Any:
    return next(run.model.unwrap().parameters()).register_hook(sleep_late)


IN_GROUP, OF_REPLICAS = dict(tp_size=2, max_norm=1.0), dict(tp_size=1)
PLACES: dict[str, tuple[Callable[[Trained], Any], dict[str, Any]]] = {
    "embedding": (lambda run: run.model.unwrap().transformer.wte.register_forward_pre_hook(sleep_late), IN_GROUP),
    "loss": (lambda run: run.model.unwrap().lm_head.register_forward_hook(sleep_late), IN_GROUP),
    "gradient norm": (before_the_last_gradient, IN_GROUP),
    "gradients": (before_the_last_gradient, OF_REPLICAS),
}


@checks.on(2, "embedding")
@checks.on(2, "loss")
@checks.on(2, "gradient norm")
@checks.on(2, "gradients")
def waiting_in_collectives_is_no_work(place: str) -> None:
    """Rank 1 is late at the place in an iteration; rank 0 waits for it in the collective that follows."""
    be_late, options = PLACES[place]
    run = boost(ours(BalanceConfig(mode="off"), make_vocab_size_divisible_by=4, **options), gpt2(), sgd)
    clock, finished = run.plugin.balancer._clock, list[Any]()
    clock.read = lambda: (finished.extend(times := type(clock).read(clock)), times)[1]
    train_on_tokens(run, 2)
    run.plugin.balancer.collect()
    be_late(run)
    train_on_tokens(run, 1)
    for seconds in (record.ranks[0] for record in run.plugin.balancer.collect() or ()):
        assert seconds.work_seconds < LATE / 2 < seconds.communication_seconds, f"{place}: {seconds}"
        assert sum(work.fixed for work in finished[-1].kinds.values()) < LATE / 2, f"{place}: {finished[-1]}"


test_on_ranks = checks.test()
