"""Stage times against the plan: how they are measured, on a simulated device, and what is reported."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_hetero.colossalai_support import accelerator
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.solver.follow import Proposal
from colossal_hetero.plugin.hybrid import drift as drifting
from tests.support.fake_device import FakeDevice
from tests.support.planning import make_plan, unequal_plan


class Schedule:
    """On a simulated device, whose clock only passes and the waiting times of the tests advance."""

    def __init__(self) -> None:
        self.device = FakeDevice()

    def forward_step(self, seconds: float) -> None:
        self.device.milliseconds += 1e3 * seconds

    backward_step = forward_step


@pytest.fixture
def schedule() -> Iterator[Schedule]:
    schedule = Schedule()
    with patch.object(accelerator, "get_accelerator", lambda: SimpleNamespace(**schedule.device.fakes)):
        yield schedule


def iterate(schedule: Schedule, *passes: tuple[float, float], catch_up: bool = True) -> None:
    """Run forward and backward passes, with waiting times for other stages in between."""
    for forward, backward in passes:
        schedule.forward_step(forward)
        schedule.device.milliseconds += 1e5
        schedule.backward_step(backward)
        schedule.device.milliseconds += 1e5
    if catch_up:
        schedule.device.catch_up()


def test_the_time_is_the_median_of_the_means_of_the_iterations_that_count(schedule: Schedule) -> None:
    clock = drifting.StageClock(schedule)
    for counts in (False, True):  # warm-up, and then passes without gradients
        with torch.set_grad_enabled(not counts):
            iterate(schedule, (9.0, 9.0))
        clock.end_iteration(counts)
        assert clock.read() is None
    for passes in ([(1.0, 2.0), (3.0, 6.0)], [(3.0, 7.0)], [(50.0, 60.0)]):
        with torch.no_grad():
            schedule.forward_step(7.0)
        iterate(schedule, *passes, catch_up=passes[0][0] != 50.0)
        clock.end_iteration()
    schedule.device.catch_up()  # nothing has waited for it
    clock.end_iteration()
    assert clock.read() == drifting.PassSeconds(pytest.approx(3.0), pytest.approx(7.0))
    assert clock.read() is None, "the times of the previous epoch were not removed"


def test_first_iterations_do_not_count(schedule: Schedule) -> None:
    """Here they take a hundred times as long and are half of all iterations."""
    plan, warmup = make_plan([[[0]]], (2,)), drifting.WARMUP_ITERATIONS
    watch = drifting.DriftWatch(schedule, plan, None, 0.2, 2 * warmup, lambda _: None)
    with (
        patch.object(drifting, "of_every_rank", lambda own: [own]),
        patch.object(drifting, "print_on_rank_0", lambda words: None),
    ):
        for iteration in range(2 * warmup):
            assert watch.report is None
            slow = 100.0 if iteration < warmup else 1.0
            iterate(schedule, (1.0 * slow, 2.0 * slow))
            watch.tick()
    assert watch.report is not None and not watch.report.drifted
    assert [stage.ratio for stage in watch.report.stages] == [pytest.approx(1.0)]


def two_stages(layers: tuple[int, int] = (4, 4), **changes: Any) -> Plan:
    """Two stages with 1 s forward and 2 s backward per micro-batch and block, on ranks 1 and 0."""
    options = dict(micro_batches=16, forward_seconds=[float(count) for count in layers]) | changes
    return make_plan([[[1], [0]]], layers, **options)


def planned_times(plan: Plan, slowdowns: dict[int, float]) -> dict[int, drifting.PassSeconds]:
    """The planned times by rank, multiplied by the slowdowns of some ranks."""
    return {
        rank: drifting.PassSeconds(
            *(slowdowns.get(rank, 1.0) * each for each in (stage.forward_seconds, stage.backward_seconds))
        )
        for replica in plan.replicas
        for stage in replica.stages
        for rank in stage.ranks
    }


def report(plan: Plan, slowdowns: dict[int, float], better: Plan | None = None) -> drifting.DriftReport:
    proposal = None if better is None else Proposal(better, plan.iteration_seconds, Topology((), (), ()))
    return dataclasses.replace(drifting.compare(plan, planned_times(plan, slowdowns), 0.2), proposal=proposal)


def test_times_within_the_threshold_are_not_reported() -> None:
    for slowdowns in ({}, {0: 1.19}, {1: 0.81}):
        found = report(two_stages(), slowdowns)
        assert found.drifted == ()
        assert [stage.ratio for stage in found.stages] == pytest.approx([slowdowns.get(1, 1.0), slowdowns.get(0, 1.0)])


@pytest.mark.parametrize("slowdown", [1.21, 3.0, 0.5])
def test_names_the_drifted_stage_and_the_better_plan(slowdown: float) -> None:
    better = two_stages((6, 2), iteration_seconds=0.75)
    found = report(two_stages(), {0: slowdown}, better)
    (stage,) = found.drifted
    assert (stage.stage, stage.ranks, stage.ratio) == (1, (0,), pytest.approx(slowdown))
    assert f"stage 1 (cpu, rank 0 on here) takes {12 * slowdown:.2f} s per micro-batch, planned 12.00 s" in str(found)
    assert f"({slowdown - 1:+.0%})" in str(found)
    assert str(found).endswith("best plan now: 6+2 layers, 0.750 s per iteration; present: 4+4, 1.000 s")
    unequal = unequal_plan(make_plan([[[0]]], (8,)), make_plan([[[1], [2]]], (5, 3)))
    assert drifting.split_in_words(unequal) == "8 | 5+3" and drifting.split_in_words(two_stages()) == "4+4"


def test_says_if_the_present_plan_is_still_the_best_and_nothing_if_it_is_not_known() -> None:
    plan = two_stages()
    found = report(plan, {0: 2.0}, plan)
    assert str(found).endswith("the present plan is still the best: 4+4 layers, 1.000 s per iteration")
    assert "best" not in str(report(plan, {0: 2.0}))


def test_the_slowest_rank_and_the_slowest_replica_count() -> None:
    found = report(make_plan([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], (4, 4), micro_batches=16), {5: 3.0, 2: 1.1})
    (stage,) = found.drifted
    assert (stage.replica, stage.stage, stage.ranks) == (1, 0, (4, 5))
    assert "stage 0 of replica 1 (cpu, ranks 4-5 on here)" in str(found)


def test_stages_without_times_are_left_out() -> None:
    plan = two_stages()
    found = drifting.compare(plan, {0: planned_times(plan, {0: 5.0})[0]}, 0.2)
    assert [stage.stage for stage in found.drifted] == [1]
    assert drifting.compare(plan, {}, 0.2) == drifting.DriftReport(0.2, plan, ())
    # A plan without times, written by hand, cannot drift.
    by_hand = make_plan([[[0], [1]]], (4, 4), forward_seconds=[0.0, 0.0])
    assert drifting.compare(by_hand, planned_times(plan, {}), 0.2).stages == ()


def test_an_unchanged_report_is_not_repeated() -> None:
    def of(*slowdowns: float, better: tuple[int, int] | None = None) -> drifting.DriftReport:
        plan = two_stages((8, 8), micro_batches=4)
        return report(plan, dict(enumerate(slowdowns)), None if better is None else two_stages(better))

    silent, slow = of(1, 1), of(1, 2)
    assert not silent.differs_from(None) and not silent.differs_from(slow)
    assert slow.differs_from(None) and slow.differs_from(of(2, 1)) and of(1, 3).differs_from(slow)
    assert not slow.differs_from(slow) and not of(1, 2.02).differs_from(slow)
    # Another plan is the best, although no stage is much slower than before.
    assert of(1, 1.48, better=(10, 6)).differs_from(of(1, 1.4, better=(9, 7)))
    assert not of(1, 1.48, better=(10, 6)).differs_from(of(1, 1.4, better=(10, 6)))
