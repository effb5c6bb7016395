"""Stage times against the plan: how they are measured, on a simulated device, and what is reported and proposed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from colossal_hetero.colossalai_support import accelerator
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.plugin.hybrid import drift as drifting
from colossal_hetero.plugin.hybrid.drift import (
    WARMUP_ITERATIONS,
    DriftReport,
    DriftWatch,
    PassSeconds,
    Proposal,
    StageClock,
    compare,
)
from tests.support.layer_profiles import layer_times
from tests.support.planning import make_plan


class Device:
    """A simulated device; only the passes and the waiting times of the tests advance its clock."""

    seconds = 0.0
    behind = False  # the device has not yet reached the recorded events

    def __init__(self) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.seconds = device.seconds

            def query(self) -> bool:
                return not device.behind

            def elapsed_time(self, end: Any) -> float:
                return (end.seconds - self.seconds) * 1e3

        self.Event = Event

    def forward_step(self, seconds: float) -> None:
        self.seconds += seconds

    backward_step = forward_step


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    with patch.object(accelerator, "get_accelerator", lambda: device):
        yield device


def iterate(device: Device, *passes: tuple[float, float]) -> None:
    """Run forward and backward passes, with waiting times for other stages in between."""
    for forward, backward in passes:
        device.forward_step(forward)
        device.seconds += 100.0
        device.backward_step(backward)
        device.seconds += 100.0


def test_the_time_is_the_median_of_the_means_of_the_iterations_that_count(device: Device) -> None:
    clock = StageClock(device)
    for counts in (False, True):  # warm-up, and then passes without gradients
        with torch.set_grad_enabled(not counts):
            iterate(device, (9.0, 9.0))
        clock.end_iteration(counts)
        assert clock.read() is None
    for passes in ([(1.0, 2.0), (3.0, 6.0)], [(3.0, 7.0)], [(50.0, 60.0)]):
        with torch.no_grad():
            device.forward_step(7.0)
        device.behind = passes[0][0] == 50.0
        iterate(device, *passes)
        clock.end_iteration()
    device.behind = False  # nothing has waited for it
    clock.end_iteration()
    assert clock.read() == PassSeconds(pytest.approx(3.0), pytest.approx(7.0))
    assert clock.read() is None, "the times of the previous epoch were not removed"


def test_first_iterations_do_not_count(device: Device) -> None:
    """Here they take a hundred times as long and are half of all iterations."""
    watch = DriftWatch(device, make_plan([[[0]]], (2,)), 0.2, None, interval=2 * WARMUP_ITERATIONS)
    with (
        patch.object(drifting, "of_every_rank", lambda own: [own]),
        patch.object(drifting, "print_on_rank_0", lambda words: None),
    ):
        for iteration in range(2 * WARMUP_ITERATIONS):
            assert watch.report is None
            slow = 100.0 if iteration < WARMUP_ITERATIONS else 1.0
            iterate(device, (1.0 * slow, 2.0 * slow))
            watch.tick()
    assert watch.report is not None and not watch.report.drifted
    assert [stage.ratio for stage in watch.report.stages] == [pytest.approx(1.0)]


# Reports ------------------------------------------------------------------------------------------------------------


def two_stages(layers: tuple[int, int] = (4, 4), of_stages: dict[str, Any] | None = None, **changes: Any) -> Plan:
    """Two stages with 1 s forward and 2 s backward per micro-batch and block, on ranks 1 and 0."""
    options = dict(micro_batches=16, forward_seconds=[float(count) for count in layers]) | changes
    plan = make_plan([[[1], [0]]], layers, **options)
    replica = plan.replicas[0]
    stages = tuple(stage.model_copy(update=of_stages or {}) for stage in replica.stages)
    return plan.model_copy(update={"replicas": (replica.model_copy(update={"stages": stages}),)})


def planned_times(plan: Plan, slowdowns: dict[int, float]) -> dict[int, PassSeconds]:
    """The planned times by rank, multiplied by the slowdowns of some ranks."""
    return {
        rank: PassSeconds(
            *(slowdowns.get(rank, 1.0) * each for each in (stage.forward_seconds, stage.backward_seconds))
        )
        for replica in plan.replicas
        for stage in replica.stages
        for rank in stage.ranks
    }


def report(plan: Plan, slowdowns: dict[int, float], profile: ModelProfile | None = None) -> DriftReport:
    return compare(plan, planned_times(plan, slowdowns), 0.2, profile)


def proposed(*given: Any) -> Proposal:
    proposal = report(*given).proposal
    assert proposal is not None
    return proposal


def best_by_hand(block_seconds: list[float], blocks: int, micro_batches: int) -> tuple[tuple[int, ...], float]:
    """The best split of equal blocks by the formula, found by trying all splits."""
    found = []
    for cuts in itertools.combinations(range(1, blocks), len(block_seconds) - 1):
        layers = tuple(np.diff((0, *cuts, blocks)).tolist())
        times = [count * seconds for count, seconds in zip(layers, block_seconds, strict=True)]
        found.append((sum(times) + (micro_batches - 1) * max(times), layers))
    seconds, layers = min(found)
    return layers, seconds


def test_times_within_the_threshold_are_not_reported() -> None:
    for slowdowns in ({}, {0: 1.19}, {1: 0.81}):
        found = report(two_stages(), slowdowns)
        assert found.drifted == () and found.proposal is None
        assert [stage.ratio for stage in found.stages] == pytest.approx([slowdowns.get(1, 1.0), slowdowns.get(0, 1.0)])


@pytest.mark.parametrize("slowdown", [1.21, 3.0, 0.5])
def test_names_the_drifted_stage_and_proposes_another_split(slowdown: float) -> None:
    found = report(two_stages(), {0: slowdown})
    (stage,) = found.drifted
    assert (stage.stage, stage.ranks, stage.ratio) == (1, (0,), pytest.approx(slowdown))
    layers, seconds = best_by_hand([3.0, 3.0 * slowdown], 8, 16)
    present = 12 * (1 + slowdown) + 15 * 12 * max(1, slowdown)
    assert found.proposal == Proposal(layers, pytest.approx(seconds), pytest.approx(present), "plan")
    assert f"stage 1 (cpu, rank 0 on here) takes {12 * slowdown:.2f} s per micro-batch, planned 12.00 s" in str(found)
    assert f"({slowdown - 1:+.0%})" in str(found)


def test_a_proposal_counts_the_schedule() -> None:
    """The stage of rank 0 takes twice as long, with 6 s per block and 3 s of schedule."""
    proposal = proposed(two_stages(schedule_seconds=[0.5, 1.5]), {0: 2.0})
    by_hand = {
        first: (times := (3.0 * first + 0.5, 6.0 * (8 - first) + 3.0)) and sum(times) + 15 * max(times)
        for first in range(1, 8)
    }
    best = min(by_hand, key=by_hand.__getitem__)
    assert proposal.layers_per_stage[0] == best and proposal.seconds == pytest.approx(by_hand[best])
    assert proposal.present_seconds == pytest.approx(by_hand[4])


def test_keeps_a_split_that_is_still_the_best() -> None:
    # With the planned times per block 4+4 would be better, but with the measured times 5+3 is the best split.
    found = compare(two_stages((5, 3)), dict.fromkeys((0, 1), PassSeconds(4.0, 8.0)), 0.1)
    assert len(found.drifted) == 2 and found.proposal is not None and found.proposal.layers_per_stage == (5, 3)
    assert str(found).endswith("the split 5+3 is still the best: 204.0 s per iteration")


def test_the_slowest_rank_and_the_slowest_replica_count() -> None:
    found = report(make_plan([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], (4, 4), micro_batches=16), {5: 3.0, 2: 1.1})
    (stage,) = found.drifted
    assert (stage.replica, stage.stage, stage.ranks) == (1, 0, (4, 5))
    assert "stage 0 of replica 1 (cpu, ranks 4-5 on here)" in str(found)
    assert found.proposal is not None and found.proposal.layers_per_stage == best_by_hand([3.0, 1.1], 8, 16)[0]


def test_stages_without_times_are_left_out() -> None:
    plan = two_stages()
    found = compare(plan, {0: planned_times(plan, {0: 5.0})[0]}, 0.2)
    assert [stage.stage for stage in found.drifted] == [1] and found.proposal is None
    assert compare(plan, {}, 0.2) == DriftReport(0.2, (4, 4), (), None)
    # A plan without times, written by hand, cannot drift.
    by_hand = make_plan([[[0], [1]]], (4, 4), forward_seconds=[0.0, 0.0])
    assert compare(by_hand, planned_times(plan, {}), 0.2).stages == ()


def profile(seconds: tuple[float, ...], update_seconds: float = 0.0, sent: tuple[int, ...] | None = None) -> Any:
    """Blocks with these forward times and twice as long backward times; embedding and head take no time."""
    count = len(seconds) + 2
    updates = (0.0, *(update_seconds,) * len(seconds), 0.0)
    times = layer_times("cpu", (0.0, *seconds, 0.0), micro_batch=2, update_seconds=updates)
    sizes = LayerSizes(
        parameter_bytes=(100,) * count,
        activation_bytes=(10,) * count,
        output_bytes=(10, *(sent or (10,) * len(seconds)), 0),
    )
    return ModelProfile(name="by hand", times=(times,), sizes=(sizes,))


def test_layers_cost_what_the_profile_says() -> None:
    """The stages of the splits 1+3, 2+2 and 3+1 take 15 and 36, 18 and 24, or 21 and 12 seconds per micro-batch. The
    plan knows only the mean time per block of each stage."""
    plan, blocks = make_plan([[[0], [1]]], (1, 3), micro_batches=16, forward_seconds=[5.0, 3.0]), (5.0, 1.0, 1.0, 1.0)
    seconds = pytest.approx(21 + 12 + 15 * 21), pytest.approx(15 + 36 + 15 * 36)
    assert proposed(plan, {1: 4.0}, profile(blocks)) == Proposal((3, 1), *seconds, "profile")
    # A profile of another model, or one without this micro-batch size, is not used.
    for other in (profile((1.0,) * 6), profile(blocks).model_copy(update={"times": ()})):
        assert proposed(plan, {1: 4.0}, other).basis == "plan"


def test_transfer_times_are_proportional_to_the_message_size() -> None:
    """At the present cut 20 bytes take half a second; after the third block there are as many or ten times as many."""
    plan = two_stages((1, 3), dict(transfer_seconds=0.5))
    for bytes_there, layers, seconds in ((20, (3, 1), 9.5 + 6.5 + 15 * 9.5), (200, (2, 2), 6.5 + 12.5 + 15 * 12.5)):
        proposal = proposed(plan, {0: 2.0}, profile((1.0,) * 4, sent=(20, 20, bytes_there, 20)))
        assert proposal.layers_per_stage == layers and proposal.seconds == pytest.approx(seconds)
        assert proposal.present_seconds == pytest.approx(3.5 + 18.5 + 15 * 18.5)


def test_the_slowdown_of_a_device_applies_to_its_update_too() -> None:
    plan = two_stages((4, 4), dict(update_seconds=4.0), micro_batches=4)
    proposal = proposed(plan, {0: 3.0, 1: 3.0}, profile((1.0,) * 8, update_seconds=1.0))
    assert proposal.present_seconds == pytest.approx(3 * (12 + 12 + 3 * 12 + 4))


def test_only_the_memory_of_blocks_moves_with_them() -> None:
    """A block has an eighth of the 1 GB that is not overhead, so that a fifth fits in 1.2 GB."""
    for overhead, layers in ((0.5e9, (5, 3)), (0.0, (4, 4))):
        memory = dict(memory_bytes=1e9, memory_overhead_bytes=overhead, memory_available_bytes=1.2e9)
        assert proposed(two_stages(of_stages=memory), {0: 3.0}).layers_per_stage == layers
    found = report(two_stages(of_stages=dict(memory_bytes=2e9, memory_available_bytes=1e9)), {0: 3.0})
    assert found.drifted and found.proposal is None
    assert "no split of the layers other than 4+4 is known to fit in memory" in str(found)


def test_an_unchanged_report_is_not_repeated() -> None:
    def of(*slowdowns: float) -> DriftReport:
        return report(two_stages((8, 8), micro_batches=4), dict(enumerate(slowdowns)))

    silent, slow = of(1, 1), of(1, 2)
    assert not silent.differs_from(None) and not silent.differs_from(slow)
    assert slow.differs_from(None) and slow.differs_from(of(2, 1)) and of(1, 3).differs_from(slow)
    assert not slow.differs_from(slow) and not of(1, 2.02).differs_from(slow)
    often, oftener = of(1, 20), of(1, 30)  # with one best split
    assert often.proposal.layers_per_stage == oftener.proposal.layers_per_stage and oftener.differs_from(often)
    # Another split is the best, although no stage is much slower than before.
    near, nearer = of(1, 1.25), of(1, 1.48)
    assert near.proposal.layers_per_stage != nearer.proposal.layers_per_stage and nearer.differs_from(near)
