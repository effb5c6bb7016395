"""The report about stages whose times differ from the plan, computed in one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.plugin.hybrid.drift import DriftReport, PassSeconds, compare
from tests.support.layer_profiles import layer_times
from tests.support.planning import make_plan


def planned_times(plan: Plan, slowdowns: dict[int, float] | None = None) -> dict[int, PassSeconds]:
    """The planned times by rank, multiplied by the slowdowns of some ranks."""
    return {
        rank: PassSeconds(
            stage.forward_seconds * (slowdowns or {}).get(rank, 1.0),
            stage.backward_seconds * (slowdowns or {}).get(rank, 1.0),
        )
        for replica in plan.replicas
        for stage in replica.stages
        for rank in stage.ranks
    }


def two_stages(layers: tuple[int, int] = (4, 4), **changes: object) -> Plan:
    """Two stages with 1 s forward and 2 s backward per micro-batch and block."""
    return make_plan([[[1], [0]]], layers, forward_seconds=[float(count) for count in layers], **changes)


def best_by_hand(block_seconds: list[float], blocks: int, micro_batches: int) -> tuple[tuple[int, ...], float]:
    """The best split of equal blocks by the formula, found by trying all splits."""
    stages = len(block_seconds)
    found = []
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        layers = tuple(np.diff((0, *cuts, blocks)).tolist())
        times = [count * seconds for count, seconds in zip(layers, block_seconds, strict=True)]
        found.append((sum(times) + (micro_batches - 1) * max(times), layers))
    seconds, layers = min(found)
    return layers, seconds


def test_times_within_the_threshold_are_not_reported() -> None:
    plan = two_stages()
    for slowdowns in ({}, {0: 1.19}, {1: 0.81}):
        report = compare(plan, planned_times(plan, slowdowns), 0.2)
        assert report.drifted == () and report.proposal is None
        assert [stage.ratio for stage in report.stages] == pytest.approx([slowdowns.get(1, 1.0), slowdowns.get(0, 1.0)])


def test_a_proposal_counts_the_schedule() -> None:
    plan = two_stages(schedule_seconds=[0.5, 1.5], micro_batches=16)
    proposal = compare(plan, planned_times(plan, {0: 2.0}), 0.2).proposal
    assert proposal is not None
    # The stage of rank 0 takes twice as long, with 6 s per block and 3 s of schedule.
    by_hand = {
        first: (times := (3.0 * first + 0.5, 6.0 * (8 - first) + 3.0)) and sum(times) + 15 * max(times)
        for first in range(1, 8)
    }
    assert proposal.layers_per_stage[0] == min(by_hand, key=by_hand.__getitem__)
    assert proposal.seconds == pytest.approx(min(by_hand.values()))
    assert proposal.present_seconds == pytest.approx(by_hand[4])


@pytest.mark.parametrize("slowdown", [1.21, 3.0, 0.5])
def test_names_the_drifted_stage_and_proposes_another_split(slowdown: float) -> None:
    plan = two_stages(micro_batches=16)
    report = compare(plan, planned_times(plan, {0: slowdown}), 0.2)
    (stage,) = report.drifted
    assert (stage.stage, stage.ranks, stage.ratio) == (1, (0,), pytest.approx(slowdown))
    layers, seconds = best_by_hand([3.0, 3.0 * slowdown], 8, 16)
    assert report.proposal is not None and report.proposal.layers_per_stage == layers
    assert report.proposal.seconds == pytest.approx(seconds)
    assert report.proposal.present_seconds == pytest.approx(12 * (1 + slowdown) + 15 * 12 * max(1, slowdown))
    text = str(report)
    assert f"stage 1 (cpu, rank 0 on here) takes {12 * slowdown:.2f} s per micro-batch, planned 12.00 s" in text
    assert f"({slowdown - 1:+.0%})" in text


def test_keeps_a_split_that_is_still_the_best() -> None:
    plan = two_stages((5, 3))
    # With the planned times per block 4+4 would be better, but with the measured times 5+3 is the best split.
    plan = two_stages((5, 3), micro_batches=16)
    times = {1: PassSeconds(4.0, 8.0), 0: PassSeconds(4.0, 8.0)}
    report = compare(plan, times, 0.1)
    assert len(report.drifted) == 2
    assert report.proposal is not None and report.proposal.layers_per_stage == (5, 3)
    assert str(report).endswith("the split 5+3 is still the best: 204.0 s per iteration")


def test_the_slowest_rank_and_the_slowest_replica_count() -> None:
    plan = make_plan([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], (4, 4), micro_batches=16)
    report = compare(plan, planned_times(plan, {5: 3.0, 2: 1.1}), 0.2)
    (stage,) = report.drifted
    assert (stage.replica, stage.stage, stage.ranks) == (1, 0, (4, 5))
    assert "stage 0 of replica 1 (cpu, ranks 4-5 on here)" in str(report)
    assert report.proposal is not None
    assert report.proposal.layers_per_stage == best_by_hand([3.0, 1.1], 8, 16)[0]


def test_stages_without_times_are_left_out() -> None:
    plan = two_stages()
    times = planned_times(plan, {0: 5.0})
    del times[1]
    report = compare(plan, times, 0.2)
    assert [stage.stage for stage in report.drifted] == [1] and report.proposal is None
    assert compare(plan, {}, 0.2) == DriftReport(0.2, (4, 4), (), None)
    # A plan without times, written by hand, cannot drift.
    plan = make_plan([[[0], [1]]], (4, 4), forward_seconds=[0.0, 0.0])
    assert compare(plan, planned_times(two_stages()), 0.2).stages == ()


def profile(
    seconds: tuple[float, ...], update_seconds: float = 0.0, output_bytes: tuple[int, ...] | None = None
) -> ModelProfile:
    """Blocks with these forward times and twice as long backward times; embedding and head take no time."""
    count = len(seconds) + 2
    output_bytes = output_bytes or (10,) * len(seconds)
    updates = (0.0, *(update_seconds,) * len(seconds), 0.0)
    return ModelProfile(
        name="by hand",
        times=(layer_times("cpu", (0.0, *seconds, 0.0), micro_batch=2, update_seconds=updates),),
        sizes=(
            LayerSizes(
                parameter_bytes=(100,) * count, activation_bytes=(10,) * count, output_bytes=(10, *output_bytes, 0)
            ),
        ),
    )


def test_layers_cost_what_the_profile_says() -> None:
    blocks = (5.0, 1.0, 1.0, 1.0)
    plan = make_plan([[[0], [1]]], (1, 3), micro_batches=16, forward_seconds=[5.0, 3.0])
    times = planned_times(plan, {1: 4.0})
    # The plan knows only the mean time per block of each stage; the profile knows the time of every block.
    report = compare(plan, times, 0.2, profile(blocks))
    assert report.proposal is not None and report.proposal.basis == "profile"
    # The stages of the splits 1+3, 2+2 and 3+1 take 15 and 36, 18 and 24, or 21 and 12 seconds per micro-batch.
    assert report.proposal.layers_per_stage == (3, 1)
    assert report.proposal.seconds == pytest.approx(21 + 12 + 15 * 21)
    assert report.proposal.present_seconds == pytest.approx(15 + 36 + 15 * 36)
    # A profile of another model, or one without this micro-batch size, is not used.
    for other in (profile((1.0,) * 6), profile(blocks).model_copy(update={"times": profile(blocks).times[:0]})):
        report = compare(plan, times, 0.2, other)
        assert report.proposal is not None and report.proposal.basis == "plan"


def changed(plan: Plan, **changes: object) -> Plan:
    """``plan`` with changed stages."""
    replica = plan.replicas[0]
    stages = tuple(stage.model_copy(update=changes) for stage in replica.stages)
    return plan.model_copy(update={"replicas": (replica.model_copy(update={"stages": stages}),)})


def test_transfer_times_are_proportional_to_the_message_size() -> None:
    """At the present cut 20 bytes take half a second; after the third block there are as many or ten times as many."""
    plan = changed(two_stages((1, 3), micro_batches=16), transfer_seconds=0.5)
    times = planned_times(plan, {0: 2.0})
    for bytes_there, layers, seconds in ((20, (3, 1), 9.5 + 6.5 + 15 * 9.5), (200, (2, 2), 6.5 + 12.5 + 15 * 12.5)):
        report = compare(plan, times, 0.2, profile((1.0,) * 4, output_bytes=(20, 20, bytes_there, 20)))
        assert report.proposal is not None and report.proposal.layers_per_stage == layers
        assert report.proposal.seconds == pytest.approx(seconds)
        assert report.proposal.present_seconds == pytest.approx(3.5 + 18.5 + 15 * 18.5)


def test_the_slowdown_of_a_device_applies_to_its_update_too() -> None:
    plan = changed(two_stages((4, 4), micro_batches=4), update_seconds=4.0)
    report = compare(plan, planned_times(plan, {0: 3.0, 1: 3.0}), 0.2, profile((1.0,) * 8, update_seconds=1.0))
    assert report.proposal is not None
    assert report.proposal.present_seconds == pytest.approx(3 * (12 + 12 + 3 * 12 + 4))


def test_only_the_memory_of_blocks_moves_with_them() -> None:
    """A block has an eighth of the 1 GB that is not overhead, so that a fifth fits in 1.2 GB."""
    for overhead, layers in ((0.5e9, (5, 3)), (0.0, (4, 4))):
        plan = changed(
            two_stages((4, 4)), memory_bytes=1e9, memory_overhead_bytes=overhead, memory_available_bytes=1.2e9
        )
        proposal = compare(plan, planned_times(plan, {0: 3.0}), 0.2).proposal
        assert proposal is not None and proposal.layers_per_stage == layers


def test_no_split_fits() -> None:
    plan = changed(two_stages(), memory_bytes=2e9, memory_available_bytes=1e9)
    report = compare(plan, planned_times(plan, {0: 3.0}), 0.2)
    assert report.drifted and report.proposal is None
    assert "no split of the layers other than 4+4 is known to fit in memory" in str(report)


def test_an_unchanged_report_is_not_repeated() -> None:
    plan = two_stages((8, 8))

    def report(*slowdowns: float) -> DriftReport:
        return compare(plan, planned_times(plan, dict(enumerate(slowdowns))), threshold=0.2)

    silent, slow, slower, other = report(1, 1), report(1, 2), report(1, 3), report(2, 1)
    assert not silent.differs_from(None) and not silent.differs_from(slow)
    assert slow.differs_from(None) and slow.differs_from(other)
    assert not slow.differs_from(slow) and not report(1, 2.02).differs_from(slow)
    assert slower.differs_from(slow)
    often, oftener = report(1, 20), report(1, 30)  # with one best split
    assert often.proposal.layers_per_stage == oftener.proposal.layers_per_stage and oftener.differs_from(often)
    # Another split is the best, although no stage is much slower than before.
    near, nearer = report(1, 1.25), report(1, 1.48)
    assert near.proposal.layers_per_stage != nearer.proposal.layers_per_stage and nearer.differs_from(near)
