"""After a failure during migration all ranks stop with a clear message or continue with a smaller plan. None hangs."""

import os
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.cuda import OutOfMemoryError

from colossal_hetero.balance import resharding
from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.balancer import Balancer
from colossal_hetero.balance.host_messages import Exchange
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.layers import unit_exchange
from colossal_hetero.layers.column_migration import BroadcastReduce, ScatterGather, moved_count
from colossal_hetero.layers.unit_exchange import Bucket, UnitExchange
from colossal_hetero.layers.unit_layout import UnitShare
from tests.support.checks import on
from tests.support.harness import errors_of_the_others
from tests.support.migration_runs import METHODS, Watch, assert_equal, deciding_run, migrating_run, reference_run, slow
from tests.support.training import train

DECIDED = 4  # iterations after which training follows the plan that the balancer has decided on


def _other(plan: BalancePlan) -> BalancePlan:
    return plan.limited(plan.max_received / 2)


@on(3, 0)
@on(3, 2)
def ranks_with_different_plans_stop_before_they_apply_them(culprit: int) -> None:
    decide = Balancer._decide

    def decide_otherwise(balancer: Balancer, uncertainty: float) -> BalancePlan:
        plan = decide(balancer, uncertainty)
        return _other(plan) if dist.get_rank() == culprit else plan

    with patch.object(Balancer, "_decide", decide_otherwise):
        run = deciding_run(slow(1), METHODS[culprit])
        with pytest.raises(RuntimeError, match=r"have different balancing plans, .* training is stopped"):
            train(run, DECIDED)
    # The ranks stop before they carry out any part of the plan.
    assert sum(run.plugin.balancer.plan.migrate) == 0
    assert not any(sent.messages for sent in run.plugin.balancer.traffic.sent.values())


@on(2)
def ranks_whose_plans_become_different_stop_at_the_next_iteration() -> None:
    run = migrating_run("block", 1, tp_size=2)
    train(run, 1)
    if dist.get_rank() == 0:
        run.plugin.balancer.plan = _other(run.plugin.balancer.plan)
    with (
        patch.object(Exchange, "check_same", lambda *_: None),
        pytest.raises(RuntimeError, match="have different balancing plans"),
    ):
        train(run, 2)


PEAK = "can't allocate memory: an iteration would need more than the GPU has"


def refuse_buffers(most: float, error: RuntimeError) -> Any:
    """Rank 2 of three has memory only for received units up to the share ``most`` of its own."""
    reserve = Bucket.reserve

    def refuse(bucket: Bucket) -> None:
        if dist.get_rank() == 2 and any(moved_count(each.taken) > most * each.block.units for each in bucket.transfers):
            raise error
        reserve(bucket)

    return patch.object(Bucket, "reserve", refuse)


def refuse_peaks(most: float, error: RuntimeError) -> Any:
    """The same for the activations of these units, and for nothing for good."""

    def check(device: torch.device, more_bytes: int, more_work: float) -> None:
        assert more_bytes > 0
        if dist.get_rank() == 2 and more_work > most:
            raise error

    stack = ExitStack()
    stack.enter_context(patch.object(unit_exchange, "check_room", check))
    stack.enter_context(patch.object(resharding, "check_room", Mock(side_effect=error)))
    return stack


@on(3, refuse_buffers, 0.25, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
@on(3, refuse_buffers, 0.0, OutOfMemoryError("CUDA"))
@on(3, refuse_peaks, 0.25, RuntimeError(PEAK))
def a_plan_shrinks_until_every_receiver_has_enough_memory(refuse: Any, most: float, error: RuntimeError) -> None:
    apply, received = Applier.apply, list[float]()

    def note_and_apply(applier: Applier, plan: BalancePlan, for_good: bool = False) -> None:
        received.append(plan.max_received)
        apply(applier, plan, for_good)

    with refuse(most, error), patch.object(Applier, "apply", note_and_apply):
        run = deciding_run(slow(0), reshard_after=2 if refuse is refuse_peaks else 50)
        watch = Watch(run)
        train(run, DECIDED, each=watch)
    plan = watch.plans[-1]
    # What is received is halved until it fits, and all ranks release their memory before they try again.
    assert most / 2 <= plan.max_received <= most, plan
    assert all(after == 0 for before, after in pairwise(received) if after < before), received
    assert plan.note.startswith("receivers have memory for no more than ") and plan.note.count("memory") == 1, plan.note
    assert any(watch.messages) == (most > 0) or dist.get_rank() != 2, watch.messages
    assert not run.plugin.balancer.has_resharded
    assert_equal(run, train(reference_run(tp_size=3), DECIDED), f"{error}, {most}")


@on(2)
def memory_is_asked_for_only_on_top_of_what_has_run() -> None:
    """Rank 1 takes 0.2, 0.4 and 0.4 of the units of rank 0, in each iteration and then for good: it is asked whether it
    has memory for what comes on top of what has run."""
    asked: list[tuple[str, float]] = []

    def note(when: str, device: torch.device, more_bytes: int, more_work: float) -> None:
        assert more_bytes > 0
        asked.append((when, more_work))

    with (
        patch.object(unit_exchange, "check_room", partial(note, "migrating")),
        patch.object(resharding, "check_room", partial(note, "for good")),
    ):
        run = migrating_run("block", (), choices=dict(reshard_after=4), tp_size=2)
        for share in (0.2, 0.4, 0.4):
            run.plugin.balancer.follow(BalancePlan((0.0, 0.0), (share, 0.0), (0.0, share)))
            train(run, 1)
        train(run, 2)
    assert run.plugin.balancer.has_resharded
    if dist.get_rank() == 1:
        assert [when for when, _ in asked] == ["migrating", "migrating", "for good"]
        first, second, last = (work for _, work in asked)
        assert 0.1 < first < 0.3 and 0.1 < second < 0.3 and last == 0.0


@on(2)
def other_errors_are_not_treated_as_a_lack_of_memory() -> None:
    def fail(bucket: Bucket) -> None:
        raise RuntimeError("a mistake of our own")

    with patch.object(Bucket, "reserve", fail), pytest.raises(RuntimeError, match="a mistake of our own"):
        migrating_run("block", 1, tp_size=2)


def check_death(method: str, victim: int, owner: type, name: str) -> None:
    function, calls = getattr(owner, name), list[int]()

    def die(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        # The rank dies after the first iteration of the plan.
        if dist.get_rank() == victim and len(calls) > 12:
            os._exit(1)
        return function(*args, **kwargs)

    with patch.object(owner, name, die):
        run = migrating_run(method, 1, tp_size=dist.get_world_size())
        train(run, 100)
    raise AssertionError("training ended without an error although a rank died")


@pytest.mark.parametrize(
    ("world", "method", "victim", "owner", "name"),
    [
        (2, "block", 0, UnitShare, "gradients"),  # a receiver in its backward pass
        (2, "block", 1, UnitExchange, "begin_pass"),  # a sender in its forward pass
        (2, "scatter-gather", 0, ScatterGather, "reduce"),
        (3, "scatter-gather", 1, ScatterGather, "distribute"),
        (3, "broadcast-reduce", 1, BroadcastReduce, "distribute"),
        (2, "broadcast-reduce", 0, BroadcastReduce, "gather"),
    ],
)
def test_if_a_rank_dies_the_other_ranks_end_and_say_why(
    world: int, method: str, victim: int, owner: type, name: str
) -> None:
    errors = errors_of_the_others(world, check_death, method, victim, owner, name, victim=victim)
    assert all("RuntimeError" in error for error in errors)
    # A rank that does not wait for migrated work fails in the next collective of the model.
    words = "a rank of this tensor-parallel group stopped responding while migrated work"
    assert any(words in error for error in errors), errors
