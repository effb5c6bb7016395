"""Mode auto's plans against everything else that is allowed, and SEMI's Eq. 2, Eq. 3 and Algorithm 2."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from colossal_hetero.balance import BalancePlan, Costs, RankTimes, predicted_seconds
from colossal_hetero.balance.optimum import (
    RESERVE,
    divide_stragglers,
    migrating_stragglers,
    optimal_plan,
    resize_and_migrate,
    semi_plan,
)
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
    most = np.stack([limit, np.ones(ranks), np.ones(ranks)])[:, None]
    resize, migrate, receive = np.where(near, moved, anywhere * most)
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
@example(5.0, 0.0, Costs(resize_fixed=0.25, resize_per_share=0.1), 0.9)
def test_two_ranks_against_a_grid(slowdown: float, other: float, costs: Costs, cap: float) -> None:
    times = [RankTimes(1.0 + other, 1.0), RankTimes(slowdown + other, slowdown)]
    found = predicted_seconds(times, costs, optimal_plan(times, costs, cap))
    best = fine_grid(times, costs, cap)
    assert best * (1 + 1e-9) >= found >= best - 4e-3 * (slowdown + costs.receive_factor)


def group(*slowdowns: float, other: float = 0.0) -> list[RankTimes]:
    return [RankTimes(other + slowdown, slowdown) for slowdown in slowdowns]


def test_only_what_is_needed_is_pruned_and_stragglers_begin_at_the_margin() -> None:
    """Rank 2 cannot be pruned further than to 5 s, and migrating is too dear: rank 1 need not be faster than that."""
    plan = optimal_plan(group(1.0, 6.0, 10.0), Costs(migrate_fixed_seconds=100.0), 0.5)
    assert plan.resize == pytest.approx((0.0, 1 / 6, 0.5)) and plan.migrate == (0.0, 0.0, 0.0)
    plan = optimal_plan(group(1.0, 1.09, 3.0), FREE, 0.0, straggler_margin=0.1)
    assert plan.migrate[1] == 0.0 and plan.migrate[2] > 0
    assert optimal_plan(group(1.0, 1.09), FREE, 0.9, straggler_margin=0.1) == BalancePlan.idle(2)


FIG_11 = group(8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
"""The setting of the paper's Fig. 11: half of eight ranks straggle."""

share = st.floats(0, 0.3)


def test_one_straggler_by_hand() -> None:
    times = [RankTimes(2.0, 1.0), RankTimes(2.0, 2.0), RankTimes(5.0, 4.0)]
    # γ = 0.75; 0.1·4 = migrated·2/2, as the slower receiver takes 2 s
    assert resize_and_migrate(times, Costs(resize_fixed=0.1), 2, 0.9) == pytest.approx((0.35, 0.4))
    assert resize_and_migrate(times, FREE, 2, 0.5) == (0.5, 0.25)  # resizing is free, but not allowed
    plan = semi_plan(group(1.0, 1.0, 4.0), Costs(resize_fixed=0.1), 0.9)
    assert plan.resize == pytest.approx((0.0, 0.0, 0.0))
    assert plan.migrate == pytest.approx((0.0, 0.0, 0.75)) and plan.receive == pytest.approx((0.375, 0.375, 0.0))
    assert plan.note == "Eq. 2: the straggler migrates 75% of its work and prunes 0%"
    # Work that cannot be moved is allowed for.
    plan = semi_plan(group(4.0, 1.0, 1.0, other=1.0), Costs(resize_fixed=1.0), 0.9)
    assert plan.migrate[0] == pytest.approx(0.75)
    stuck = [RankTimes(4.0, 0.5), RankTimes(1.0, 0.5), RankTimes(1.0, 0.5)]
    assert semi_plan(stuck, Costs(resize_fixed=1.0), 0.0).migrate[0] == pytest.approx(0.999)


@pytest.mark.parametrize("fixed, x", [(0.0, 4), (0.3, 3), (2.0, 3), (2.5, 2), (4.0, 2), (6.0, 1), (8.0, 0)])
def test_eq3_counts_those_for_whom_migration_pays(fixed: float, x: int) -> None:
    """f(x) = 7 − 0.22, 5 − 0.43, 3 − 0.61, 1 − 0.74, each less the communication."""
    assert migrating_stragglers(FIG_11, Costs(migrate_fixed_seconds=fixed), [0, 1, 2, 3]) == x


several = st.lists(st.floats(1.2, 10), min_size=2, max_size=4)


@given(several, st.integers(1, 4), st.tuples(*[share] * 4), st.floats(0, 0.9))
def test_no_number_of_migrating_stragglers_is_faster(slowdowns, healthy, costs, cap):
    times = group(*slowdowns, *(1.0,) * healthy, other=0.2)
    model = Costs(*costs)
    slowest = sorted(range(len(slowdowns)), key=lambda rank: (-slowdowns[rank], rank))
    most = migrating_stragglers(times, model, slowest)
    found = predicted_seconds(times, model, semi_plan(times, model, cap))
    for count in range(most + 1):
        by_hand = divide_stragglers(times, slowest[:count], slowest, cap)
        assert found <= predicted_seconds(times, model, by_hand) * (1 + 1e-9)
