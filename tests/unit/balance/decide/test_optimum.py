"""Mode auto's plans against everything else that is allowed, and against the bounds known in formula."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_hetero.balance import BalancePlan, Costs, RankTimes, predicted_seconds
from colossal_hetero.balance.optimum import RESERVE, optimal_plan
from colossal_hetero.balance.report import lossless_seconds
from tests.support.random_examples import examples

FREE = Costs()
cost = st.one_of(st.just(0.0), st.floats(0.01, 0.5))
all_costs = st.builds(
    Costs,
    resize_fixed=cost,
    resize_per_share=cost,
    migrate_fixed_seconds=cost,
    migrate_seconds_per_share=cost,
    receive_factor=st.floats(0.7, 1.5),
    communication_scale=st.floats(0.25, 4),
)
slowdowns = st.one_of(st.just(1.0), st.floats(1, 10), st.floats(10, 2000))
caps = st.one_of(st.just(0.0), st.floats(0.01, 0.99))


@st.composite
def groups(draw: st.DrawFn, most_ranks: int = 5) -> list[RankTimes]:
    matmul = draw(st.lists(slowdowns, min_size=2, max_size=most_ranks))
    return [RankTimes(seconds + other, seconds) for seconds in matmul for other in [draw(st.floats(0, 0.5))]]


def pruning_limits(times: list[RankTimes], costs: Costs, cap: float) -> np.ndarray:
    """The most that each rank may prune: not below the fastest rank's time."""
    work = np.array([time.work_seconds for time in times])
    matmul = np.array([time.matmul_seconds for time in times])
    gain = 1.0 - costs.resize_per_share
    to_least = ((work - work.min()) / matmul + costs.resize_fixed) / gain
    return np.where(work > work.min(), np.minimum(to_least, min(cap, 1.0 - RESERVE)), 0.0)


def random_seconds(
    times: list[RankTimes], costs: Costs, cap: float, start: BalancePlan, random: np.random.Generator, count: int
) -> np.ndarray:
    """Predicted seconds of ``count`` allowed plans, many of them near ``start``."""
    ranks = len(times)
    work = np.array([time.work_seconds for time in times])
    matmul = np.array([time.matmul_seconds for time in times])
    limit = pruning_limits(times, costs, cap)
    near = random.random((count, 1)) < 0.5
    step = 10.0 ** random.uniform(-6, -0.5, (count, 1)) * random.normal(size=(3, count, ranks))
    touched = random.random((3, count, ranks)) < 0.5
    shares = np.array([start.resize, start.migrate, start.receive])[:, None, :]
    moved = np.maximum(shares + step * touched * (shares + 0.1 * (random.random((3, count, ranks)) < 0.2)), 0.0)
    anywhere = random.random((3, count, ranks)) * (random.random((3, count, ranks)) < 0.5)
    resize, migrate, receive = np.where(
        near, moved, anywhere * np.stack([limit, np.ones(ranks), np.ones(ranks)])[:, None]
    )
    resize = np.minimum(resize, limit)
    migrate = np.minimum(np.where(work > work.min(), migrate, 0.0), 1.0 - RESERVE - resize)
    receive = np.where(migrate > 0, 0.0, receive)
    total, taken = migrate.sum(1, keepdims=True), receive.sum(1, keepdims=True)
    possible = (taken > 0) | (total == 0)
    receive = receive * np.divide(total, taken, out=np.zeros_like(total), where=taken > 0)
    own = work - (resize + migrate) * matmul + costs.receive_factor * matmul * receive
    own += np.where(resize > 0, costs.resize_fixed * matmul, 0.0) + costs.resize_per_share * resize * matmul
    total = total[:, 0]
    sending = costs.communication_scale * (costs.migrate_fixed_seconds + costs.migrate_seconds_per_share * total)
    return np.where(possible[:, 0], own.max(1) + np.where(total > 0, sending, 0.0), np.inf)


@examples(ordinary=50, thorough=300)
@given(groups(), all_costs, caps, st.integers(0, 2**32 - 1))
def test_no_allowed_plan_is_better(times: list[RankTimes], costs: Costs, cap: float, seed: int) -> None:
    plan = optimal_plan(times, costs, cap)
    found = predicted_seconds(times, costs, plan)
    others = random_seconds(times, costs, cap, plan, np.random.default_rng(seed), 3000)
    assert found <= others.min() * (1 + 1e-9)
    assert found <= predicted_seconds(times, costs, BalancePlan.idle(len(times))) * (1 + 1e-9)


@settings(deadline=None)
@given(groups(8), all_costs, caps)
def test_plans_keep_to_the_limits(times: list[RankTimes], costs: Costs, cap: float) -> None:
    plan = optimal_plan(times, costs, cap)
    limit = pruning_limits(times, costs, cap)
    for rank in range(len(times)):
        assert plan.resize[rank] <= limit[rank] * (1 + 1e-9)
        assert plan.resize[rank] + plan.migrate[rank] <= 1.0 - RESERVE + 1e-9
        assert plan.load(rank) > 0
        assert plan.migrate[rank] == 0 or plan.receive[rank] == 0


def fine_grid(times: list[RankTimes], costs: Costs, cap: float) -> float:
    """The best of all plans of two ranks, the second of them slow, on a grid."""
    gamma, mu = (axis.ravel() for axis in np.meshgrid(np.linspace(0, 1, 401), np.linspace(0, 1 - RESERVE, 1001)))
    allowed = (gamma <= pruning_limits(times, costs, cap)[1]) & (gamma + mu <= 1.0 - RESERVE)
    gamma, mu = gamma[allowed], mu[allowed]
    fast, slow = times
    receiver = fast.work_seconds + costs.receive_factor * mu * fast.matmul_seconds
    omega = np.where(gamma > 0, costs.resize_fixed + costs.resize_per_share * gamma, 0.0)
    sender = slow.work_seconds + (omega - gamma - mu) * slow.matmul_seconds
    sending = costs.communication_scale * (costs.migrate_fixed_seconds + costs.migrate_seconds_per_share * mu)
    return float((np.maximum(receiver, sender) + np.where(mu > 0, sending, 0.0)).min())


@examples(ordinary=15, thorough=30)
@given(st.floats(1.01, 20), st.floats(0, 0.5), all_costs, caps)
def test_two_ranks_against_a_grid(slowdown: float, other: float, costs: Costs, cap: float) -> None:
    times = [RankTimes(1.0 + other, 1.0), RankTimes(slowdown + other, slowdown)]
    found = predicted_seconds(times, costs, optimal_plan(times, costs, cap))
    best = fine_grid(times, costs, cap)
    assert best * (1 + 1e-9) >= found >= best - 4e-3 * (slowdown + costs.receive_factor)


@given(groups(8))
def test_lossless_plans_without_costs_reach_the_reports_bound(times: list[RankTimes]) -> None:
    plan = optimal_plan(times, FREE, 0.0)
    other = [time.work_seconds - time.matmul_seconds for time in times]
    bound = lossless_seconds(other, [time.matmul_seconds for time in times])
    found = predicted_seconds(times, FREE, plan)
    # The bound lets a rank give everything away, and lets fast ranks give.
    reserve = max(o + RESERVE * time.matmul_seconds for o, time in zip(other, times, strict=True))
    assert bound <= found * (1 + 1e-9) and found == pytest.approx(max(bound, reserve), rel=1e-3)


def test_only_what_is_needed_is_pruned() -> None:
    """Rank 2 cannot be pruned further than to 5 s, and migrating is too dear: rank 1 need not be faster than that."""
    times = [RankTimes(1.0, 1.0), RankTimes(6.0, 6.0), RankTimes(10.0, 10.0)]
    plan = optimal_plan(times, Costs(migrate_fixed_seconds=100.0), 0.5)
    assert plan.resize == pytest.approx((0.0, 1 / 6, 0.5)) and plan.migrate == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "times, costs, note",
    [
        ([RankTimes(1.0, 1.0)] * 2, FREE, "nothing migrated: no rank is slow"),
        ([RankTimes(1.0, 1.0), RankTimes(4.0, 4.0)], FREE, "migration pays: 1.6 s with, 4 s without"),
        (
            [RankTimes(0.1, 0.1, 0.012), RankTimes(0.12, 0.12, 0.05)],
            Costs(migrate_fixed_seconds=0.1),
            "migration cannot pay: 0.221 s with, 0.132 s without",
        ),
        ([RankTimes(1.0, 0.0), RankTimes(4.0, 0.0)], FREE, "nothing migrated: no rank is slow"),
    ],
)
def test_notes_say_why(times: list[RankTimes], costs: Costs, note: str) -> None:
    assert optimal_plan(times, costs, 0.0).note == note


def test_stragglers_begin_at_the_margin() -> None:
    times = [RankTimes(1.0, 1.0), RankTimes(1.09, 1.09), RankTimes(3.0, 3.0)]
    plan = optimal_plan(times, FREE, 0.0, straggler_margin=0.1)
    assert plan.migrate[1] == 0.0 and plan.migrate[2] > 0
    assert optimal_plan(times[:2], FREE, 0.9, straggler_margin=0.1) == BalancePlan.idle(2)
