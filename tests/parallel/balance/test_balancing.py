"""Balancing through the plugin: slow ranks are detected and prune, all ranks have the same plan, training continues."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.tensor.d_tensor import is_customized_distributed_tensor, is_distributed_tensor
from timm.layers import set_reentrant_ckpt

from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance import BalancePlan
from colossal_hetero.balance import balancer as balancer_module
from colossal_hetero.balance import clock as clocks
from colossal_hetero.balance.balancer import ALWAYS_MEASURED, MEASURED_EVERY
from colossal_hetero.balance.clock import CpuClock
from colossal_hetero.layers import hetero_layers
from tests.support import training
from tests.support.checks import of_all_ranks, on
from tests.support.training import ScriptedClock, Trained, batch, boost, loss_of, ours, scripted, tiny_vit, train


def resizing(**rules: Any) -> BalanceConfig:
    return BalanceConfig(mode="resize", pruning=Pruning(resizing="column", resize_overhead=0.0, **rules))


RESIZE = resizing()
SLOWDOWN = 4.0
RATIO = 0.75  # (T − T_ref) / M = (χ − 1) / χ
PHASE = 6
SETTLED = 4  # after a change of speed, the plan is adapted within this number of iterations


def slow_in_turn(phase: int, turn: Sequence[int], rank: int, iteration: int) -> float:
    """No rank is slow in the first ``phase`` iterations, then the first rank of ``turn``, then none, and so on."""
    number = iteration // phase
    return SLOWDOWN if number % 2 == 1 and turn[number // 2] == rank else 1.0


def always(*slow: int) -> Any:
    return lambda rank, iteration: SLOWDOWN if rank in slow else 1.0


def assert_replicas_are_equal(run: Trained, what: str) -> None:
    for group, replicated_only in ((run.plugin.tp_group, True), (run.plugin.dp_group, False)):
        compared = 0
        for name, parameter in run.model.unwrap().named_parameters():
            is_divided = is_distributed_tensor(parameter) or is_customized_distributed_tensor(parameter)
            if replicated_only and is_divided:
                continue
            compared += 1
            first = parameter.detach().clone()
            dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
            assert torch.equal(first, parameter), f"{what}: {name} differs from that of the group's first rank"
        assert compared > 4


def assert_layers_follow_the_plan(run: Trained, what: str) -> None:
    ratio = run.plugin.balancer.plan.resize[dist.get_rank(run.plugin.tp_group)]
    pruned = [0.0 if each.workload is None else each.workload.prune for each in hetero_layers(run.model).values()]
    assert pruned and set(pruned) == {ratio}, what


def check_ranks_in_turn(options: dict[str, Any], turn: Sequence[int], phase: int, **rules: Any) -> tuple[Any, ...]:
    with scripted(partial(slow_in_turn, phase, turn)):
        run = boost(ours(resizing(**rules), **options), tiny_vit(depth=options.get("pp_size", 1)))

    def each(iteration: int) -> None:
        what = f"rank {dist.get_rank()} after iteration {iteration}"
        assert_layers_follow_the_plan(run, what)
        if iteration % phase == phase - 1:
            assert_replicas_are_equal(run, what)

    train(run, phase * (2 * len(turn) + 1), same_batch=True, each=each)
    records, history = run.plugin.balancer.collect(), None
    if records is not None:
        assert [record.iteration for record in records] == list(range(len(run.plans)))
        changes = [record.iteration for record in records if record.plan_changed]
        history = changes, [[rank.resized for rank in record.ranks] for record in records]
    return run.plans, run.losses, history


def assert_follows(plans: list[tuple[float, ...]], ranks: Sequence[int], turn: Sequence[int], phase: int) -> None:
    for iteration, plan in enumerate(plans):
        now = [slow_in_turn(phase, turn, rank, iteration) for rank in ranks]
        before = [slow_in_turn(phase, turn, rank, max(0, iteration - SETTLED)) for rank in ranks]
        if now == before:
            expected = [RATIO if slowdown > 1 else 0.0 for slowdown in now]
            assert plan == pytest.approx(expected), f"iteration {iteration}: {plan}"
        # Until the plan is adapted to a change, only the present and the former straggler may prune.
        assert all(ratio == 0 or max(now[i], before[i]) > 1 for i, ratio in enumerate(plan)), f"{iteration}: {plan}"


@on(2)
@on(3)
def the_plan_follows_when_each_rank_is_the_straggler_in_turn() -> None:
    world = dist.get_world_size()
    results = of_all_ranks(check_ranks_in_turn(dict(tp_size=world), range(world), PHASE))
    assert all(found[:2] == results[0][:2] for found in results), "ranks have different plans or losses"
    plans, losses, (changes, resized) = results[0]
    assert_follows(plans, range(world), range(world), PHASE)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.5 * losses[0], losses
    # The plan changes once after each change of a rank's speed.
    assert len(changes) == 2 * world, changes
    for iteration, shares in enumerate(resized):
        planned = plans[iteration - 1] if iteration else (0.0,) * world
        # Shares are rounded to whole columns.
        assert shares == pytest.approx(planned, abs=0.05), f"iteration {iteration}"


IN_FP16 = dict(precision="fp16", initial_scale=2**8)


@on(4, dict(precision="bf16", zero_stage=2, max_norm=1.0), (1, 2, 3), dict(imputation="same"))
@on(4, dict(pp_size=2, num_microbatches=3) | IN_FP16, (3,), dict(imputation="average", priority="random"))
@on(2, IN_FP16, (), dict(imputation="same", priority="priority", priority_interval=2))
def each_replica_and_each_stage_has_its_own_plan(
    options: dict[str, Any], with_losses: Sequence[int], rules: dict[str, Any]
) -> None:
    turn = (1, 2)[: dist.get_world_size() // 2]  # one of each group
    results = of_all_ranks(check_ranks_in_turn(options | dict(tp_size=2), turn, PHASE - 1, **rules))
    for ranks in ([0, 1], [2, 3])[: len(results) // 2]:
        for rank in ranks:
            assert results[rank][0] == results[ranks[0]][0], f"rank {rank} has another plan"
            assert_follows(results[rank][0], ranks, turn, PHASE - 1)
            if rank in with_losses:
                assert results[rank][1][-1] < 0.7 * results[rank][1][0]


@on(2)
def an_overflow_is_not_imputed_in_later_iterations() -> None:
    # Columns at random: those of an iteration before are among the ones that the next one prunes.
    config = dataclasses.replace(resizing(imputation="same", priority="random"), warmup_iterations=10**6)
    run = boost(ours(config, tp_size=2, hysteresis=1, **IN_FP16))
    scaler = run.optimizer.mixed_precision.grad_scaler
    run.plugin.balancer.follow(BalancePlan.resizing((0.0, RATIO)))
    train(run, 2)
    assert run.plugin.balancer.shares.resized > 0.2 or dist.get_rank() == 0
    images, labels = batch()
    run.finish(loss_of(run.model(images), labels) * float("inf"))
    assert scaler.scale.item() == 2**7
    train(run, 4)
    assert scaler.scale.item() == 2**7


@on(2)
def activation_checkpointing_changes_nothing() -> None:
    runs = []
    for reentrant in (None, False, True):
        set_reentrant_ckpt(bool(reentrant))
        model = tiny_vit(depth=1)
        model.set_grad_checkpointing(reentrant is not None)
        with scripted(always(0)):
            run = boost(ours(resizing(priority="random"), tp_size=2), model)
        runs.append(train(run, 6, accumulation=2))
    plain, *checkpointed = runs
    assert plain.plans[-1] == (pytest.approx(RATIO), 0.0)
    for run in checkpointed:
        assert (run.plans, run.losses) == (plain.plans, plain.losses)
        training.assert_same_parameters(run.parameters, plain.parameters, "checkpointed")


@on(2)
def a_straggler_is_found_while_an_overflow_skips_steps() -> None:
    # The loss scale starts at 2^24; gradients overflow until it has become small enough.
    with scripted(always(1)):
        run = boost(ours(RESIZE, tp_size=2, precision="fp16", initial_scale=2**24, hysteresis=1))
    before, skipped = run.parameters, list[bool]()

    def each(iteration: int) -> None:
        skipped.append(all(torch.equal(before[name], now) for name, now in run.parameters.items()))

    train(run, 20, same_batch=True, each=each)
    assert 6 <= sum(skipped) < 20, f"{sum(skipped)} steps were skipped"
    assert run.plans[5] == pytest.approx((0.0, RATIO)), "the straggler was not found while steps were skipped"
    assert set(run.plans[5:]) == {run.plans[5]}
    assert all(math.isfinite(loss) for loss in run.losses) and run.losses[-1] < run.losses[0]


@on(2)
def mode_off_measures_only_some_iterations() -> None:
    iterations = ALWAYS_MEASURED + MEASURED_EVERY + 1
    expected = train(boost(training.theirs(tp_size=2), tiny_vit(depth=1)), iterations)
    run, marks, mark = boost(ours(tp_size=2), tiny_vit(depth=1)), [0], CpuClock.mark

    def count_and_mark(clock: CpuClock, *args: Any) -> None:
        marks[-1] += 1
        mark(clock, *args)

    with patch.object(CpuClock, "mark", count_and_mark):
        train(run, iterations, each=lambda iteration: marks.append(0))
    measured = [*range(ALWAYS_MEASURED), ALWAYS_MEASURED, ALWAYS_MEASURED + MEASURED_EVERY]
    # Without a clock a layer runs the code of Colossal-AI's, with the same result.
    assert [number for number, count in enumerate(marks) if count] == measured
    assert run.losses == expected.losses
    training.assert_same_parameters(run.parameters, expected.parameters, "sampled")
    records = run.plugin.balancer.collect()
    assert records is None or [record.iteration for record in records] == measured


EVERY, SLOW_FROM = 5, 32


def check_sampled_balancing(starved_to: int = 0) -> tuple[list[int], list[tuple[float, ...]], list[str]]:
    """Measured iterations, plans and warnings with a clock that costs time. Rank 1 is slow from an iteration on; until
    the iteration ``starved_to``, it seems so because its GPU waits for its host."""
    measured, warnings = list[int](), list[str]()
    stop, read = ScriptedClock.stop, ScriptedClock.read

    def note_and_stop(clock: ScriptedClock, tag: Any) -> None:
        measured.append(tag[0])
        stop(clock, tag)

    def read_starved(clock: ScriptedClock) -> list[Any]:
        slow = range(SLOW_FROM, starved_to) if dist.get_rank() == 1 else ()
        return [dataclasses.replace(each, starved=0.6 if each.tag[0] in slow else 0.2) for each in read(clock)]

    with (
        patch.multiple(ScriptedClock, sample_every=EVERY, stop=note_and_stop, read=read_starved),
        patch.object(balancer_module.log, "warning", lambda text, *values: warnings.append(text % values)),
        scripted(lambda rank, iteration: SLOWDOWN if rank == 1 and iteration >= SLOW_FROM else 1.0),
    ):
        run = train(boost(ours(RESIZE, tp_size=2), tiny_vit(depth=1)), max(SLOW_FROM, starved_to) + 16, same_batch=True)
    return measured, run.plans, warnings


def assert_few(iterations: list[int]) -> None:
    assert all(number % EVERY == 0 for number in iterations)


@on(2)
def a_clock_that_costs_time_measures_few_iterations_while_nothing_changes() -> None:
    (measured, plans, _), other = of_all_ranks(check_sampled_balancing())
    assert (measured, plans) == other[:2]
    settled = [number for number in measured if 15 <= number < SLOW_FROM]
    assert_few(settled)
    assert len(settled) < (SLOW_FROM - 15) / 2
    # When a rank looks slow, every iteration counts, and the plan follows as soon as with a clock that costs nothing.
    first = next(number for number in measured if number >= SLOW_FROM)
    assert first - SLOW_FROM < EVERY
    assert plans[first + SETTLED] == plans[-1] == pytest.approx((0.0, RATIO))


@on(2)
def nothing_is_balanced_by_times_of_a_gpu_that_waits_for_its_host() -> None:
    starved_to = SLOW_FROM + 20
    (measured, plans, warnings), (*others, other_warnings) = of_all_ranks(check_sampled_balancing(starved_to))
    assert [measured, plans] == others
    assert set(plans[:starved_to]) == {(0.0, 0.0)}
    # Nor does the clock add to the host's work.
    assert_few([number for number in measured if SLOW_FROM <= number < starved_to])
    (warning,) = warnings
    assert warning.startswith("rank 1's GPU waited for its host in 60 % of its work") and other_warnings == []
    # When its times are those of the GPU, they count.
    assert plans[-1] == pytest.approx((0.0, RATIO))


class Seconds:
    """A clock that advances by a hundredth of a second each time it is read; tests advance it further."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.01
        return self.now


@on(2)
def evaluation_and_pauses_between_steps_do_not_count_as_work() -> None:
    seconds, minutes = Seconds(), 600.0 * (1 + dist.get_rank())
    with patch.object(clocks, "time", seconds):
        run = boost(ours(RESIZE, tp_size=2))
        images, labels = batch()

        @torch.no_grad()
        def evaluate(iteration: int) -> None:
            seconds.now += minutes  # loading data
            run.model.eval()
            run.model(images)
            seconds.now += minutes
            with torch.enable_grad():
                loss_of(run.model(images), labels)
            run.model.train()
            run.model(images)
            seconds.now += minutes

        evaluate(-1)
        train(run, 10, each=evaluate)
    assert set(run.plans) == {(0.0, 0.0)}
    records = run.plugin.balancer.collect()
    if records is not None:
        assert len(records) == 10
        for rank in (rank for record in records for rank in record.ranks):
            assert 0 < rank.work_seconds + rank.communication_seconds < 10, rank


@on(4)
def waiting_for_other_stages_does_not_count_as_work() -> None:
    seconds = Seconds()
    with patch.object(clocks, "time", seconds):
        run = boost(ours(RESIZE, tp_size=2, pp_size=2, num_microbatches=3))
        comm = run.plugin.scheduler.comm
        sends = ("recv_forward", "recv_backward", "send_forward_recv_backward", "send_backward_recv_forward")

        def wait(function: Any, *args: Any, **kwargs: Any) -> Any:
            seconds.now += 600.0 * (1 + dist.get_rank())
            return function(*args, **kwargs)

        for owner, name in (*((comm, name) for name in sends), (run.model, "sync_dp_grads")):
            setattr(owner, name, partial(wait, getattr(owner, name)))
        train(run, 8, accumulation=2)
    assert set(run.plans) == {(0.0, 0.0)}
    for rank in (rank for record in run.plugin.balancer.collect() or () for rank in record.ranks):
        assert rank.communication_seconds > 1000, rank
        assert 0 < rank.matmul_seconds < rank.work_seconds < 20, rank
