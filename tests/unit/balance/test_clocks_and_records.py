"""Which time counts as which part, also on a fake GPU; records of all ranks, the report and its sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import clock as clocks
from colossal_hetero.balance.clock import CpuClock, CudaClock
from colossal_hetero.balance.latest import SETTLED_AFTER, ChangeTeller, LatestIterations, plan_in_words
from colossal_hetero.balance.plan import BalancePlan, RankTimes
from colossal_hetero.balance.report import BalanceReport, LocalRecord, lossless_seconds, merge_records, report
from tests.support.fake_device import FakeDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    for name, fake in device.fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return device


class HostSeconds:
    """A host clock that a test turns on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostSeconds:
    host = HostSeconds()
    monkeypatch.setattr(clocks, "time", host)
    return host


def iterate(
    clock: CpuClock | CudaClock,
    host: HostSeconds,
    device: FakeDevice,
    parts: Sequence[tuple[Any, ...]],
    after: float = 1.0,
) -> None:
    """An iteration of parts, each with its seconds, perhaps a kind, and whether it is inner; then of other work."""
    clock.start()
    for part, seconds, *kind_and_inner in parts:
        pass_by(host, device, seconds)
        clock.mark(part, *kind_and_inner)
    pass_by(host, device, after)
    clock.stop()


def pass_by(host: HostSeconds, device: FakeDevice, seconds: float) -> None:
    host.now += seconds
    device.milliseconds += 1e3 * seconds


ATTENTION, MLP = 0, 1
PASSES: list[tuple[str, float, int | None]] = [
    ("other", 5.0, ATTENTION),  # the embedding, in whose collective a rank may wait
    ("matmul", 1.0, ATTENTION),
    ("block", 0.5, ATTENTION),
    ("matmul", 1.0, ATTENTION),
    ("communication", 2.0, ATTENTION),
    ("other", 0.25, MLP),  # norm and residual
    ("matmul", 3.0, MLP),
    ("migration", 4.0, MLP),
    ("other", 0.125, MLP),
    ("communication", 2.0, MLP),
    ("communication", 6.0, None),  # another stage of the pipeline
    ("other", 7.0, MLP),  # the loss
    ("matmul", 6.0, MLP),
    ("communication", 2.0, MLP),
]


def test_the_time_of_a_kind_is_its_work_between_collectives_of_balanced_layers(
    device: FakeDevice, host: HostSeconds
) -> None:
    cpu, gpu = CpuClock(), CudaClock()
    for clock in (cpu, gpu):
        iterate(clock, host, device, PASSES, after=8.0)  # the optimizer step
    assert gpu.read() == []  # the device is still busy
    device.catch_up()
    for times in (*cpu.read(), *gpu.read()):
        assert times.kinds == {ATTENTION: pytest.approx((2.5, 0.0)), MLP: pytest.approx((9.0, 0.375))}
        assert times.migration_seconds == pytest.approx(4.0)
        assert times.communication_seconds == pytest.approx(2 + 4 + 2 + 6 + 2)
        assert times.work_seconds == pytest.approx(5 + 2.5 + 9.375 + 7 + 8)


INNER: list[tuple[str, float, bool]] = [
    ("communication", 2.0, False),
    ("other", 0.25, False),
    ("matmul", 1.0, True),  # two column-parallel layers
    ("other", 0.0, True),
    ("matmul", 1.5, True),
    ("block", 0.5, True),
    ("matmul", 2.0, False),  # the row-parallel layer
    ("communication", 2.0, False),
    ("other", 0.25, False),  # the backward pass
    ("matmul", 4.0, True),
    ("block", 0.5, False),
    ("matmul", 3.0, False),  # dX
    ("overlapped", 5.0, True),
    ("other", 0.5, True),  # the bias
    ("communication", 1.0, False),
    ("block", 0.0, True),
    ("matmul", 1.0, False),
    ("overlapped", 1.0, True),
    ("communication", 1.0, False),
    ("matmul", 7.0, True),  # of a block that ends without another product
]
"""In milliseconds. The last part is followed by other work of 1 ms."""


def run(clock: CudaClock, device: FakeDevice, parts: list[tuple[str, float, bool]] = INNER) -> None:
    """The parts in milliseconds."""
    iterate(clock, HostSeconds(), device, [(part, 1e-3 * ms, MLP, inner) for part, ms, inner in parts], after=1e-3)


def test_inner_parts_take_no_events_on_a_gpu(device: FakeDevice, host: HostSeconds) -> None:
    cpu, gpu = CpuClock(), CudaClock()
    before = device.recorded
    for clock in (cpu, gpu):
        iterate(clock, host, device, [(part, ms, MLP, inner) for part, ms, inner in INNER])
    assert device.recorded - before == sum(not inner for _, _, inner in INNER) + 2
    device.catch_up()
    (all_parts,), (merged,) = cpu.read(), gpu.read()
    # The bias, and the end of the last block, are the only work whose time is not known without their events. A product
    # beside a collective is taken to be as long as the one before: 3 instead of 5 ms.
    assert all_parts.kinds[MLP].movable == pytest.approx(5 + 4.5 + 3 + 5 + 1 + 1 + 7)
    assert merged.kinds[MLP].movable == pytest.approx(all_parts.kinds[MLP].movable - 2 + 1)
    assert all_parts.kinds[MLP].fixed == pytest.approx(1.0) and merged.kinds[MLP].fixed == pytest.approx(0.5)
    assert merged.communication_seconds == pytest.approx(all_parts.communication_seconds + 2.5)
    assert merged.work_seconds + 2.5 == pytest.approx(all_parts.work_seconds)


def test_events_are_read_in_slices_while_there_is_time(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "READ_AT_ONCE", 10)
    parts = [("matmul", 1.0, False)] * 24
    clock = CudaClock()
    run(clock, device, parts)
    device.catch_up()
    read, finished = [], []
    for _ in range(3):
        before = device.read
        finished.append(clock.read())
        read.append(device.read - before)
    assert read == [10, 10, 5] and [len(each) for each in finished] == [0, 0, 1]
    assert finished[-1][0].kinds[MLP].movable == pytest.approx(24e-3)
    # If every iteration is measured, none is left behind.
    for _ in range(2):
        run(clock, device, parts)
    device.catch_up()
    assert len(clock.read()) == 1
    for _ in range(3):
        run(clock, device, parts)
        device.catch_up()
        assert len(clock.read()) == 1


def test_a_gpu_that_waits_for_its_host_is_noticed(device: FakeDevice) -> None:
    clock = CudaClock()
    shares = []
    for late in (0, 9, 24):  # the host is late with so many of 24 parts
        clock.start()
        for number in range(24):
            if number < late:
                device.catch_up()
            device.milliseconds += 1.0
            clock.mark("matmul", MLP)
        asked = device.queried
        clock.stop()
        assert device.queried - asked <= 1
        device.catch_up()
        (times,) = clock.read()
        shares.append(times.starved)
    assert shares == [0.0, pytest.approx(9 / 24), pytest.approx(1.0)]


def test_a_gpu_always_waits_for_a_host_that_waits_in_collectives(device: FakeDevice) -> None:
    clock = CudaClock(host_waits=True)
    clock.start()
    for _ in range(24):
        device.catch_up()
        clock.mark("communication", MLP)
    clock.stop()
    device.catch_up()
    assert [times.starved for times in clock.read()] == [0.0]
    assert device.queried == 1  # whether the iteration has ended


def local(iteration: int = 0, work: float = 1.0, matmul: float = 0.5, **others: Any) -> LocalRecord:
    usual = dict(communication_seconds=0.1, resized=0.0, plan_changed=False)
    usual |= dict(equal_work_seconds=work, equal_matmul_seconds=matmul)
    return LocalRecord(iteration=iteration, work_seconds=work, matmul_seconds=matmul, **(usual | others))


def reported(*per_rank: list[LocalRecord]) -> BalanceReport:
    ranks = list(range(len(per_rank)))
    found = report(merge_records(per_rank, [ranks]), ranks)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("groups", "waits", "scores"),
    [
        ([[0, 1, 2, 3]], [0.4, 0.0, 0.2, 0.8], [0.5, 0.125, 1.0, 1 / 3]),
        # Two groups of two ranks each: nobody waits for a rank of the other group.
        ([[0, 1], [2, 3]], [0.4, 0.0, 0.0, 0.6], [1.0, 0.25, 1.0, 1 / 3]),
        ([[0, 2], [1, 3]], [0.2, 0.0, 0.0, 0.8], [0.5, 0.375, 1.0, 1.0]),
    ],
)
def test_a_rank_is_compared_with_its_group(groups: Any, waits: list[float], scores: list[float]) -> None:
    """It waits in collectives beyond the last to arrive. Scores are at equal work: pruning makes a rank no faster."""
    views = list(zip((0.5, 0.1, 0.3, 0.9), (2.0, 8.0, 1.0, 3.0), strict=True))
    per_rank = [
        [local(i, communication_seconds=waited + i, equal_work_seconds=work) for i in (0, 1)] for waited, work in views
    ]
    for record in merge_records(per_rank, groups):
        assert [rank.wait_seconds for rank in record.ranks] == pytest.approx(waits)
        assert [rank.relative_score for rank in record.ranks] == pytest.approx(scores)


def test_iterations_that_a_rank_has_not_read_are_left_out() -> None:
    per_rank = [[local(i) for i in range(5)], [local(i) for i in (0, 2, 3)], [local(i) for i in (4, 3, 2)]]
    assert [record.iteration for record in merge_records(per_rank, [[0, 1, 2]])] == [2, 3]
    assert merge_records([[local(0)], []], [[0, 1]]) == []


seconds = st.floats(0.01, 100)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6))
def test_lossless_seconds_by_bisection(times: list[tuple[float, float]]) -> None:
    """The least ``t ≥ max other`` by which the ranks do e shares of the products."""
    other, matmul = (np.array(values) for values in zip(*times, strict=True))
    low, high = float(other.max()), float(other.max() + matmul.max() * len(other))
    for _ in range(200):
        middle = (low + high) / 2
        done = (np.maximum(0.0, middle - other) / matmul).sum()
        low, high = (middle, high) if done < len(other) else (low, middle)
    assert lossless_seconds(other, matmul) == pytest.approx(high, rel=1e-6)


def test_report_by_hand() -> None:
    """Rank 1 works 4 s at its full share, of which 3 s are products; from iteration 2 on it prunes half of them."""
    healthy, slow = [], []
    for i in range(9):
        pruned = i >= 2
        healthy.append(local(i, work=2.0, matmul=1.0, communication_seconds=0.7 if pruned else 2.2))
        work, matmul = (2.5, 1.5) if pruned else (4.0, 3.0)
        equal = dict(equal_work_seconds=4.0, equal_matmul_seconds=3.0, communication_seconds=0.2)
        slow.append(local(i, work, matmul, resized=0.5 if pruned else 0.0, plan_changed=i == 1, **equal))
    found = reported(healthy, slow)
    assert found.iterations == 9 and found.changes == 1
    assert found.balanced_seconds == pytest.approx(0.2 + 2.5)
    assert found.unbalanced_seconds == pytest.approx(0.2 + 4.0)
    assert found.homogeneous_seconds == pytest.approx(0.2 + 2.0)
    assert found.bound_seconds == pytest.approx(0.2 + 1.0 + 2 / (1 + 1 / 3))
    first, second = found.ranks
    assert (first.rank, first.resized, first.wait_seconds) == (0, 0.0, pytest.approx(0.5))
    assert (second.rank, second.resized, second.wait_seconds) == (1, 0.5, 0.0)
    assert (second.work_seconds, second.matmul_seconds, second.migrated, second.received) == (2.5, 1.5, 0.0, 0.0)


def test_the_report_takes_medians_and_every_note_once_with_the_latest_last() -> None:
    scores = [0.5, 1.0, 0.25, 0.3, 0.4]
    views = [local(i, own_score=score, migrated=score, equal_work_seconds=4.0) for i, score in enumerate(scores)]
    found = reported([local(i) for i in range(5)], views)
    assert [rank.own_score for rank in found.ranks] == [1.0, 0.4]
    assert [rank.relative_score for rank in found.ranks] == [1.0, 0.25]
    assert [rank.migrated for rank in found.ranks] == [0.0, 0.4]
    assert found.saved_seconds == pytest.approx(found.unbalanced_seconds - found.balanced_seconds)
    assert found.waiting_seconds == 0.0 and found.notes == ()
    assert reported([local(i, note=note) for i, note in enumerate(["", *"aab", "", *"acb"])]).notes == ("a", "c", "b")


SLOW = (RankTimes(1.0, 1.0), RankTimes(6.1, 6.1), RankTimes(1.2, 1.2))
RANKS = (4, 5, 6)
IDLE, PRUNING = BalancePlan.idle(3), BalancePlan.resizing((0.0, 0.5, 0.0))
WORDS = "rank 5 takes 6.1 times as long as the fastest for the same layers: 68% of its work now runs on ranks 4, 6"
FASTER, SLOWER = "; iteration 2.000 s → 1.000 s", "; iteration 1.000 s → 2.000 s"


def test_the_latest_medians_are_those_of_one_plan() -> None:
    """Also if the times of an iteration with the plan before become known later."""
    latest = LatestIterations(Mock(size=lambda: 1, rank=lambda: 0), [[0]], interval=4)
    for iteration in range(3):
        latest.add(local(iteration, work=9.0))
    latest.plan_changed(3)
    for iteration, work in ((3, 9.0), (4, 2.0)):
        latest.add(local(iteration, work=work))
    with patch.object(dist, "all_reduce"):
        latest.end_iteration(8)
    found = latest.report()
    assert found is not None and (found.ranks[0].work_seconds, found.iterations, found.changes) == (2.0, 1, 1)


def migrating(share: float) -> BalancePlan:
    return BalancePlan((0.0,) * 3, (0.0, share, 0.0), (share / 2, 0.0, share / 2))


@pytest.mark.parametrize(
    ("changes", "iterations", "told"),
    [
        # A change is told when its effect is known.
        ({10: migrating(0.68)}, 10 + 2 + SETTLED_AFTER, [WORDS + FASTER]),
        ({10: migrating(0.68)}, 10 + 1 + SETTLED_AFTER, []),
        ({10: migrating(0.68), 20: IDLE}, 40, [WORDS + FASTER, "ranks 4-6: each does its own work again" + SLOWER]),
        # Small changes and changes that do not last are not told.
        ({10: migrating(0.68), 20: migrating(0.65), 30: migrating(0.7)}, 40, [WORDS + FASTER]),
        ({10: migrating(0.4), 12: migrating(0.68)}, 40, [WORDS + FASTER]),
        ({10: PRUNING}, 40, ["50% of its work is skipped, which costs accuracy"]),
    ],
)
def test_changes_are_told(changes: dict[int, BalancePlan], iterations: int, told: list[str]) -> None:
    """What is said in iterations of 2 s without a plan, and of 1 s with one that migrates."""
    said: list[str] = []
    teller, moved = ChangeTeller(RANKS, said.append), False
    for iteration in range(iterations):
        teller.took(iteration, 1.0 if moved else 2.0)
        if iteration in changes:
            teller.changed(iteration, changes[iteration], SLOW)
            moved = sum(changes[iteration].migrate) > 0
    assert len(said) == len(told) and all(words in each for words, each in zip(told, said, strict=True)), said


def test_a_given_plan_is_told_without_times_if_none_are_known() -> None:
    assert plan_in_words(migrating(0.5), None, RANKS) == "rank 5: 50% of its work now runs on ranks 4, 6"
