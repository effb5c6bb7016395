"""Decisions: ratios, plans of shares and of whole units, their costs, when a plan is kept; ranges of units."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import (
    BalanceConfig,
    BalancePlan,
    Costs,
    Move,
    Pruning,
    RankTimes,
    decide,
    divide,
    layer_ratios,
    modes,
    predicted_seconds,
    resize_ratios,
)
from colossal_hetero.balance.divide import BlockShape, block_ports, busiest_port, effective_grain
from colossal_hetero.balance.plan import Volume
from colossal_hetero.balance.ratios import KindProblem, Line, fastest_counts
from tests.support.random_examples import examples

FREE, IDLE = Costs(), BalancePlan.idle(2)
RESIZE, AUTO = BalanceConfig(mode="resize"), BalanceConfig(mode="auto")
MODES = ("off", "resize", "migrate", "semi", "auto")
MIGRATING = ("migrate", "semi", "auto")
NAN = float("nan")


@st.composite
def groups(draw: st.DrawFn) -> list[RankTimes]:
    works = draw(st.lists(st.floats(1e-4, 1e3), min_size=2, max_size=8))
    return [RankTimes(work, work * draw(st.floats(0, 1))) for work in works]


def straggler(slowdown: float, ranks: int = 2) -> list[RankTimes]:
    """Rank 0 is slow."""
    return [RankTimes(chi, chi) for chi in (slowdown, *(1.0,) * (ranks - 1))]


@given(st.floats(0.3, 3.5))
def test_corrections_arrive_at_what_is_measured_smoothed_and_limited(true_scale: float) -> None:
    costs = Costs(migrate_fixed_seconds=0.02, migrate_seconds_per_share=0.1)
    measured = true_scale * costs.phi1(0.5)
    for _ in range(30):
        costs = costs.corrected(costs.phi1(0.5), measured)
    assert costs.phi1(0.5) == pytest.approx(measured, rel=1e-3)
    for seconds, scale in ((2.0, math.sqrt(2.0)), (1e6, 4.0), (0.0, 0.25)):
        assert FREE.corrected(1.0, seconds).communication_scale == pytest.approx(scale)
    for predicted, found in ((0.0, 1.0), (NAN, 1.0), (1.0, NAN), (1.0, -1.0)):
        assert FREE.corrected(predicted, found) == FREE


@given(st.floats(1e-3, 10), st.integers(2, 8), st.sampled_from(MODES), st.data())
def test_nothing_is_done_when_no_rank_is_slow(work: float, ranks: int, mode: Any, data: st.DataObject) -> None:
    noise = st.floats(1.0, 1.0 + RESIZE.threshold)
    group = [RankTimes(work * data.draw(noise), work / 2) for _ in range(ranks)]
    config = BalanceConfig(mode=mode, max_resize=data.draw(st.sampled_from([None, 0.9])))
    none = (0.0,) * (ranks - 1)
    for before in (BalancePlan.idle(ranks), BalancePlan((0.1, *none), (0.3, *none), (0.0, 0.3, *none[1:]))):
        assert decide(group, FREE, config, before) == BalancePlan.idle(ranks)


def test_ratios_by_hand() -> None:
    assert resize_ratios([1.0, 4.0], [1.0, 4.0], 1.0, 0.9).tolist() == [0.0, 0.75]
    assert resize_ratios([1.0, 4.0], [1.0, 4.0], 2.5, 0.9).tolist() == [0.0, 0.375]  # the mean
    assert resize_ratios([1.0, 4.0], [0.5, 2.0], 1.0, 0.9).tolist() == [0.0, 0.9]  # capped
    assert resize_ratios([1.0, 4.0], [0.5, 0.0], 1.0, 0.9).tolist() == [0.0, 0.0]  # nothing to prune
    # What resizing costs is pruned as well.
    config = BalanceConfig(mode="resize", pruning=Pruning(resize_overhead=0.05))
    ratio = decide(straggler(4.0), FREE, config, IDLE).resize[0]
    assert (1 - ratio + 0.05) * 4.0 == pytest.approx(1.0)


@pytest.mark.parametrize("every_rank, expected", [(False, (0.0, 0.5, 0.0)), (True, (0.5, 0.5, 0.5))])
def test_fixed_ratio_goes_to_slow_ranks_or_to_all(every_rank: bool, expected: tuple[float, ...]) -> None:
    group = [RankTimes(1.0, 1.0), RankTimes(4.0, 4.0), RankTimes(1.05, 1.0)]
    config = BalanceConfig(mode="resize", pruning=Pruning(resize_ratio=0.5, every_rank=every_rank))
    plan = decide(group, FREE, config, BalancePlan.idle(3))
    assert plan.resize == expected
    assert decide([group[0]] * 3, FREE, config, plan).resize == ((0.5,) * 3 if every_rank else (0.0,) * 3)


@given(
    st.floats(0, 0.9),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 100)), min_size=1, max_size=12),
    st.floats(0, 1),
)
def test_layer_ratios_keep_the_budget_or_are_algorithm_1(ratio, layers, decay):
    shares, costs = zip(*layers, strict=True)
    ratios = layer_ratios(ratio, shares, costs, Pruning(priority="priority-diff", decay=decay), 0.9)
    assert (ratios >= 0).all() and (ratios <= 0.9 + 1e-9).all()
    assert float(ratios @ np.array(costs)) == pytest.approx(ratio * sum(costs), rel=1e-6, abs=1e-9)
    printed = layer_ratios(ratio, shares, costs, Pruning(priority="priority-diff", ratio_form="printed"), 0.9)
    expected = [min(max(share, 0.8 * ratio), 0.9) if ratio else 0.0 for share in shares]
    assert printed == pytest.approx(expected)


def without_pruning(mode: Any) -> BalanceConfig:
    return BalanceConfig(mode=mode, max_resize=0.0 if mode == "semi" else None)


@given(groups(), st.sampled_from(MIGRATING), st.floats(0, 0.9))
def test_plans_are_possible_and_do_not_harm(group: list[RankTimes], mode: Any, cap: float) -> None:
    limit = 0.0 if mode == "migrate" else cap
    idle = BalancePlan.idle(len(group))
    plan = decide(group, FREE, BalanceConfig(mode=mode, max_resize=None if mode == "migrate" else cap), idle)
    assert all(0 <= ratio <= limit + 1e-6 for ratio in plan.resize)
    assert sum(plan.migrate) == sum(plan.receive)
    assert all(plan.load(rank) > 0 for rank in range(len(group)))
    assert predicted_seconds(group, FREE, plan) <= predicted_seconds(group, FREE, idle)
    # Processors differ in the last bits of sums; a plan must not.
    assert all((share * 2**20).is_integer() for share in (*plan.resize, *plan.migrate, *plan.receive))


@pytest.mark.parametrize("mode", MIGRATING)
def test_a_small_change_keeps_the_plan_and_a_large_one_does_not(mode: str) -> None:
    config = without_pruning(mode)
    plan = decide(straggler(4.0), FREE, config, IDLE)
    assert plan != IDLE
    for slowdown in (3.7, 4.0, 4.2):
        assert decide(straggler(slowdown), FREE, config, plan) == plan
    for slowdown in (2.0, 16.0):
        again, anew = (decide(straggler(slowdown), FREE, config, before) for before in (plan, IDLE))
        assert again == anew != plan
    # Receivers take no more than they have memory for.
    plan, limited = (
        decide(straggler(4.0, 3), FREE, config, BalancePlan.idle(3), max_received=most) for most in (math.inf, 0.1)
    )
    assert max(plan.receive) > 0.1 and max(limited.receive) == pytest.approx(0.1)
    assert sum(limited.migrate) == pytest.approx(sum(limited.receive))


def test_digests_tell_plans_apart() -> None:
    plan = BalancePlan((0.0, 0.25), (0.5, 0.0), (0.0, 0.5), "why")
    assert plan.digest == BalancePlan((-0.0, 0.25), (0.5, 0.0), (0.0, 0.5)).digest == 1949877861
    others = [IDLE, BalancePlan.idle(3), BalancePlan.resizing((0.0, 0.25)), replace(plan, units=((1, 3), (4, 4)))]
    others += [BalancePlan((0.0, 0.25), (0.0, 0.5), (0.5, 0.0)), replace(plan, units=((1, 3), (3, 5)))]
    assert len({plan.digest, *(other.digest for other in others)}) == 7
    assert all(0 <= other.digest < 2**31 for other in others)


@st.composite
def unit_problems(draw: st.DrawFn) -> KindProblem:
    """Each rank takes a fixed time and one per unit; units of other ranks take longer."""
    ranks = draw(st.integers(2, 4))
    units = draw(st.integers(1, 8 if ranks < 4 else 5))
    grain, most = draw(st.integers(1, min(3, units))), draw(st.integers(0, units * (ranks - 1)))
    slopes = [draw(st.floats(0.5, 8.0)) for _ in range(ranks)]
    fixed, above = draw(st.floats(0, 3)), draw(st.floats(1.0, 1.5))
    lines = [Line(units, fixed + slope * units, slope, above * slope, units) for slope in slopes]
    return KindProblem(units, grain, most, lines, draw(st.sampled_from([0.0, 0.05, 0.5, 5.0])))


@given(unit_problems())
def test_no_division_is_faster(kind: KindProblem) -> None:
    lines, per_unit = kind.lines, kind.seconds_per_unit

    def moved(counts: tuple[int, ...]) -> int:
        return sum(max(0, kind.units - count) for count in counts)

    def seconds(counts: tuple[int, ...]) -> float:
        return max(line(count) for line, count in zip(lines, counts, strict=True)) + per_unit * moved(counts)

    steps = [count for count in range(1, kind.units + kind.max_taken + 1) if (count - kind.units) % kind.grain == 0]
    every = [counts for counts in product(steps, repeat=len(lines)) if sum(counts) == len(lines) * kind.units]
    found = fastest_counts(kind)
    assert found in every
    assert seconds(found) == pytest.approx(min(map(seconds, every)))
    # Of equally fast divisions it is one that moves the least.
    equal = [counts for counts in every if seconds(counts) <= seconds(found) * (1 + 1e-12)]
    assert moved(found) <= min(map(moved, equal)) + kind.grain * (per_unit > 0)


def problem(units: int, slowdowns: tuple[float, ...], per_unit: float = 0.0) -> KindProblem:
    """A full share takes 1 s times the rank's slowdown."""
    lines = [Line(units, slowdown, slowdown / units, slowdown / units, units) for slowdown in slowdowns]
    return KindProblem(units, 1, units, lines, per_unit)


EVEN = (64, 64)


def test_counts_change_if_that_gains_enough() -> None:
    for slowdown, per_unit, current, uncertainty, fixed, stays, words in (
        (1.3, 0.0, EVEN, 0.05, 0.0, False, "migration pays"),  # a gain must exceed the uncertainty
        (1.3, 0.0, EVEN, 0.2, 0.0, True, "balancing would gain too little"),
        (1.05, 0.0, EVEN, 0.005, 0.0, False, "migration pays"),
        (2.0, 0.1, EVEN, 0.01, 0.0, True, ""),  # what costs more than it saves is not sent
        (2.0, 0.0, EVEN, 0.01, 1.0, True, ""),
        (2.0, 0.1, (43, 85), 0.01, 0.0, False, "migration cannot pay"),
        (2.0, 0.0, (45, 83), 0.05, 0.0, True, "migration pays: 1.34 s in blocks with, 2 s without"),
    ):
        counts, note = modes.decide_counts([problem(64, (slowdown, 1.0), per_unit)], (current,), uncertainty, fixed)
        assert (counts == (current,)) == stays and note.startswith(words)
        assert counts == (EVEN,) or "cannot pay" not in note


KINDS = [modes.LayerKind(8, 1, 0.25), modes.LayerKind(64, 1, 0.75)]


def decide_units(
    slowdowns: tuple[float, float],
    current: BalancePlan = IDLE,
    kinds: Sequence[modes.LayerKind] = KINDS,
    costs: Costs = FREE,
    mode: Any = "auto",
    uncertainty: float = 0.05,
    max_received: float = math.inf,
) -> BalancePlan:
    """The plan for two ranks, whose full share of each kind takes 1 s times the rank's slowdown."""
    lines = [problem(kind.units or 0, slowdowns).lines for kind in kinds]
    times = [RankTimes(2 * slowdown, 2 * slowdown) for slowdown in slowdowns]
    work = modes.UnitWork(kinds, lines)
    return decide(times, costs, BalanceConfig(mode=mode), current, uncertainty, work, max_received)


def test_a_plan_has_whole_units_and_their_shares() -> None:
    plan = decide_units((4.0, 1.0))
    assert plan.units == ((3, 13), (25, 103))
    share = 0.25 * 5 / 8 + 0.75 * 39 / 64
    assert plan.migrate == pytest.approx((share, 0.0), abs=1e-5)
    assert plan.receive == pytest.approx((0.0, share), abs=1e-5)
    assert decide_units((4.1, 1.0), plan) == plan
    assert decide_units((1.0, 1.0), plan) == IDLE
    limited = decide_units((4.0, 1.0), max_received=0.25)
    assert limited.units == ((6, 10), (48, 80)) and limited.max_received == 0.25
    assert limited.note.startswith("receivers have memory for no more than 25% of their own work; migration pays")
    dear = Costs(migrate_seconds_per_share=10.0)
    assert not decide_units((2.0, 1.0), costs=dear).units and decide_units((2.0, 1.0), costs=dear, mode="migrate").units
    (moved, stays) = decide_units((1.0, 3.0), kinds=[KINDS[0], replace(KINDS[1], moves=False)], uncertainty=0.0).units
    assert moved != (8, 8) and stays == (64, 64)


def relieving(*ranks: int, size: int = 4) -> BalancePlan:
    share = 0.3 * len(ranks) / (size - len(ranks))
    migrate = tuple(0.3 if rank in ranks else 0.0 for rank in range(size))
    return BalancePlan((0.0,) * size, migrate, tuple(0.0 if rank in ranks else share for rank in range(size)))


NOBODY = BalancePlan.idle(4)


def test_a_rank_that_gives_units_of_one_kind_is_relieved_even_if_it_takes_others() -> None:
    def in_units(*counts: tuple[int, ...]) -> Any:
        return modes.relieved_ranks(replace(IDLE, units=counts))

    assert in_units((3, 5), (9, 7)) == {0, 1} and in_units((3, 5), (8, 8)) == {0}
    assert modes.relieved_ranks(relieving(1, 3)) == {1, 3} and modes.relieved_ranks(NOBODY) == frozenset()
    # Iterations count from the last one without relief.
    counts: tuple[int, ...] = (0,) * 4
    for plan in (relieving(1), relieving(1, 2), relieving(2), relieving(1, 2), NOBODY, relieving(1)):
        counts = modes.relieved_for(counts, plan)
    assert counts == (0, 1, 0, 0)
    assert modes.relieved_for((0, 3, 2, 0), relieving(1)) == (0, 4, 0, 0)


def test_units_are_given_away_when_a_relieved_rank_was_slow_for_long_until_only_others_are() -> None:
    for plan, relieved, after, wanted in (
        (relieving(1), (0, 50, 0, 0), 50, True),
        (relieving(1), (0, 49, 0, 0), 50, False),
        (relieving(1, 2), (0, 80, 10, 0), 50, True),
        (relieving(1, 2), (0, 49, 10, 0), 50, False),
        (relieving(1), (0, 10, 80, 0), 50, False),  # rank 2 is not relieved any more
        (relieving(1), (0, 10**6, 0, 0), None, False),
        (NOBODY, (0, 80, 0, 0), 50, False),
    ):
        assert modes.wants_resharding(plan, relieved, after) is wanted
    for current, slow, stays in (([1], [1], True), ([1, 2], [2], True), ([1], [1, 2], True), ([1], [3], False)):
        assert modes.stays_resharded(relieving(*current), relieving(*slow)) is stays
    assert not modes.stays_resharded(relieving(1), NOBODY)


@st.composite
def plans(draw: st.DrawFn) -> BalancePlan:
    ranks = draw(st.integers(1, 8))
    gives = [draw(st.booleans()) for _ in range(ranks)]
    gives[draw(st.integers(0, ranks - 1))] = False
    resize = [draw(st.one_of(st.just(0.0), st.floats(0, 0.95))) for _ in range(ranks)]
    migrate = [draw(st.floats(0, 1)) * (1 - r) if give else 0.0 for r, give in zip(resize, gives, strict=True)]
    weights = [0.0 if give else draw(st.one_of(st.just(0.0), st.floats(0.1, 1))) for give in gives]
    if not any(weights):
        weights[gives.index(False)] = 1.0
    total = math.fsum(weights)
    return BalancePlan(tuple(resize), tuple(migrate), tuple(math.fsum(migrate) * weight / total for weight in weights))


units_counts = st.one_of(st.integers(1, 100), st.integers(1, 5000), st.sampled_from([64, 768, 1024, 4096]))
grains = st.sampled_from([1, 2, 16, 64, 100])


@examples(ordinary=80, thorough=500)
@given(units_counts, plans(), grains)
def test_every_unit_is_somewhere_once(units: int, plan: BalancePlan, grain: int) -> None:
    division = divide(units, plan, grain)
    ranks = range(len(plan.resize))
    assert sum(division.given(rank) for rank in ranks) == sum(division.taken(rank) for rank in ranks)
    for rank in ranks:
        assert division.kept(rank) >= 1 and division.pruned[rank] >= 0
        assert division.kept(rank) == units or division.kept(rank) % effective_grain(units, grain) == 0
        assert division.kept(rank) + division.pruned[rank] + division.given(rank) == units
        assert division.given(rank) == 0 or division.taken(rank) == 0
        if plan.migrate[rank] == 0:
            assert division.given(rank) == 0
        if plan.receive[rank] == 0:
            assert division.taken(rank) == 0
        if plan.resize[rank] == 0:
            assert division.pruned[rank] == 0
        own = [move for move in division.moves if move.sender == rank]
        covered = [unit for move in own for unit in range(move.start, move.stop)]
        assert covered == list(range(units - division.given(rank), units))
    loads = sum(division.kept(rank) + division.taken(rank) for rank in ranks)
    assert loads == len(ranks) * units - sum(division.pruned)
    pairs = Counter((move.sender, move.receiver) for move in division.moves)
    assert all(count == 1 for count in pairs.values())
    assert all(move.units > 0 for move in division.moves)


def test_grains() -> None:
    assert [effective_grain(units, 64) for units in (1, 12, 63, 64, 512, 768, 1024, 2048, 10**6)] == [
        *(1, 1, 1, 2, 16, 16, 32, 64, 64)
    ]
    assert effective_grain(4096, 1) == 1 and effective_grain(4096, 100) == 64


def one_straggler(ranks: int, slow: int, share: float) -> BalancePlan:
    return BalancePlan(
        resize=(0.0,) * ranks,
        migrate=tuple(share if rank == slow else 0.0 for rank in range(ranks)),
        receive=tuple(0.0 if rank == slow else share / (ranks - 1) for rank in range(ranks)),
    )


@given(st.integers(2, 8), st.integers(0, 7), st.integers(1, 90))
def test_one_straggler_gives_ranges_as_in_the_paper(ranks: int, slow: int, given_units: int) -> None:
    """``P_r = P[m(r′ − 1) : m r′]`` with ``r′ = (r + e − s) mod e``, remainders to the first receivers."""
    slow %= ranks
    division = divide(100, one_straggler(ranks, slow, given_units / 100), grain=1)
    assert division.given(slow) == given_units
    each, rest = divmod(given_units, ranks - 1)
    expected, start = [], 100 - given_units
    for number in range(1, ranks):
        count = each + (number <= rest)
        if count:
            expected.append(Move(slow, (slow + number) % ranks, start, start + count))
        start += count
    assert list(division.moves) == expected


def test_few_units_are_given_where_that_is_faster() -> None:
    """Six heads: 2.1 of them would be exact. Giving a third one would make the receiver later than it relieves."""
    assert divide(6, one_straggler(2, 0, 0.35)).given(0) == 2
    assert divide(6, one_straggler(2, 0, 0.40)).given(0) == 3


def test_a_port_waits_for_its_first_weights_and_for_all_gradients() -> None:
    blocks = [BlockShape(elements_per_unit=10, layers=2)] * 3
    # Rank 0 gives 3 units to rank 1 and 1 to rank 2, but in the first block only the latter.
    moves = [(Move(0, 2, 7, 8),), *[(Move(0, 1, 4, 7), Move(0, 2, 7, 8))] * 2]
    ports = block_ports(blocks, moves, [0, 0, 1], ranks=4, bytes_per_element=2)
    assert [port.sent for port in ports] == [Volume(4, 180), Volume(4, 120), Volume(6, 60), Volume()]
    # The weights of the first two blocks are one bucket. Messages to several ranks start together.
    assert [port.waited for port in ports] == [
        Volume(1 + 6, (1 + 4) * 20 + (1 + 4 + 4) * 20),
        Volume(1 + 4, 3 * 20 + 2 * 3 * 20),
        Volume(1 + 6, 2 * 20 + 3 * 20),
        Volume(),
    ]
    assert busiest_port(ports) == Volume(7, 280)
    assert busiest_port(block_ports(blocks, [()] * 3, [0, 0, 0], 4, 2)) == Volume()
