"""Times of stages and of messages against the plan: how they are measured, and what is reported and looked for."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_hetero.colossalai_support import accelerator
from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.solver.follow import LinkDrift, Proposal
from colossal_hetero.plugin.hybrid import drift as drifting
from colossal_hetero.plugin.hybrid import live_plan
from colossal_hetero.plugin.hybrid.drift import PassSeconds, compare
from colossal_hetero.plugin.hybrid.link_times import ByNeighbor, NeighborMessages, compare_links, message_seconds
from colossal_hetero.plugin.hybrid.live_plan import LivePlan
from tests.support.fake_device import FakeDevice
from tests.support.machines import of_nodes
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
    assert clock.read() == PassSeconds(pytest.approx(3.0), pytest.approx(7.0))
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


def report(plan: Plan, slowdowns: dict[int, float], better: Plan | None = None) -> drifting.DriftReport:
    proposal = None if better is None else Proposal(better, plan.iteration_seconds, Topology((), (), ()))
    return dataclasses.replace(compare(plan, planned_times(plan, slowdowns), 0.2), proposal=proposal)


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
    found = compare(plan, {0: planned_times(plan, {0: 5.0})[0]}, 0.2)
    assert [stage.stage for stage in found.drifted] == [1]
    assert compare(plan, {}, 0.2) == drifting.DriftReport(0.2, plan, ())
    # A plan without times, written by hand, cannot drift.
    by_hand = make_plan([[[0], [1]]], (4, 4), forward_seconds=[0.0, 0.0])
    assert compare(by_hand, planned_times(plan, {}), 0.2).stages == ()


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


SIZE = 2_000_000
INSIDE, NETWORK = Channel("NVLink", 1e11), Channel("Ethernet", 1e9, 1e-4)


def exchange(
    seconds: float, *, offset: float = 0.0, queued: float = 0.0, late: float = 0.0, read: float = 1e-4
) -> tuple[NeighborMessages, NeighborMessages]:
    """Four messages each way, one second apart. The second rank's clock is ahead by ``offset``. Later messages wait for
    ``queued`` seconds each behind those before. The first rank begins to receive ``late`` seconds after each start."""
    starts = [float(number) for number in range(1, 5)]
    arrivals = [start + seconds + number * queued for number, start in enumerate(starts)]
    there = [(start - 0.5 + offset, arrival + offset) for start, arrival in zip(starts, arrivals, strict=True)]
    back = [(start + late, max(arrival, start + late + read)) for start, arrival in zip(starts, arrivals, strict=True)]
    return NeighborMessages(starts, back, SIZE), NeighborMessages([start + offset for start in starts], there, SIZE)


@pytest.mark.parametrize("offset", [0.0, 1234.5, -7.25])
@pytest.mark.parametrize("given", [{}, {"queued": 0.2}, {"late": 0.01}])
def test_clocks_and_queues_do_not_change_the_time_of_a_message(offset: float, given: dict[str, float]) -> None:
    one, other = exchange(0.03, offset=offset, **given)
    assert message_seconds(one, other) == pytest.approx(0.03) == message_seconds(other, one)


def test_a_receiver_that_always_comes_too_late_tells_nothing() -> None:
    assert message_seconds(*exchange(0.001, late=0.5)) is None
    one, other = exchange(0.03)
    assert message_seconds(dataclasses.replace(one, sent=one.sent[1:]), other) is None  # an iteration was interrupted
    assert message_seconds(dataclasses.replace(one, sent=[]), dataclasses.replace(other, received=[])) is None
    one = NeighborMessages([1.0], [(0.5, 1.0)], SIZE)  # clocks that do not run alike
    assert message_seconds(one, one) is None


def machines() -> Topology:
    kind = DeviceKind("fast", 10**9, 1e12)
    return of_nodes(([kind] * count, INSIDE, (NETWORK,)) for count in (2, 1))


def of_ranks(seconds: dict[tuple[int, int], list[float]]) -> list[ByNeighbor]:
    """What three ranks measured, from the seconds of a message in each iteration."""
    found: list[dict[int, dict[int, NeighborMessages]]] = [{}, {}, {}]
    for (one, other), each in seconds.items():
        for iteration, taken in enumerate(each):
            pair = exchange(taken, offset=100.0 * (other - one))
            found[one].setdefault(other, {})[iteration] = pair[0]
            found[other].setdefault(one, {})[iteration] = pair[1]
    return found


def test_links_are_compared_with_the_plan() -> None:
    plan = make_plan([[[0], [1], [2]]], (2, 2, 2), micro_batches=8, iteration_seconds=0.1)
    planned = NETWORK.seconds(SIZE)
    (link,) = compare_links(plan, machines(), of_ranks({(0, 1): [5.0] * 3, (1, 2): [0.02, 5.0, 0.021]}))
    assert link.ranks == (1, 2) and link.matters  # ranks 0 and 1 are on one node
    assert link.seconds == pytest.approx(0.021) and link.ratio == pytest.approx(0.021 / planned)
    words = "the link between rank 1 on n0 and rank 2 on n1 takes 21.00 ms for a message of 2 MB, planned 2.10 ms"
    assert str(link) == words
    # Three times as slow, but that is little beside an iteration; and nearly as slow as planned.
    for seconds, iteration in ((3 * planned, 10.0), (1.9 * planned, 0.01)):
        rare = plan.model_copy(update={"iteration_seconds": iteration})
        (link,) = compare_links(rare, machines(), of_ranks({(1, 2): [seconds] * 3}))
        assert not link.matters and link.ratio == 1.0
    # Ranks whose devices have not reached the same iterations.
    ours, theirs = of_ranks({(1, 2): [0.02] * 3})[1:]
    last = {1: {2: theirs[1][2]}}
    assert compare_links(plan, machines(), [{}, ours, last])[0].seconds == pytest.approx(0.02)
    assert not compare_links(plan, machines(), [{}, {2: {0: ours[2][0]}}, last])
    # Nodes without a link.
    apart = of_nodes([([DeviceKind("fast", 10**9, 1e12)], INSIDE, ())] * 2)
    assert compare_links(make_plan([[[0], [1]]], (3, 3)), apart, of_ranks({(0, 1): [0.02]})[:2]) == ()


def test_messages_that_share_a_card_are_compared_with_one_alone_and_with_all_at_once() -> None:
    """Four pipelines between two nodes."""
    kind = DeviceKind("fast", 10**9, 1e12)
    topology, alone = of_nodes([([kind] * 4, INSIDE, (NETWORK,))] * 2), NETWORK.seconds(SIZE)
    plan = make_plan([[[rank], [rank + 4]] for rank in range(4)], (3, 3), micro_batches=8, iteration_seconds=0.1)
    together = 4 * alone - 3 * NETWORK.latency_seconds
    for seconds, ratio in (
        (alone, 1.0),
        (together, 1.0),
        (1.9 * together, 1.0),
        (5 * together, 5.0),
        (0.2 * alone, 0.2),
    ):
        one, other = exchange(seconds)
        messages: list[ByNeighbor] = [{rank + 4: {0: one}} for rank in range(4)]
        messages += [{rank: {0: other}} for rank in range(4)]
        found = compare_links(plan, topology, messages)
        assert [link.ratio for link in found] == [pytest.approx(ratio)] * 4


def test_a_group_is_made_once_for_each_network() -> None:
    cpu, fabric, ethernet = DeviceKind("cpu", 10**9, 1e9), Channel("InfiniBand", 1e10), Channel("Ethernet", 1e9)
    both, slowed, apart = (
        of_nodes([([cpu], INSIDE, nics)] * 2)
        for nics in ((fabric, ethernet), (ethernet, fabric.with_bandwidth(1e8)), ())
    )
    made: list[tuple[int, ...]] = []

    def make(ranks: tuple[int, ...]) -> int:
        made.append(ranks)
        return len(made)

    live = LivePlan(None, {})
    for topology, groups in ((both, 2), (both, 2), (slowed, 3), (both, 3), (apart, 4)):
        group = live.kept_groups(make, topology)
        assert group((0, 1)) == group((0, 1)) and group((0,)) and len(made) == groups


def followed(windows: list[tuple[float, tuple[LinkDrift, ...]]]) -> tuple[list[tuple[int, Any]], int]:
    """The windows in which a plan is looked for, with its links, and the number of lines that are printed; a window
    has the slowdown of the second stage, and links."""
    plan, plugin, looked_for = make_plan([[[0], [1]]], (3, 3)), SimpleNamespace(), list[tuple[int, Any]]()
    live = LivePlan(plugin, {})
    with (
        patch.object(live_plan, "from_rank_0", lambda function: function()),
        patch.object(live_plan.dist, "get_rank", lambda: 1),
        patch.object(live_plan, "print_on_rank_0") as printed,
        patch.object(live, "_paying", lambda report, _: looked_for.append((plugin.window, report.links))),
    ):
        for plugin.window, (slow, links) in enumerate(windows, 1):
            times = {rank: PassSeconds(factor, 2 * factor) for rank, factor in enumerate((1.0, slow))}
            plugin.drift, live._is_boundary = compare(plan, times, 0.2, links), True
            live.before_passes()
    return looked_for, printed.call_count


def test_a_link_that_is_not_measured_now_stays_known() -> None:
    """Stages have changed since; the link is named once."""
    link = LinkDrift((0, 1), ("n0", "n1"), SIZE, 0.5, 0.1, matters=True)
    looked_for, lines = followed([*[(1.0, (link,))] * 2, *[(2.0, ())] * 2, *[(2.0, (link,))] * 2])
    assert [links for _, links in looked_for] == [(link,)] * 2 and lines == 1
