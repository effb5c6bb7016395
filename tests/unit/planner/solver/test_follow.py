"""Planning again for slow devices and while training, beside exhaustive searches; evidence, and when a move pays."""

import dataclasses
import itertools
import random

import pytest

from colossal_hetero.planner.cluster.group_networks import group_network
from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.cost.layout_line import PipelineLayout, PlanLayout, StageLayout
from colossal_hetero.planner.cost.price import price
from colossal_hetero.planner.cost.ranked_plan import RankedPlan
from colossal_hetero.planner.cost.simulate import simulate_plan, slowed
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver import replan as replan_module
from colossal_hetero.planner.solver.follow import (
    CALM,
    GAIN,
    HORIZON,
    Caution,
    LastingChange,
    LinkDrift,
    Proposal,
    at_measured_links,
    at_measured_speeds,
    propose,
)
from colossal_hetero.planner.solver.replan import replan
from colossal_hetero.planner.solver.search import Answer
from tests.support import two_speeds
from tests.support.machines import of_nodes
from tests.support.planning import make_plans, predict_plan
from tests.support.small_problems import FAST_LINK, SLOW_LINK, profile

ONE, OTHER, THIRD = (0,), (1,), (2,)
MICRO_BATCH, GLOBAL_BATCH = 2, 16


def machines(devices: int) -> Topology:
    kind = DeviceKind("fast", 10**6, 1e12)
    return of_nodes(([kind], FAST_LINK, (SLOW_LINK,)) for _ in range(devices))


# Evidence -----------------------------------------------------------------------------------------------------------


def test_two_windows_show_the_same_change() -> None:
    evidence = LastingChange()
    assert not evidence.is_certain({ONE: 1.0, OTHER: 2.0})
    assert evidence.is_certain({ONE: 1.0, OTHER: 1.9})
    evidence.settle({ONE: 1.0, OTHER: 1.9})  # what is known is no evidence any more
    assert not any(evidence.is_certain({ONE: 1.0, OTHER: 1.9}) for _ in range(5))
    # That it is as before is a change, too.
    assert [evidence.is_certain({ONE: 1.0, OTHER: 1.0}) for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    "windows",
    [
        [{ONE: 2.0, OTHER: 2.0}] * 5,  # all devices alike, for which no other split helps
        [{ONE: 1.0, OTHER: 2.0}, {ONE: 2.0, OTHER: 1.0}] * 5,  # noise
        [{ONE: 0.5, OTHER: 1.0}, {ONE: 2.0, OTHER: 1.0}] * 5,  # to both sides
        [{ONE: 1.0, OTHER: 2.0}, {ONE: 1.0, OTHER: 1.0}] * 5,  # now and then
        [{ONE: 0.97, OTHER: 1.05}] * 5,  # little
        [{ONE: 1.0, OTHER: 2.0}, {ONE: 2.0}] * 5,  # a stage was not measured
        [{}] * 5,  # none, as by a plan without times
    ],
)
def test_no_evidence(windows: list[dict[tuple[int, ...], float]]) -> None:
    evidence = LastingChange()
    assert not any(evidence.is_certain(each) for each in windows)


# Proposals ----------------------------------------------------------------------------------------------------------


def every_cut(stages: int, blocks: int) -> list[tuple[int, ...]]:
    return [(0, *cuts, blocks) for cuts in itertools.combinations(range(1, blocks), stages - 1)]


def best_alike(topology: Topology, known: ModelProfile, ranks: list[list[tuple[int, ...]]]) -> float:
    sizes = dict(micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH)
    plans = (predict_plan(topology, known, ranks, cut, **sizes) for cut in every_cut(len(ranks[0]), known.blocks))
    return min(plan.iteration_seconds for plan in plans)


def best_unlike(topology: Topology, known: ModelProfile, ranks: list[list[tuple[int, ...]]]) -> float:
    """Of all cuts of each replica and all numbers of micro-batches, at least one for each of its stages."""
    total, found = GLOBAL_BATCH // MICRO_BATCH, []
    for cuts in itertools.product(*(every_cut(len(row), known.blocks) for row in ranks)):
        for first in range(len(ranks[0]), total - len(ranks[1]) + 1):
            pipelines = tuple(
                PipelineLayout(tuple(StageLayout("fast", (each,)) for each in itertools.pairwise(cut)), count)
                for cut, count in zip(cuts, (first, total - first), strict=True)
            )
            found.append(price(topology, known, PlanLayout(pipelines, MICRO_BATCH), ranks).iteration_seconds)
    return min(found)


@pytest.mark.parametrize("ranks", [[[ONE, OTHER]], [[OTHER, ONE, THIRD]], [[ONE, OTHER], [THIRD, (3,)]]])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_cuts_for_measured_times(ranks: list[list[tuple[int, ...]]], seed: int) -> None:
    chance, known = random.Random(seed), profile(6, {"fast": 1.0}, (1,), (MICRO_BATCH,), seed)
    topology = machines(sum(map(len, ranks)))
    plan = predict_plan(topology, known, ranks, micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH)
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    factors = {stage.ranks: chance.choice([0.5, 1.0, 1.0, 2.0, 3.7]) for stage in stages}
    seconds = {stage.ranks: (stage.forward_seconds + stage.backward_seconds) * factors[stage.ranks] for stage in stages}
    slowed = at_measured_speeds(topology, factors)
    for alike in (True, False) if len(ranks) == 2 else (True,):
        found = propose(topology, known, plan, seconds, alike=alike)
        assert found is not None and found.topology == slowed
        assert found.plan.rank_order == plan.rank_order and found.plan.symmetric >= alike
        best = best_alike(slowed, known, ranks)
        if not alike:
            best = min(best, best_unlike(slowed, known, ranks))
        assert found.plan.iteration_seconds == pytest.approx(best, rel=1e-9)
        present = predict_plan(slowed, known, ranks, micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH)
        assert found.present_seconds == pytest.approx(present.iteration_seconds)


def test_speeds_are_rounded_so_that_noise_makes_no_device_unequal() -> None:
    speeds = [each.speed for each in at_measured_speeds(machines(3), {ONE: 1.01, OTHER: 0.99, THIRD: 2.0}).devices]
    assert speeds[:2] == [1.0, 1.0] and speeds[2] == pytest.approx(0.5, rel=0.015)


def test_another_search_is_asked_and_the_fastest_plan_counts() -> None:
    topology, known = machines(2), profile(6, {"fast": 1.0}, (1,), (MICRO_BATCH,))
    sizes = dict(micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH)
    plan = predict_plan(topology, known, [[ONE, OTHER]], **sizes)
    seconds = {stage.ranks: stage.forward_seconds + stage.backward_seconds for stage in plan.replicas[0].stages}
    both = predict_plan(topology, known, [[ONE], [OTHER]], **sizes)
    found = propose(topology, known, plan, seconds, alike=False, search=lambda _: both)
    assert found is not None
    assert len(found.plan.replicas) == (2 if both.iteration_seconds < plan.iteration_seconds else 1)


def test_a_move_has_to_pay() -> None:
    plan = predict_plan(machines(1), profile(6, {"fast": 1.0}, (1,), (2,)), [[ONE]], micro_batch=2, global_batch=16)

    def gaining(share: float) -> Proposal:
        return Proposal(plan, plan.iteration_seconds / (1 - share), machines(1))

    seconds = plan.iteration_seconds
    assert gaining(0.2).gain == pytest.approx(0.2)
    assert gaining(0.06).pays(seconds, GAIN) and not gaining(0.04).pays(seconds, GAIN)
    assert not gaining(-0.1).pays(0.0, GAIN)
    assert not gaining(0.06).pays(seconds, 0.1) and not gaining(0.06).pays(20 * seconds, GAIN)


def test_moves_to_and_fro_have_to_gain_more_each_time() -> None:
    caution = Caution()
    assert caution.least_gain(0) == GAIN
    caution.moved("even", "uneven", 10)
    assert caution.least_gain(11) == GAIN
    caution.moved("uneven", "even", 20)  # a device has recovered
    assert caution.least_gain(21) == 2 * GAIN
    caution.moved("even", "uneven", 30)
    caution.disappointed(35)
    assert caution.least_gain(36) == 8 * GAIN
    # Time without a move makes it less.
    found = [caution.least_gain(35 + CALM * number) / GAIN for number in range(6)]
    assert found == [8, 4, 2, 1, 1, 1]
    caution.moved("uneven", "even", 30 + HORIZON)  # long after it was left
    assert caution.least_gain(31 + HORIZON) == GAIN
    caution.taken_back("uneven", 100)
    assert caution.allows("even", 101) and not caution.allows("uneven", 99 + HORIZON)
    assert caution.allows("uneven", 100 + HORIZON)


# Links --------------------------------------------------------------------------------------------------------------

ETHERNET, FASTER, FABRIC = Channel("Ethernet", 1e9), Channel("Ethernet", 2e9), Channel("InfiniBand", 1e10, 1e-5)
SIZE = 1e6


def link(topology: Topology, one: int, other: int, factor: float = 1.0) -> LinkDrift:
    """Messages between two ranks that take ``factor`` times as long as planned."""
    planned = topology.channel(one, other).seconds(SIZE)
    return LinkDrift((one, other), ("", ""), SIZE, factor * planned, planned, factor != 1.0)


def four_nodes(*nics: Channel) -> Topology:
    return of_nodes(([DeviceKind("fast", 10**9, 1e12)], FAST_LINK, nics) for _ in range(4))


def seconds_of(topology: Topology, *pairs: tuple[int, int]) -> list[float]:
    return [topology.channel(*pair).seconds(SIZE) for pair in pairs]


def test_a_small_message_does_not_show_that_a_node_is_fast() -> None:
    """Of node 1, over whose other link little is sent: it takes much longer, too, or as long because of the latency."""
    topology = four_nodes(FABRIC)
    slow, fast = link(topology, 0, 1, 8.0), FABRIC.seconds(SIZE)
    for size, factor in ((SIZE / 10, 8.0), (SIZE / 1000, 1.0)):
        planned = FABRIC.seconds(size)
        small = LinkDrift((1, 2), ("", ""), size, factor * planned, planned, matters=False)
        slowed = at_measured_links(topology, [slow, small, link(topology, 0, 3)])
        assert seconds_of(slowed, (0, 1), (1, 2), (0, 3), (2, 3)) == pytest.approx([8 * fast, 8 * fast, fast, fast])


def test_links_between_clusters() -> None:
    topology = four_nodes(FABRIC)
    nodes = tuple(dataclasses.replace(node, cluster=number // 2) for number, node in enumerate(topology.nodes))
    topology = dataclasses.replace(topology, nodes=nodes, clusters=("a", "b"), between=((0, 1, ETHERNET),))
    slowed = at_measured_links(topology, [link(topology, 1, 2, 5.0)])
    assert seconds_of(slowed, (0, 3), (0, 1)) == pytest.approx([5 * ETHERNET.seconds(SIZE), FABRIC.seconds(SIZE)])


def test_a_curve_keeps_its_form() -> None:
    topology = four_nodes(Channel("RoCE", 1e10, 1e-5, (-0.01, 0.5, 2.0)))
    slowed = at_measured_links(topology, [link(topology, 0, 1, 4.0)])
    assert seconds_of(slowed, (0, 1)) == pytest.approx([4 * seconds_of(topology, (0, 1))[0]])


@pytest.mark.parametrize("ranks", [[[ONE, OTHER]], [[OTHER, ONE, THIRD]]])
def test_stages_are_cut_where_less_crosses_a_slow_link(ranks: list[list[tuple[int, ...]]]) -> None:
    topology = four_nodes(ETHERNET)
    known = profile(6, {"fast": 1.0}, (1,), (MICRO_BATCH,))
    outputs = (*(int(16e9 / 4**number) for number in range(7)), 0)
    sizes = tuple(each.model_copy(update={"output_bytes": outputs}) for each in known.sizes)
    known = known.model_copy(update={"sizes": sizes})
    plan = predict_plan(topology, known, ranks, micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH)
    seconds = {stage.ranks: stage.forward_seconds + stage.backward_seconds for stage in plan.replicas[0].stages}
    slow = [link(topology, 0, 1, 10.0)]
    found = propose(topology, known, plan, seconds, slow, alike=True)
    assert found is not None and found.topology == at_measured_links(topology, slow)
    assert found.plan.iteration_seconds == pytest.approx(best_alike(found.topology, known, ranks), rel=1e-9)
    assert found.present_seconds > plan.iteration_seconds and found.gain > 0.05


def test_another_network_is_taken_where_there_is_one() -> None:
    """Groups keep their network until there is a new plan, so the same cuts are a gain."""
    topology, known = four_nodes(FABRIC, ETHERNET), profile(6, {"fast": 1.0}, (1,), (MICRO_BATCH,))
    ranks = [[ONE, OTHER], [THIRD, (3,)]]
    plan = predict_plan(topology, known, ranks, micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH)
    seconds = {
        stage.ranks: stage.forward_seconds + stage.backward_seconds for each in plan.replicas for stage in each.stages
    }
    found = propose(topology, known, plan, seconds, [link(topology, 0, 1, 1000.0)], alike=True)
    assert found is not None and group_network(found.topology, (0, 2)).kind == "Ethernet"
    assert group_network(found.topology, (2, 3)).kind == "InfiniBand"
    assert found.plan.layers_per_stage == plan.layers_per_stage and found.gain > 0.5


# For slow devices --------------------------------------------------------------------------------------------------


def enumerated(topology: Topology, global_batch: int, blocks: int) -> float:
    """The fastest simulated iteration of one device, of all splits over two, and of all shares of two replicas."""
    found = []
    layouts = [[[[0]]], [[[1]]], [[[0]], [[1]]], [[[0], [1]]], [[[1], [0]]]]
    for ranks, size in itertools.product(layouts, (1, 2)):
        for cut in range(1, blocks) if len(ranks[0]) == 2 else [blocks]:
            bounds = (0, cut, blocks) if len(ranks[0]) == 2 else (0, blocks)
            made = predict_plan(
                topology, two_speeds.profile(), ranks, micro_batch=size, global_batch=global_batch, bounds=bounds
            )
            found.append(simulate_plan(made).seconds)
            if len(ranks) == 2:
                # Any numbers of micro-batches; each replica is predicted alone.
                for samples in range(size, global_batch, size):
                    shares = ((ranks[0], samples), (ranks[1], global_batch - samples))
                    alone = [
                        predict_plan(topology, two_speeds.profile(), [one], micro_batch=size, global_batch=share)
                        for one, share in shares
                    ]
                    found.append(max(simulate_plan(each).seconds for each in alone) + made.synchronization_seconds)
    return min(found)


@pytest.mark.parametrize("factor", [1.5, 4.0, 20.0])
def test_the_best_plan_for_a_slow_device(factor: float) -> None:
    topology = two_speeds.machines("fast", "fast", devices_per_node=1)
    plan = make_plans(topology, two_speeds.profile(), global_batch=16)[0].plan
    result = replan(topology, two_speeds.profile(), plan, {1: factor})
    slower = dataclasses.replace(topology.devices[1], speed=1 / factor)
    changed = dataclasses.replace(topology, devices=(topology.devices[0], slower))
    assert result.best.seconds == pytest.approx(enumerated(changed, 16, 6), rel=0.02)
    # The present plan with its slow device, from the times in its file.
    assert result.present.seconds == pytest.approx(simulate_plan(plan, {1: factor}).seconds)
    assert result.changed and result.best.seconds < result.present.seconds


@pytest.mark.parametrize("found", ["slower plans", "no plan"])
def test_the_present_plan_is_kept_if_no_other_is_faster(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = two_speeds.machines("fast", "fast", devices_per_node=1)
    plan = make_plans(topology, two_speeds.profile(), global_batch=16)[0].plan
    slower = RankedPlan(slowed(plan, {0: 1.1}), "")

    def search(*_: object, **__: object) -> object:
        if found == "no plan":
            raise ValueError("no plan fits")
        return Answer((slower,))

    monkeypatch.setattr(replan_module, "search", search)
    result = replan(topology, two_speeds.profile(), plan, {0: 1.01})
    assert result.best is result.present and not result.changed
