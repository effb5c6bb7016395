"""Balancing through the plugin: slow ranks are detected and prune, all ranks have the same plan, training continues."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from colossalai.tensor.d_tensor import is_customized_distributed_tensor, is_distributed_tensor
from timm.layers import set_reentrant_ckpt

from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance import balancer as balancer_module
from colossal_hetero.balance import clock as clocks
from colossal_hetero.balance.balancer import ALWAYS_MEASURED, Balancer
from colossal_hetero.balance.clock import CpuClock
from colossal_hetero.balance.timeline import SAMPLE_EVERY
from colossal_hetero.layers import hetero_layers
from colossal_hetero.testing import Stragglers, inject_stragglers, stragglers
from tests.support.checks import Checks, of_all_ranks
from tests.support.training import (
    ScriptedClock,
    Trained,
    assert_same_parameters,
    batch,
    boost,
    loss_of,
    ours,
    scripted,
    theirs,
    tiny_vit,
    train,
)

checks = Checks()


def resizing(**rules: Any) -> BalanceConfig:
    return BalanceConfig(mode="resize", pruning=Pruning(resizing="column", resize_overhead=0.0, **rules))


RESIZE = resizing()
SLOWDOWN = 4.0
RATIO = 0.75  # (T − T_ref) / M = (χ − 1) / χ
PHASE = 6
SETTLED = 4
"""After a change of speed, the plan is adapted within this number of iterations."""


def each_rank_slow_in_turn(phase: int, rank: int, iteration: int) -> float:
    """No rank is slow in the first ``phase`` iterations, then rank 0, then none, then rank 1, and so on."""
    number = iteration // phase
    return SLOWDOWN if number % 2 == 1 and number // 2 == rank else 1.0


def always(*slow: int) -> Any:
    return lambda rank, iteration: SLOWDOWN if rank in slow else 1.0


def is_replicated(parameter: torch.Tensor) -> bool:
    return not (is_distributed_tensor(parameter) or is_customized_distributed_tensor(parameter))


def assert_identical(model: torch.nn.Module, group: dist.ProcessGroup, what: str, replicated_only: bool) -> None:
    """Assert that parameters that all ranks of ``group`` hold are the same bit for bit."""
    compared = 0
    for name, parameter in model.named_parameters():
        if replicated_only and not is_replicated(parameter):
            continue
        compared += 1
        first = parameter.detach().clone()
        dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
        assert torch.equal(first, parameter), f"{what}: {name} differs from that of the group's first rank"
    assert compared > 4


def assert_replicas_are_equal(run: Trained, what: str) -> None:
    model, plugin = run.model.unwrap(), run.plugin
    assert_identical(model, plugin.tp_group, f"{what}, tensor-parallel group", replicated_only=True)
    assert_identical(model, plugin.dp_group, f"{what}, data-parallel group", replicated_only=False)


def assert_layers_follow_the_plan(run: Trained, what: str) -> None:
    """Assert that the layers of this rank prune exactly what the plan says."""
    ratio = run.plugin.balancer.plan.resize[dist.get_rank(run.plugin.tp_group)]
    layers = hetero_layers(run.model)
    assert layers, what
    for name, layer in layers.items():
        if ratio == 0:
            assert layer.workload is None, f"{what}: {name} prunes"
        else:
            assert layer.workload is not None and layer.workload.prune == ratio, f"{what}: {name}"


# Which ranks prune ---------------------------------------------------------------------------------------------------


def check_every_rank_in_turn(options: dict[str, Any], phase: int = PHASE) -> tuple[Any, ...]:
    world = dist.get_world_size()
    with scripted(partial(each_rank_slow_in_turn, phase)):
        run = boost(ours(RESIZE, **options), tiny_vit(depth=options.get("pp_size", 1)))
    balancer = run.plugin.balancer

    def each(iteration: int) -> None:
        what = f"rank {dist.get_rank()} after iteration {iteration}"
        assert_layers_follow_the_plan(run, what)
        if iteration % phase == phase - 1:
            assert_replicas_are_equal(run, what)

    train(run, phase * (2 * world + 1), same_batch=True, each=each)
    records = balancer.collect()
    history = None
    if records is not None:
        assert [record.iteration for record in records] == list(range(len(run.plans)))
        exchanges = [record.iteration for record in records if record.exchanged]
        changes = [record.iteration for record in records if record.plan_changed]
        history = exchanges, changes, [[rank.resized for rank in record.ranks] for record in records]
    return run.plans, run.losses, history


def assert_follows(plans: list[tuple[float, ...]], ranks: list[int], phase: int = PHASE) -> None:
    """Assert that the ``plans`` of the group of global ``ranks`` follow :func:`each_rank_slow_in_turn`."""
    for iteration, plan in enumerate(plans):
        now = [each_rank_slow_in_turn(phase, rank, iteration) for rank in ranks]
        before = [each_rank_slow_in_turn(phase, rank, max(0, iteration - SETTLED)) for rank in ranks]
        if now == before:
            expected = [RATIO if slowdown > 1 else 0.0 for slowdown in now]
            assert plan == pytest.approx(expected), f"iteration {iteration}: {plan}"
        # Until the plan is adapted to a change, only the present and the former straggler may prune.
        assert all(ratio == 0 or max(now[i], before[i]) > 1 for i, ratio in enumerate(plan)), f"{iteration}: {plan}"


@checks.on(2)
@checks.on(3)
def the_plan_follows_when_each_rank_is_the_straggler_in_turn() -> None:
    world = dist.get_world_size()
    results = of_all_ranks(check_every_rank_in_turn(dict(tp_size=world)))
    for plans, losses, _ in results:
        assert plans == results[0][0], "ranks have different plans"
        assert losses == results[0][1], "ranks have different losses"
    plans, losses, (exchanges, changes, resized) = results[0]
    assert_follows(plans, list(range(world)))
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.5 * losses[0], losses
    # The plan changes once after each change of a rank's speed, although it is decided on more often.
    assert len(changes) == 2 * world, changes
    assert set(changes) < set(exchanges)
    for iteration, shares in enumerate(resized):
        planned = plans[iteration - 1] if iteration else (0.0,) * world
        # Shares are rounded to whole columns.
        assert shares == pytest.approx(planned, abs=0.05), f"iteration {iteration}"


@checks.on(4, dict(tp_size=2), (1, 2, 3))
@checks.on(4, dict(tp_size=2, pp_size=2, num_microbatches=3), (3,))
def each_replica_and_each_stage_has_its_own_plan(options: dict[str, Any], with_losses: Sequence[int]) -> None:
    results = of_all_ranks(check_every_rank_in_turn(options, PHASE - 1))
    for ranks in ([0, 1], [2, 3]):
        for rank in ranks:
            assert results[rank][0] == results[ranks[0]][0], f"rank {rank} has another plan"
            assert_follows(results[rank][0], ranks, PHASE - 1)
            if rank in with_losses:
                assert results[rank][1][-1] < 0.5 * results[rank][1][0]


@checks.on(2)
def an_overflow_is_not_imputed_in_later_iterations() -> None:
    """Gradients of an iteration that overflowed are not imputed in the next ones, which would overflow as well."""
    with scripted(always(1)):
        run = boost(ours(resizing(imputation="same"), tp_size=2, precision="fp16", initial_scale=2**8, hysteresis=1))
    scaler = run.optimizer.mixed_precision.grad_scaler
    train(run, 6)
    assert run.plugin.balancer.shares.resized > 0.2 or dist.get_rank() == 0
    images, labels = batch()
    run.booster.backward(loss_of(run.model(images), labels) * float("inf"), run.optimizer)
    run.optimizer.step()
    run.optimizer.zero_grad()
    assert scaler.scale.item() == 2**7
    train(run, 4)
    assert scaler.scale.item() == 2**7


VARIANTS: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "random, average": (dict(priority="random", imputation="average"), {}),
        "priority, same": (dict(priority="priority", imputation="same", priority_interval=2), {}),
        "priority-diff": (dict(priority="priority-diff", priority_interval=2), {}),
        "bf16, clipped": ({}, dict(precision="bf16", max_norm=1.0)),
        "fp16": ({}, dict(precision="fp16", initial_scale=2**8)),
    },
    4: {
        "ZeRO 2": (dict(imputation="same"), dict(precision="bf16", zero_stage=2)),
        "pipeline, fp16": (
            dict(imputation="same"),
            dict(precision="fp16", initial_scale=2**8, pp_size=2, num_microbatches=3),
        ),
    },
}


@checks.on(2)
@checks.on(4)
def training_with_a_straggler_converges_for_all_rules_and_precisions() -> None:
    for name, (choices, options) in VARIANTS[dist.get_world_size()].items():
        with scripted(always(1)):
            run = boost(ours(resizing(**choices), tp_size=2, **options))
        train(run, 12, same_batch=True)
        mine = RATIO if dist.get_rank() == 1 else 0.0
        assert run.plans[-1][dist.get_rank(run.plugin.tp_group)] == pytest.approx(mine), f"{name}: {run.plans[-1]}"
        assert run.plugin.balancer.shares.resized == pytest.approx(mine, abs=0.05), name
        if run.losses:
            assert run.losses[-1] < 0.8 * run.losses[0], f"{name}: {run.losses}"
        assert_replicas_are_equal(run, name)


@checks.on(2)
def mode_off_and_max_resize_0_never_prune() -> None:
    expected = train(boost(theirs(tp_size=2)), 8)
    for balance in (BalanceConfig(mode="off"), BalanceConfig(mode="resize", max_resize=0.0)):
        with scripted(always(1)):
            run = train(boost(ours(balance, tp_size=2)), 8)
        assert set(run.plans) == {(0.0, 0.0)}, balance
        assert run.losses == expected.losses
        assert_same_parameters(run.parameters, expected.parameters, str(balance))
        records = run.plugin.balancer.collect()
        if records is not None:
            # Mode "off" still measures, so that a report can show what balancing would have saved.
            assert all(r.ranks[1].work_seconds > 3 * r.ranks[0].work_seconds for r in records)
            assert any(r.exchanged for r in records) == (balance.mode != "off")


@checks.on(2)
def mode_off_measures_only_some_iterations() -> None:
    """Count the marks of each iteration in mode "off"."""
    iterations = ALWAYS_MEASURED + SAMPLE_EVERY + 1
    expected = train(boost(theirs(tp_size=2), tiny_vit(depth=1)), iterations)
    run = boost(ours(tp_size=2), tiny_vit(depth=1))
    marks = [0]
    mark = CpuClock.mark

    def count_and_mark(clock: CpuClock, *args: Any) -> None:
        marks[-1] += 1
        mark(clock, *args)

    with patch.object(CpuClock, "mark", count_and_mark):
        train(run, iterations, each=lambda iteration: marks.append(0))
    measured = [*range(ALWAYS_MEASURED), ALWAYS_MEASURED, ALWAYS_MEASURED + SAMPLE_EVERY]
    # Without a clock a layer runs the code of Colossal-AI's, with the same result.
    assert [number for number, count in enumerate(marks) if count] == measured
    assert run.losses == expected.losses
    assert_same_parameters(run.parameters, expected.parameters, "sampled")
    records = run.plugin.balancer.collect()
    assert records is None or [record.iteration for record in records] == measured


EVERY, SLOW_FROM = 5, 32


def check_sampled_balancing(starved_to: int = 0) -> tuple[list[int], list[tuple[float, ...]], list[str]]:
    """Measured iterations, plans and warnings with a clock that costs time. Rank 1 is slow from an iteration on; until
    the iteration ``starved_to``, it seems so because its GPU waits for its host."""
    measured: list[int] = []
    warnings: list[str] = []
    stop, read = ScriptedClock.stop, ScriptedClock.read

    def note_and_stop(clock: ScriptedClock, tag: Any) -> None:
        measured.append(tag[0])
        stop(clock, tag)

    def read_starved(clock: ScriptedClock) -> list[Any]:
        slow = range(SLOW_FROM, starved_to) if dist.get_rank() == 1 else ()
        return [dataclasses.replace(each, starved=0.6 if each.tag[0] in slow else 0.2) for each in read(clock)]

    def slow_down(rank: int, iteration: int) -> float:
        return SLOWDOWN if rank == 1 and iteration >= SLOW_FROM else 1.0

    with (
        patch.multiple(ScriptedClock, sample_every=EVERY, stop=note_and_stop, read=read_starved),
        patch.object(balancer_module.log, "warning", lambda text, *values: warnings.append(text % values)),
        scripted(slow_down),
    ):
        run = train(boost(ours(RESIZE, tp_size=2), tiny_vit(depth=1)), max(SLOW_FROM, starved_to) + 16, same_batch=True)
    return measured, run.plans, warnings


@checks.on(2)
def a_clock_that_costs_time_measures_few_iterations_while_nothing_changes() -> None:
    (measured, plans, _), other = of_all_ranks(check_sampled_balancing())
    assert (measured, plans) == other[:2]
    settled = [number for number in measured if 15 <= number < SLOW_FROM]
    assert all(number % EVERY == 0 or number % SAMPLE_EVERY == 0 for number in settled)
    assert len(settled) < (SLOW_FROM - 15) / 2
    # When a rank looks slow, every iteration counts, and the plan follows as soon as with a clock that costs nothing.
    first = next(number for number in measured if number >= SLOW_FROM)
    assert first - SLOW_FROM < EVERY
    assert plans[first + SETTLED] == pytest.approx((0.0, RATIO))
    assert plans[-1] == pytest.approx((0.0, RATIO))


@checks.on(2)
def nothing_is_balanced_by_times_of_a_gpu_that_waits_for_its_host() -> None:
    starved_to = SLOW_FROM + 20
    (measured, plans, warnings), (*others, other_warnings) = of_all_ranks(check_sampled_balancing(starved_to))
    assert [measured, plans] == others
    assert set(plans[:starved_to]) == {(0.0, 0.0)}
    # Nor does the clock add to the host's work.
    unjudged = [number for number in measured if SLOW_FROM <= number < starved_to]
    assert all(number % EVERY == 0 or number % SAMPLE_EVERY == 0 for number in unjudged)
    (warning,) = warnings
    assert warning.startswith("rank 1's GPU waited for its host in 60 % of its work") and other_warnings == []
    # When its times are those of the GPU, they count.
    assert plans[-1] == pytest.approx((0.0, RATIO))


def test_balancing_is_refused_in_a_cuda_graph() -> None:
    balancer = Mock(_running=False, active=True, config=RESIZE, switch_off=Mock(return_value=False))
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        with pytest.raises(RuntimeError, match="balance mode 'resize' cannot be used in a CUDA graph"):
            Balancer.begin(balancer)
        off = Mock(_running=False, active=False)
        Balancer.begin(off)  # without events in the graph, which nobody could read
    off._measure.assert_called_once_with(False)


@checks.on(2)
def activation_checkpointing_changes_nothing() -> None:
    """A recomputed forward pass uses the columns that the first one chose, at random."""
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
        assert_same_parameters(run.parameters, plain.parameters, "checkpointed")


# What must not disturb the balancer --------------------------------------------------------------------------------


@checks.on(2)
def a_straggler_is_found_while_an_overflow_skips_steps() -> None:
    # The loss scale starts at 2^24; gradients overflow until it has become small enough.
    with scripted(always(1)):
        run = boost(ours(RESIZE, tp_size=2, precision="fp16", initial_scale=2**24, hysteresis=1))
    skipped = 0
    before = run.parameters

    def each(iteration: int) -> None:
        nonlocal skipped
        skipped += all(torch.equal(before[name], now) for name, now in run.parameters.items())

    train(run, 20, same_batch=True, each=each)
    assert 6 <= skipped < 20, f"{skipped} steps were skipped"
    assert run.plans[5] == pytest.approx((0.0, RATIO)), "the straggler was not found while steps were skipped"
    assert set(run.plans[5:]) == {run.plans[5]}
    assert all(math.isfinite(loss) for loss in run.losses) and run.losses[-1] < run.losses[0]


class Seconds:
    """A clock that advances by a hundredth of a second each time it is read; tests advance it further."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.01
        return self.now


@checks.on(2)
def evaluation_and_pauses_between_steps_do_not_count_as_work() -> None:
    seconds = Seconds()
    with patch.object(clocks, "time", seconds):
        run = boost(ours(RESIZE, tp_size=2))
        model = run.model
        images, labels = batch()
        minutes = 600.0 * (1 + dist.get_rank())

        def evaluate(iteration: int) -> None:
            seconds.now += minutes  # loading data
            model.eval()
            with torch.no_grad():
                model(images)
                seconds.now += minutes
            loss_of(model(images), labels)
            model.train()
            with torch.no_grad():
                model(images)
            seconds.now += minutes

        evaluate(-1)
        train(run, 10, each=evaluate)
    assert set(run.plans) == {(0.0, 0.0)}
    records = run.plugin.balancer.collect()
    if records is not None:
        assert len(records) == 10
        for record in records:
            for rank in record.ranks:
                assert 0 < rank.work_seconds + rank.communication_seconds < 10, rank


@checks.on(4)
def waiting_for_other_stages_does_not_count_as_work() -> None:
    seconds = Seconds()
    with patch.object(clocks, "time", seconds):
        run = boost(ours(RESIZE, tp_size=2, pp_size=2, num_microbatches=3))

        def slow(owner: Any, name: str) -> None:
            function = getattr(owner, name)

            def wait(*args: Any, **kwargs: Any) -> Any:
                seconds.now += 600.0 * (1 + dist.get_rank())
                return function(*args, **kwargs)

            setattr(owner, name, wait)

        for name in ("recv_forward", "recv_backward", "send_forward_recv_backward", "send_backward_recv_forward"):
            slow(run.plugin.scheduler.comm, name)
        slow(run.model, "sync_dp_grads")
        train(run, 8, accumulation=2)
    assert set(run.plans) == {(0.0, 0.0)}
    records = run.plugin.balancer.collect()
    if records is not None:
        for record in records:
            for rank in record.ranks:
                assert rank.communication_seconds > 1000, rank
                assert 0 < rank.matmul_seconds < rank.work_seconds < 20, rank


# Real work -----------------------------------------------------------------------------------------------------------


class CpuSeconds:
    """A clock that counts the CPU time of this process and its own pauses, so that other processes do not affect it."""

    def __init__(self) -> None:
        self.paused = 0.0

    def perf_counter(self) -> float:
        return time.process_time() + self.paused

    def sleep(self, seconds: float) -> None:
        self.paused += seconds


@checks.on(2, "repeat")
@checks.on(2, "sleep")
def an_injected_straggler_is_found(means: str) -> None:
    sizes = dict(embed_dim=192, num_heads=6, mlp_ratio=4, patch_size=2)
    seconds = CpuSeconds()
    with patch.object(clocks, "time", seconds), patch.object(stragglers, "time", seconds):
        run = boost(ours(RESIZE, tp_size=2), tiny_vit(**sizes))
        inject_stragglers(run.model, run.optimizer, Stragglers(slowdowns={1: 12.0}, means=means))
        plans = train(run, 12, same_batch=True).plans
    assert max(plan[1] for plan in plans) > 0.3, plans


test_on_ranks = checks.test()
