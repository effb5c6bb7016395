"""Properties of the deciding half of the balancer: ratios, plans, and their behaviour over time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_hetero.balance import BalanceConfig, Plan, RankTimes, decide, layer_ratios, resize_ratios
from colossal_hetero.balance.speed import EqualWork, SpeedWatch

RESIZE = BalanceConfig(mode="resize", reference="minimum")
times = st.floats(1e-4, 1e3)


@st.composite
def groups(draw: st.DrawFn) -> list[RankTimes]:
    works = draw(st.lists(times, min_size=2, max_size=8))
    return [RankTimes(work, work * draw(st.floats(0, 1))) for work in works]


@given(groups(), st.floats(0, 0.99), st.sampled_from(["minimum", "mean"]), st.data())
def test_ratios_stay_within_the_cap(group: list[RankTimes], cap: float, reference: str, data: st.DataObject) -> None:
    config = BalanceConfig(mode="resize", max_resize=cap, reference=reference)
    current = Plan(tuple(data.draw(st.floats(0, cap)) for _ in group))
    plan = decide(group, config, current)
    assert len(plan.resize) == len(group)
    assert all(0 <= ratio <= cap for ratio in plan.resize)
    fastest = min(range(len(group)), key=lambda rank: group[rank].work_seconds)
    assert plan.resize[fastest] == 0


@given(st.floats(1e-3, 10), st.integers(2, 8), st.data())
def test_nothing_is_pruned_when_nobody_is_slow(work: float, ranks: int, data: st.DataObject) -> None:
    noise = st.floats(1.0, 1.0 + RESIZE.margin)
    group = [RankTimes(work * data.draw(noise), work / 2) for _ in range(ranks)]
    assert decide(group, RESIZE, Plan.idle(ranks)) == Plan.idle(ranks)


@given(groups())
def test_off_never_prunes(group: list[RankTimes]) -> None:
    assert decide(group, BalanceConfig(), Plan((0.5,) * len(group))) == Plan.idle(len(group))


@given(st.floats(1.2, 9), st.floats(0.3, 1.0), st.integers(2, 8), st.integers(0, 7))
def test_eq1_brings_the_straggler_to_the_reference(slowdown: float, matmul_share: float, ranks: int, slow: int) -> None:
    slow %= ranks
    config = BalanceConfig(mode="resize", max_resize=0.99, resize_overhead=0.0)
    group = [RankTimes(1.0, matmul_share)] * ranks
    group[slow] = RankTimes(1.0 - matmul_share + slowdown * matmul_share, slowdown * matmul_share)
    ratio = decide(group, config, Plan.idle(ranks)).resize[slow]
    after = group[slow].work_seconds - ratio * group[slow].matmul_seconds
    if group[slow].work_seconds > 1 + config.margin:
        assert after == pytest.approx(1.0)
    else:
        assert ratio == 0


def test_eq1_by_hand() -> None:
    assert resize_ratios([1.0, 4.0], [1.0, 4.0], 1.0, 0.9).tolist() == [0.0, 0.75]
    assert resize_ratios([1.0, 4.0], [1.0, 4.0], 2.5, 0.9).tolist() == [0.0, 0.375]  # the mean
    assert resize_ratios([1.0, 4.0], [0.5, 2.0], 1.0, 0.9).tolist() == [0.0, 0.9]  # capped
    assert resize_ratios([1.0, 4.0], [0.5, 0.0], 1.0, 0.9).tolist() == [0.0, 0.0]  # nothing to prune


def test_mean_reference_prunes_less() -> None:
    group = [RankTimes(1.0, 1.0), RankTimes(4.0, 4.0)]
    mean = decide(group, BalanceConfig(mode="resize", reference="mean", resize_overhead=0.0), Plan.idle(2))
    assert mean.resize == (0.0, 0.375)


def test_what_resizing_costs_is_pruned_as_well() -> None:
    group = [RankTimes(1.0, 1.0), RankTimes(4.0, 4.0)]
    ratio = decide(group, BalanceConfig(mode="resize", resize_overhead=0.05), Plan.idle(2)).resize[1]
    assert (1 - ratio + 0.05) * 4.0 == pytest.approx(1.0)


def test_fixed_ratio_goes_to_slow_ranks_only() -> None:
    group = [RankTimes(1.0, 1.0), RankTimes(4.0, 4.0), RankTimes(1.05, 1.0)]
    assert decide(group, BalanceConfig(mode="resize", resize_ratio=0.5), Plan.idle(3)).resize == (0.0, 0.5, 0.0)


@pytest.mark.parametrize("bad", [float("nan"), -1.0, 0.0, float("inf")])
def test_impossible_times_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="times must be finite"):
        RankTimes(bad, 0.1)
    if bad != 0.0:
        with pytest.raises(ValueError, match="times must be finite"):
            RankTimes(1.0, bad)


# Ratios by layer -------------------------------------------------------------------------------------------------


@given(
    st.floats(0, 0.9),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 100)), min_size=1, max_size=12),
    st.floats(0, 1),
)
def test_budgeted_layer_ratios_keep_the_budget(ratio: float, layers: list[tuple[float, float]], decay: float) -> None:
    config = BalanceConfig(mode="resize", decay=decay)
    shares, costs = zip(*layers, strict=True)
    ratios = layer_ratios(ratio, shares, costs, config)
    assert (ratios >= 0).all() and (ratios <= config.max_resize + 1e-9).all()
    assert float(ratios @ np.array(costs)) == pytest.approx(ratio * sum(costs), rel=1e-6, abs=1e-9)


@given(st.floats(0.01, 0.9), st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_printed_layer_ratios_are_algorithm_1(ratio: float, shares: list[float]) -> None:
    config = BalanceConfig(mode="resize", ratio_form="printed")
    ratios = layer_ratios(ratio, shares, [1.0] * len(shares), config)
    assert ratios == pytest.approx([min(max(share, 0.8 * ratio), config.max_resize) for share in shares])


@pytest.mark.parametrize("form", ["printed", "budgeted"])
def test_no_layer_is_pruned_at_ratio_zero(form: str) -> None:
    config = BalanceConfig(mode="resize", ratio_form=form)
    assert layer_ratios(0.0, [1.0, 0.5], [1.0, 1.0], config).tolist() == [0.0, 0.0]


# Over time -------------------------------------------------------------------------------------------------------


class SimulatedGroup:
    """Ranks with true speeds, noise and a resizing overhead, run through the same state machines as real ones."""

    def __init__(self, ranks: int, config: BalanceConfig, seed: int, noise: float, overhead: float) -> None:
        self.config, self.noise, self.overhead = config, noise, overhead
        self.random = np.random.default_rng(seed)
        self.equal_work = [EqualWork(config.patience) for _ in range(ranks)]
        self.watches = [SpeedWatch(config) for _ in range(ranks)]
        self.plan = Plan.idle(ranks)
        self.flag = False
        self.exchanges = 0

    def iterate(self, slowdowns: list[float]) -> None:
        moved = []
        for rank, slowdown in enumerate(slowdowns):
            ratio = self.plan.resize[rank]
            share = 1 - ratio + (self.overhead if ratio else 0)
            matmul = 0.7 * slowdown * share * (1 + self.random.uniform(-self.noise, self.noise))
            other = 0.3 * (1 + self.random.uniform(-self.noise, self.noise))
            moved.append(self.watches[rank].observe(self.equal_work[rank].normalise(other + matmul, matmul, ratio)))
        exchanged = self.flag and all(watch.ready for watch in self.watches)
        if exchanged:
            gathered = [watch.current() for watch in self.watches]
            for watch in self.watches:
                watch.exchanged()
            self.plan = decide(gathered, self.config, self.plan)
            self.exchanges += 1
        self.flag = any(moved) and not exchanged


SIMULATED = settings(max_examples=150, deadline=None)


@SIMULATED
@given(st.integers(0, 10**6), st.integers(2, 8), st.floats(0, 0.1))
def test_noise_alone_never_prunes(seed: int, ranks: int, overhead: float) -> None:
    group = SimulatedGroup(ranks, RESIZE, seed, noise=0.05, overhead=overhead)
    for _ in range(60):
        group.iterate([1.0] * ranks)
        assert group.plan == Plan.idle(ranks)


@SIMULATED
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(0, 7), st.floats(1.5, 8), st.floats(0, 0.1))
def test_a_constant_straggler_settles_and_stays_settled(
    seed: int, ranks: int, slow: int, slowdown: float, overhead: float
) -> None:
    group = SimulatedGroup(ranks, RESIZE, seed, noise=0.05, overhead=overhead)
    slowdowns = [slowdown if rank == slow % ranks else 1.0 for rank in range(ranks)]
    for _ in range(10):
        group.iterate([1.0] * ranks)
    plans = []
    for _ in range(60):
        group.iterate(slowdowns)
        plans.append(group.plan)
    assert group.plan.resize[slow % ranks] > 0
    assert all(plan == plans[4] for plan in plans[4:]), f"the plan moved after five iterations: {plans}"
    assert sum(ratio > 0 for ratio in group.plan.resize) == 1


@SIMULATED
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(0, 7), st.floats(1.5, 8), st.floats(0, 0.1))
def test_the_plan_recovers_when_the_straggler_goes_away(
    seed: int, ranks: int, slow: int, slowdown: float, overhead: float
) -> None:
    group = SimulatedGroup(ranks, RESIZE, seed, noise=0.05, overhead=overhead)
    for _ in range(20):
        group.iterate([slowdown if rank == slow % ranks else 1.0 for rank in range(ranks)])
    assert group.plan != Plan.idle(ranks)
    for iteration in range(40):
        group.iterate([1.0] * ranks)
        if iteration >= 4:
            assert group.plan == Plan.idle(ranks), iteration


def test_nothing_is_exchanged_while_nothing_moves() -> None:
    group = SimulatedGroup(4, RESIZE, seed=0, noise=0.02, overhead=0.05)
    for _ in range(200):
        group.iterate([1.0] * 4)
    assert group.exchanges == 1  # the first, when there was nothing to compare with


def test_slow_drift_is_noticed() -> None:
    watch = SpeedWatch(RESIZE)
    seconds, flags = 1.0, []
    for _ in range(100):
        raised = watch.observe(RankTimes(seconds, seconds / 2))
        if raised:
            watch.exchanged()
        flags.append(raised)
        seconds *= 1.004
    assert 3 <= sum(flags) <= 6  # once to begin with and then about every 10 %


def test_one_odd_iteration_is_not_believed() -> None:
    watch = SpeedWatch(RESIZE)
    for _ in range(4):
        if watch.observe(RankTimes(1.0, 0.5)):
            watch.exchanged()
    assert not watch.observe(RankTimes(9.0, 4.0))
    assert not watch.observe(RankTimes(1.0, 0.5))


def test_equal_work_scales_back_by_the_work_done() -> None:
    equal = EqualWork(2)
    assert equal.normalise(5.0, 4.0, 0.0) == RankTimes(5.0, 4.0)
    scaled = equal.normalise(2.2, 1.2, 0.75)  # a quarter of 4 s and 0.2 s of overhead
    assert scaled.work_seconds == pytest.approx(5.0) and scaled.matmul_seconds == pytest.approx(4.0)
    equal.normalise(2.2, 1.2, 0.75)
    recovered = equal.normalise(1.3, 0.3, 0.75)
    assert recovered.matmul_seconds == pytest.approx(1.0)
