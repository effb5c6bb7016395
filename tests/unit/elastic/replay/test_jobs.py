"""Simulated jobs on traces that are small enough to compute by hand, and what holds on every trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.elastic.replay.assumptions import Assumptions
from colossal_hetero.elastic.replay.available_devices import Availability
from colossal_hetero.elastic.replay.elastic_job import simulate_elastic_job
from colossal_hetero.elastic.replay.fitted_plans import FitPlan, FittedPlan
from colossal_hetero.elastic.replay.job_record import JobOutcome, JobRecord
from colossal_hetero.elastic.replay.replay import replay_trace
from colossal_hetero.elastic.replay.restarted_job import simulate_restarted_job
from colossal_hetero.elastic.state.held_layers import HeldLayers, Holdings
from tests.support.random_examples import examples

MOVE = 0.5
SECONDS = {2: 20.0, 3: 15.0, 4: 10.0}
"""Iteration time by the number of devices; one device cannot hold the model."""
ASSUMED = Assumptions(load_seconds=10.0, save_seconds=0.0, save_every=2)
"""A recovery takes 4.5 s, a join 2.5 s, each with 0.5 s of moving; a process needs 38 s to start, a restart 48 s."""


def plans(seconds: Mapping[int, float] = SECONDS, *, pipeline: bool = False) -> FitPlan:
    """Plans that use all devices; each device holds all layers, or its own ones in a pipeline."""

    def fit(devices: frozenset[int], held: Holdings) -> FittedPlan | None:
        if len(devices) not in seconds:
            return None
        ranges = [(place, place + 1) if pipeline else (0, 4) for place in range(len(devices))]
        holdings = {device: HeldLayers((each,)) for device, each in zip(sorted(devices), ranges, strict=True)}
        return FittedPlan(seconds[len(devices)], holdings, MOVE)

    return fit


def trace(*counts: tuple[float, int]) -> list[Availability]:
    return [Availability(seconds, frozenset(range(number))) for seconds, number in counts]


def elastic(*counts: tuple[float, int], stop: float, fit: FitPlan | None = None) -> JobOutcome:
    return simulate_elastic_job(trace(*counts), stop, fit or plans(), ASSUMED)


def restarted(*counts: tuple[float, int], stop: float, save_every: int = 2, min_devices: int = 1) -> JobOutcome:
    assumed = dataclasses.replace(ASSUMED, save_every=save_every)
    on = "loss" if min_devices > 1 else "change"
    return simulate_restarted_job(
        trace(*counts),
        stop,
        plans(),
        assumed,
        restart_on=on,
        min_devices=min_devices,  # type: ignore[arg-type]
    )


def totals(job: JobOutcome) -> tuple[int, int, int, float, float]:
    seconds = [job.seconds("recovering"), job.seconds("waiting")]
    return (job.iterations, job.repeated, job.recoveries, *seconds)  # type: ignore[return-value]


def test_a_loss_in_the_middle_of_an_iteration_repeats_this_iteration() -> None:
    # Two iterations, 5 s of the third one, 5 s of recovery, three iterations of 20 s, 10 s of another one.
    assert totals(elastic((0, 4), (25, 2), stop=100)) == (5, 1, 1, 5.0, 0.0)


def test_a_restart_repeats_everything_since_the_last_whole_checkpoint() -> None:
    # From second 73 on one iteration is finished. The last checkpoint is of iteration 2, or there is none yet.
    assert totals(restarted((0, 4), (25, 2), stop=100)) == (3, 1, 1, 48.0, 0.0)
    assert totals(restarted((0, 4), (25, 2), stop=100, save_every=3)) == (1, 3, 1, 48.0, 0.0)


def test_a_checkpoint_counts_only_when_it_is_whole() -> None:
    slow = dataclasses.replace(ASSUMED, save_seconds=6.0)
    changes = trace((0, 4), (25, 2))
    assert simulate_restarted_job(changes, 100.0, plans(), slow).iterations == 1
    just = dataclasses.replace(ASSUMED, save_seconds=5.0)
    assert simulate_restarted_job(changes, 100.0, plans(), just).iterations == 3


def test_one_checkpoint_is_written_at_a_time() -> None:
    # Saved are iteration 1 from second 10 to 35, iteration 4 from 40 to 65, iteration 7 from 70 to 95.
    slow = dataclasses.replace(ASSUMED, save_seconds=25.0, save_every=1)
    job = simulate_restarted_job(trace((0, 4), (94, 2)), 95.0, plans(), slow)
    assert (job.iterations, job.repeated) == (4, 6)


def test_a_second_loss_while_recovering_begins_the_recovery_again() -> None:
    # 2 s of the first recovery, then 5 s of the second one; three iterations fit into the other 68 s.
    assert totals(elastic((0, 4), (25, 3), (27, 2), stop=100)) == (5, 1, 2, 7.0, 0.0)
    assert totals(restarted((0, 4), (25, 3), (27, 2), stop=100)) == (3, 1, 2, 50.0, 0.0)


def test_without_a_plan_for_what_is_left_the_job_waits() -> None:
    # The second device comes at 50 s. Its process has started at 88 s, and the join takes 3 s.
    assert totals(elastic((0, 4), (25, 1), (50, 2), stop=131)) == (4, 1, 1, 3.0, 63.0)
    assert totals(restarted((0, 4), (25, 1), (50, 2), stop=131)) == (3, 1, 1, 48.0, 25.0)


def test_a_join_waits_for_the_end_of_an_iteration_and_repeats_nothing() -> None:
    # The processes have started at 68 s, the fourth iteration ends at 80 s, the pause takes 3 s.
    assert totals(elastic((0, 2), (30, 4), stop=120)) == (7, 0, 1, 3.0, 0.0)


def test_devices_with_which_no_plan_is_faster_stay_spares() -> None:
    fit = plans({2: 20.0, 3: 20.0})
    assert totals(elastic((0, 2), (30, 3), stop=120, fit=fit)) == (6, 0, 0, 0.0, 0.0)


def test_a_device_that_goes_before_its_process_has_started_changes_nothing() -> None:
    assert totals(elastic((0, 2), (30, 4), (67, 2), stop=120)) == (6, 0, 0, 0.0, 0.0)


def test_a_loss_before_a_join_is_admitted_takes_all_that_are_ready() -> None:
    # Device 2 is ready at 68 s; device 1 is gone at 70 s, so devices 0 and 2 go on, after 5 s.
    changes = there((0, {0, 1}), (30, {0, 1, 2}), (70, {0, 2}))
    job = simulate_elastic_job(changes, 120.0, plans(), ASSUMED)
    assert totals(job) == (3 + 2, 1, 1, 5.0, 0.0)


def there(*changes: tuple[float, set[int]]) -> list[Availability]:
    return [Availability(seconds, frozenset(devices)) for seconds, devices in changes]


def test_who_is_ready_during_a_recovery_joins_after_the_next_iteration() -> None:
    # Device 3 is ready at 48 s, in the recovery from 46 to 51 s. The iteration after it ends at 71 s.
    changes = there((0, {0, 1, 2}), (10, {0, 1, 2, 3}), (46, {0, 1, 3}))
    assert totals(simulate_elastic_job(changes, 85.0, plans(), ASSUMED)) == (3 + 1, 1, 2, 8.0, 0.0)


def test_a_loss_of_a_device_from_which_layers_are_moved_begins_again() -> None:
    # Devices 0 and 1 train; from 40 s on, layers move to devices 1 and 2; device 0 is gone at 41 s.
    def fit(devices: frozenset[int], held: Holdings) -> FittedPlan | None:
        used = sorted(devices)[-2:]
        return FittedPlan(10.0 if 2 in used else 20.0, {device: HeldLayers(((0, 4),)) for device in used}, MOVE)

    changes = there((0, {0, 1}), (2, {0, 1, 2}), (41, {1, 2}))
    assert totals(simulate_elastic_job(changes, 100.0, fit, ASSUMED)) == (2 + 5, 0, 2, 6.0, 0.0)


def test_those_who_wait_must_notice_the_loss_first() -> None:
    # Device 1 is gone at 47 s, which is noticed at 49 s. Device 2 is ready at 48 s.
    changes = there((0, {0, 1}), (10, {0, 1, 2}), (47, {0, 2}))
    assert totals(simulate_elastic_job(changes, 100.0, plans(), ASSUMED)) == (2 + 2, 1, 1, 4.0, 1.0)


def test_a_checkpoint_is_written_on_during_a_join() -> None:
    # Iteration 1 is saved from second 10 to 35, iteration 4 from second 40 to 65.
    record = JobRecord(dataclasses.replace(ASSUMED, save_seconds=25.0, save_every=1))
    plan = FittedPlan(10.0, {0: HeldLayers(((0, 4),))})
    record.train(0.0, 10.0, plan)
    record.train(10.0, 60.0, plan)
    record.drop_unfinished_saves(60.0)
    record.roll_back()
    assert record.outcome().iterations == 1


def test_a_trace_that_starts_with_too_few_devices() -> None:
    # The first start costs the start of processes, in all ways.
    for job in (elastic((0, 1), (30, 2), stop=110), restarted((0, 1), (30, 2), stop=110)):
        assert (job.iterations, job.repeated, job.recoveries) == (2, 0, 0)
        assert job.seconds("recovering") + job.seconds("waiting") == 68.0
    assert totals(elastic((0, 1), (30, 0), stop=110)) == (0, 0, 0, 0.0, 110.0)


def test_if_the_last_holder_of_a_layer_is_gone_the_checkpoint_is_loaded() -> None:
    # Of 2 whole iterations the second one has just been saved; of 3 it has not.
    fit = plans(pipeline=True)
    assert totals(elastic((0, 4), (25, 2), stop=100, fit=fit)) == (2 + 3, 1, 1, 14.5, 0.0)
    assert totals(elastic((0, 4), (35, 2), stop=100, fit=fit)) == (2 + 2, 2, 1, 14.5, 0.0)


def test_waiting_needs_a_number_of_devices() -> None:
    # 3 of 4 devices are not enough, from second 25 to 60; then a restart.
    assert totals(restarted((0, 4), (25, 3), (60, 4), stop=130, min_devices=4)) == (2 + 2, 1, 1, 48.0, 35.0)
    # A loss of a spare, and a device that comes, change nothing.
    fit = plans({2: 20.0, 3: 20.0, 4: 20.0})

    def two(devices: frozenset[int], held: Holdings) -> FittedPlan | None:
        return fit(frozenset(sorted(devices)[:2]), held)

    changes = trace((0, 3), (25, 2), (60, 4))
    job = simulate_restarted_job(changes, 130.0, two, ASSUMED, restart_on="loss", min_devices=2)
    assert totals(job) == (6, 0, 0, 0.0, 0.0)


CHANGES = st.lists(st.tuples(st.floats(0.01, 90.0), st.frozensets(st.integers(0, 3))), max_size=12)


@examples(ordinary=150, thorough=3000)
@given(CHANGES, st.booleans(), st.integers(1, 4), st.sampled_from([0.0, 3.0, 40.0]))
def test_what_holds_on_every_trace(
    steps: list[tuple[float, frozenset[int]]], pipeline: bool, save_every: int, save_seconds: float
) -> None:
    seconds, changes = 0.0, [Availability(0.0, frozenset(range(4)))]
    for gap, devices in steps:
        seconds += gap
        if devices != changes[-1].devices:
            changes.append(Availability(seconds, devices))
    stop = seconds + 50.0
    assumed = dataclasses.replace(ASSUMED, save_every=save_every, save_seconds=save_seconds)
    replay = replay_trace(changes, stop, plans(pipeline=pipeline), assumed, global_batch=8, cluster=frozenset(range(4)))
    for way, job in replay.jobs.items():
        assert 0 <= replay.goodput(way) <= replay.ideal_goodput
        assert job.repeated >= 0 and job.seconds("waiting") >= 0
        borders = [0.0, *(span.stop for span in job.spans)]
        assert [span.start for span in job.spans] == borders[:-1] and borders[-1] == stop
        assert all(span.stop > span.start for span in job.spans)
        trained = sum((span.stop - span.start) / span.iteration_seconds for span in job.spans if span.devices)
        assert job.iterations <= trained + 1e-6
        # What was begun was finished, lost or is running now.
        assert trained <= job.iterations + job.repeated + 1 + 1e-6
    if not pipeline and frozenset.intersection(*(change.devices for change in changes)):
        # One device holds all layers all the time, so a loss costs the running iteration at most.
        assert replay.jobs["elastic"].repeated < len(changes)
    if len(changes) == 1:
        assert len({job for job in replay.jobs.values()}) == 1


@pytest.mark.parametrize("wrong", [{"dead_wait_seconds": -1.0}, {"load_seconds": float("nan")}, {"save_every": 0}])
def test_assumptions_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Assumptions(**wrong)  # type: ignore[arg-type]
