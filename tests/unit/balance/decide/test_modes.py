"""Properties of deciding: ratios, plans, and when a plan is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import (
    BalanceConfig,
    BalancePlan,
    Costs,
    Pruning,
    RankTimes,
    layer_ratios,
    predicted_seconds,
    resize_ratios,
)
from colossal_hetero.balance.modes import decide

FREE = Costs()
RESIZE = BalanceConfig(mode="resize")
MODES = ("off", "resize", "migrate", "semi", "auto")
MIGRATING = ("migrate", "semi", "auto")
times = st.floats(1e-4, 1e3)


@st.composite
def groups(draw: st.DrawFn) -> list[RankTimes]:
    works = draw(st.lists(times, min_size=2, max_size=8))
    return [RankTimes(work, work * draw(st.floats(0, 1))) for work in works]


@given(st.floats(1e-3, 10), st.integers(2, 8), st.sampled_from(MODES), st.data())
def test_nothing_is_done_when_no_rank_is_slow(work: float, ranks: int, mode: str, data: st.DataObject) -> None:
    noise = st.floats(1.0, 1.0 + RESIZE.threshold)
    group = [RankTimes(work * data.draw(noise), work / 2) for _ in range(ranks)]
    config = BalanceConfig(mode=mode, max_resize=data.draw(st.sampled_from([None, 0.9])))
    current = BalancePlan((0.1, *(0.0,) * (ranks - 1)), (0.3, *(0.0,) * (ranks - 1)), (0.0, 0.3, *(0.0,) * (ranks - 2)))
    for before in (BalancePlan.idle(ranks), current):
        assert decide(group, FREE, config, before) == BalancePlan.idle(ranks)


@given(st.floats(1.2, 9), st.floats(0.3, 1.0), st.integers(2, 8), st.integers(0, 7))
def test_eq1_brings_the_straggler_to_the_reference(slowdown: float, matmul_share: float, ranks: int, slow: int) -> None:
    slow %= ranks
    config = BalanceConfig(mode="resize", max_resize=0.99, pruning=Pruning(resize_overhead=0.0))
    group = [RankTimes(1.0, matmul_share)] * ranks
    group[slow] = RankTimes(1.0 - matmul_share + slowdown * matmul_share, slowdown * matmul_share)
    ratio = decide(group, FREE, config, BalancePlan.idle(ranks)).resize[slow]
    after = group[slow].work_seconds - ratio * group[slow].matmul_seconds
    if group[slow].work_seconds > 1 + config.threshold:
        assert after == pytest.approx(1.0)
    else:
        assert ratio == 0


def test_what_resizing_costs_is_pruned_as_well() -> None:
    group = [RankTimes(1.0, 1.0), RankTimes(4.0, 4.0)]
    config = BalanceConfig(mode="resize", pruning=Pruning(resize_overhead=0.05))
    ratio = decide(group, FREE, config, BalancePlan.idle(2)).resize[1]
    assert (1 - ratio + 0.05) * 4.0 == pytest.approx(1.0)


@pytest.mark.parametrize("every_rank, expected", [(False, (0.0, 0.5, 0.0)), (True, (0.5, 0.5, 0.5))])
def test_fixed_ratio_goes_to_slow_ranks_or_to_all(every_rank: bool, expected: tuple[float, ...]) -> None:
    group = [RankTimes(1.0, 1.0), RankTimes(4.0, 4.0), RankTimes(1.05, 1.0)]
    config = BalanceConfig(mode="resize", pruning=Pruning(resize_ratio=0.5, every_rank=every_rank))
    plan = decide(group, FREE, config, BalancePlan.idle(3))
    assert plan.resize == expected
    assert decide([group[0]] * 3, FREE, config, plan).resize == ((0.5,) * 3 if every_rank else (0.0,) * 3)


@pytest.mark.parametrize("bad", [float("nan"), -1.0, 0.0, float("inf")])
def test_impossible_times_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="times must be finite"):
        RankTimes(bad, 0.1)
    if bad != 0.0:
        with pytest.raises(ValueError, match="times must be finite"):
            RankTimes(1.0, bad)


# Plans that migrate ----------------------------------------------------------------------------------------------


def without_pruning(mode: str) -> BalanceConfig:
    return BalanceConfig(mode=mode, max_resize=0.0 if mode == "semi" else None)


def straggler(slowdown: float, ranks: int = 2, other: float = 0.0) -> list[RankTimes]:
    """Rank 0 is slow."""
    return [RankTimes(other + chi, chi) for chi in (slowdown, *(1.0,) * (ranks - 1))]


@given(groups(), st.sampled_from(MIGRATING), st.floats(0, 0.9))
def test_plans_are_possible_and_do_not_harm(group: list[RankTimes], mode: str, cap: float) -> None:
    limit = 0.0 if mode == "migrate" else cap
    config = BalanceConfig(mode=mode, max_resize=cap if limit else None)
    plan = decide(group, FREE, config, BalancePlan.idle(len(group)))
    assert all(0 <= ratio <= limit + 1e-6 for ratio in plan.resize)
    assert sum(plan.migrate) == sum(plan.receive)
    assert all(plan.load(rank) > 0 for rank in range(len(group)))
    assert predicted_seconds(group, FREE, plan) <= predicted_seconds(group, FREE, BalancePlan.idle(len(group)))


@pytest.mark.parametrize("mode", ["semi", "auto"])
def test_rounding_to_steps_does_not_exceed_the_cap(mode: str) -> None:
    """0.3 is no multiple of the steps; the next one is above it. Each layer's ratio must stay below the cap."""
    group = [RankTimes(1.0, 0.9), RankTimes(4.0, 3.9), RankTimes(4.0, 3.9)]
    rules = Pruning(priority="priority-diff")
    config = BalanceConfig(mode=mode, max_resize=0.3, pruning=rules)  # type: ignore[arg-type]
    ratio = max(decide(group, Costs(migrate_fixed_seconds=0.5), config, BalancePlan.idle(3)).resize)
    assert 0.29999 < ratio <= 0.3
    assert layer_ratios(ratio, [0.5, 0.1], [1.0, 1.0], rules, 0.3) == pytest.approx([0.3, 0.3], rel=1e-5)


def test_auto_migrates_only_if_that_pays_and_migrate_does_anyway() -> None:
    dear = Costs(migrate_fixed_seconds=1.0)
    plan = decide(straggler(2.0), dear, BalanceConfig(mode="auto"), BalancePlan.idle(2))
    assert plan == BalancePlan.idle(2)
    assert plan.note == "migration cannot pay: 2.33 s with, 2 s without"
    assert decide(straggler(2.0), dear, BalanceConfig(mode="migrate"), BalancePlan.idle(2)).migrate[0] > 0
    assert decide(straggler(8.0), dear, BalanceConfig(mode="auto"), BalancePlan.idle(2)).migrate[0] > 0


@pytest.mark.parametrize("mode", MIGRATING)
def test_a_small_change_keeps_the_plan_and_a_large_one_does_not(mode: str) -> None:
    config = without_pruning(mode)
    plan = decide(straggler(4.0), FREE, config, BalancePlan.idle(2))
    assert plan != BalancePlan.idle(2)
    for slowdown in (3.7, 4.0, 4.2):
        assert decide(straggler(slowdown), FREE, config, plan) == plan
    for slowdown in (2.0, 16.0):
        changed = decide(straggler(slowdown), FREE, config, plan)
        assert changed == decide(straggler(slowdown), FREE, config, BalancePlan.idle(2)) != plan


@pytest.mark.parametrize("mode", MIGRATING)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_plan_goes_with_its_straggler(mode: str, ranks: int) -> None:
    """Also where many receivers hardly feel it."""
    config = without_pruning(mode)
    plan = decide(straggler(1.5, ranks), FREE, config, BalancePlan.idle(ranks))
    assert plan != BalancePlan.idle(ranks)
    assert decide(straggler(1.05, ranks), FREE, config, plan) == BalancePlan.idle(ranks)
    elsewhere = straggler(1.5, ranks)[::-1]
    assert decide(elsewhere, FREE, config, plan) == decide(elsewhere, FREE, config, BalancePlan.idle(ranks))


def test_a_plan_says_why_and_one_that_is_kept_still_does() -> None:
    config = BalanceConfig(mode="auto")
    plan = decide(straggler(4.0), FREE, config, BalancePlan.idle(2))
    assert plan.note.startswith("migration pays: 1.6 s with, 4 s without")
    assert decide(straggler(4.2), FREE, config, plan).note == plan.note


def test_a_gain_that_is_too_small_is_said() -> None:
    config = BalanceConfig(mode="auto", threshold=0.2)
    plan = decide(straggler(1.21, 2), FREE, config, BalancePlan.idle(2))
    assert plan == BalancePlan.idle(2)
    assert plan.note.startswith("balancing would gain too little: 1.1 s with, 1.21 s without")


@given(groups(), st.sampled_from(MIGRATING))
def test_rounding_elsewhere_decides_the_same(group: list[RankTimes], mode: str) -> None:
    """Processors differ in the last bits of sums; a plan must not."""
    config = BalanceConfig(mode=mode)
    plan = decide(group, FREE, config, BalancePlan.idle(len(group)))
    for shares in (plan.resize, plan.migrate, plan.receive):
        assert all((share * 2**20).is_integer() for share in shares)


# The plan itself -------------------------------------------------------------------------------------------------


def test_digests_tell_plans_apart() -> None:
    plan = BalancePlan((0.0, 0.25), (0.5, 0.0), (0.0, 0.5), "why")
    assert plan.digest == BalancePlan((-0.0, 0.25), (0.5, 0.0), (0.0, 0.5)).digest == 1949877861
    others = [
        BalancePlan.idle(2),
        BalancePlan.idle(3),
        BalancePlan.resizing((0.0, 0.25)),
        BalancePlan((0.0, 0.25), (0.0, 0.5), (0.5, 0.0)),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 5
    assert all(0 <= other.digest < 2**31 for other in others)


@pytest.mark.parametrize(
    "resize, migrate, receive, words",
    [
        ((0.0,), (0.0, 0.0), (0.0, 0.0), "1, 2 and 2 ranks"),
        ((-0.1, 0.0), (0.0, 0.0), (0.0, 0.0), "resize=-0.1 of rank 0"),
        ((0.0, 0.0), (0.0, 0.0), (0.0, float("nan")), "receive=nan of rank 1"),
        ((0.6, 0.0), (0.5, 0.0), (0.0, 0.5), "the sum must not exceed 1"),
        ((0.0, 0.0), (0.5, 0.0), (0.25, 0.25), "can only do one of the two"),
        ((0.0, 0.0), (0.5, 0.0), (0.0, 0.25), "give away 0.5 and receive 0.25"),
    ],
)
def test_impossible_plans_are_refused(
    resize: tuple[float, ...], migrate: tuple[float, ...], receive: tuple[float, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        BalancePlan(resize, migrate, receive)


# Ratios by layer -------------------------------------------------------------------------------------------------


@given(
    st.floats(0, 0.9),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 100)), min_size=1, max_size=12),
    st.floats(0, 1),
)
def test_budgeted_layer_ratios_keep_the_budget(ratio: float, layers: list[tuple[float, float]], decay: float) -> None:
    rules = Pruning(priority="priority-diff", decay=decay)
    shares, costs = zip(*layers, strict=True)
    ratios = layer_ratios(ratio, shares, costs, rules, 0.9)
    assert (ratios >= 0).all() and (ratios <= 0.9 + 1e-9).all()
    assert float(ratios @ np.array(costs)) == pytest.approx(ratio * sum(costs), rel=1e-6, abs=1e-9)


@given(st.floats(0.01, 0.9), st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_printed_layer_ratios_are_algorithm_1(ratio: float, shares: list[float]) -> None:
    rules = Pruning(priority="priority-diff", ratio_form="printed")
    ratios = layer_ratios(ratio, shares, [1.0] * len(shares), rules, 0.9)
    assert ratios == pytest.approx([min(max(share, 0.8 * ratio), 0.9) for share in shares])


@pytest.mark.parametrize("form", ["printed", "budgeted"])
def test_no_layer_is_pruned_at_ratio_zero(form: str) -> None:
    rules = Pruning(priority="priority-diff", ratio_form=form)
    assert layer_ratios(0.0, [1.0, 0.5], [1.0, 1.0], rules, 0.9).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", MIGRATING)
def test_receivers_take_no_more_than_they_have_memory_for(mode: str) -> None:
    group = straggler(4.0, 3)
    plan = decide(group, FREE, without_pruning(mode), BalancePlan.idle(3))
    limited = decide(group, FREE, without_pruning(mode), BalancePlan.idle(3), max_received=0.1)
    assert max(plan.receive) > 0.1 and max(limited.receive) == pytest.approx(0.1)
    assert sum(limited.migrate) == pytest.approx(sum(limited.receive))


def test_eq1_by_hand() -> None:
    assert resize_ratios([1.0, 4.0], [1.0, 4.0], 1.0, 0.9).tolist() == [0.0, 0.75]
    assert resize_ratios([1.0, 4.0], [1.0, 4.0], 2.5, 0.9).tolist() == [0.0, 0.375]  # the mean
    assert resize_ratios([1.0, 4.0], [0.5, 2.0], 1.0, 0.9).tolist() == [0.0, 0.9]  # capped
    assert resize_ratios([1.0, 4.0], [0.5, 0.0], 1.0, 0.9).tolist() == [0.0, 0.0]  # nothing to prune
