"""Plans of the interleaved and the zero-bubble schedule, compared with enumeration of all pipelines and divisions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.topology import Channel, Topology
from colossal_hetero.planner.cost.chunked_price import price_chunks
from colossal_hetero.planner.cost.pass_order import Schedule
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.runnable import why_not_runnable
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver.replan import replan
from tests.support.planning import make_plans
from tests.support.random_examples import examples
from tests.unit.planner.solver.test_search import FAST_LINK, cluster, profile

BLOCKS = 6


def fits(plan: Plan) -> bool:
    return all(
        stage.memory_bytes <= stage.memory_available_bytes for replica in plan.replicas for stage in replica.stages
    )


def exhaustive(topology: Topology, model: ModelProfile, global_batch: int, schedule: Schedule) -> float:
    """The time of the best plan with 2 chunks per stage on one node, found by trying all."""
    best = np.inf
    for degree, size in itertools.product((1, 2), (1, 2)):
        kinds = [device.kind.name for device in topology.devices]
        groups = [tuple(range(rank, rank + degree)) for rank in range(0, len(kinds) - degree + 1, degree)]
        groups = [group for group in groups if len({kinds[rank] for rank in group}) == 1]
        for replicas, stages in itertools.product((1, 2), range(2, BLOCKS // 2 + 1)):
            # Devices of a kind are alike.
            distinct = {
                tuple(kinds[group[0]] for group in order): order
                for order in itertools.permutations(groups, replicas * stages)
            }
            for order, inner in itertools.product(
                distinct.values(), itertools.combinations(range(1, BLOCKS), 2 * stages - 1)
            ):
                ranks = [order[start : start + stages] for start in range(0, len(order), stages)]
                bounds = (0, *inner, BLOCKS)
                sizes = {"chunks": 2, "micro_batch": size, "global_batch": global_batch}
                try:
                    plan = price_chunks(topology, model, ranks, schedule=schedule, bounds=bounds, **sizes)
                except ValueError:
                    continue
                best = min(best, plan.iteration_seconds) if fits(plan) else best
    return float(best)


@examples(ordinary=8, thorough=200)
@given(
    fast=st.integers(1, 2),
    slow=st.integers(1, 2),
    ratio=st.sampled_from([1.0, 1.7, 4.0]),
    memory=st.sampled_from([(100, 100), (40, 60), (60, 30)]),
    global_batch=st.sampled_from([2, 4, 6]),
    link=st.sampled_from([FAST_LINK, Channel("PCIe", 2e9, 0.05)]),
    schedule=st.sampled_from(["interleaved", "zbv"]),
    seed=st.integers(0, 1000),
)
def test_best_of_all_plans_of_a_schedule(
    fast: int,
    slow: int,
    ratio: float,
    memory: tuple[int, int],
    global_batch: int,
    link: Channel,
    schedule: Schedule,
    seed: int,
) -> None:
    topology = cluster({"fast": fast, "slow": slow}, memory={"fast": memory[0], "slow": memory[1]}, inside=link)
    model = profile(BLOCKS, {"fast": 1.0, "slow": ratio}, seed=seed)
    best = exhaustive(topology, model, global_batch, schedule)
    if not np.isfinite(best) and schedule == "zbv":
        return  # another order of the passes may fit
    if not np.isfinite(best):
        with pytest.raises(ValueError, match=r"no plan of the schedule|memory"):
            make_plans(topology, model, global_batch=global_batch, schedules=(schedule,))
        return
    found = make_plans(topology, model, global_batch=global_batch, schedules=(schedule,))[0].plan
    assert fits(found) and why_not_runnable(found) is None
    # The enumeration orders the passes of zbv for the means of each division; other orders can be better.
    if schedule == "zbv":
        assert found.iteration_seconds <= best * 1.01
    else:
        assert found.iteration_seconds == pytest.approx(best, rel=1e-9)
    assert simulate_plan(found).seconds == pytest.approx(found.iteration_seconds, rel=1e-9)


def test_memory_of_chunks_by_hand() -> None:
    # Equal blocks of 6 bytes of state that keep 4 bytes per sample, 3 per stage in chunks of 2 and 1.
    model = profile(BLOCKS, {"fast": 1.0}, degrees=(1,))
    settings = dict(schedule="interleaved", chunks=2, micro_batch=1, bounds=(0, 2, 3, 4, 6))
    plan = price_chunks(cluster({"fast": 2}), model, [[[0], [1]]], global_batch=4, **settings)
    first, second = plan.replicas[0].stages
    # Stage 0 warms up with two forwards of each chunk. Then come a forward of chunk 0, a backward of chunk 1, and a
    # forward of chunk 0: it holds four of chunk 0 and one of chunk 1. Stage 1 warms up with two forwards of its first
    # chunk; then come a forward and a backward of its second one in turn.
    held = [stage.memory_bytes - stage.memory_overhead_bytes for stage in (first, second)]
    assert first.block_ranges == ((0, 2), (3, 4)) and held[0] == 3 * 6 + 4 * (4 * 2 + 1 * 1)
    assert second.block_ranges == ((2, 3), (4, 6)) and held[1] == 3 * 6 + 4 * (2 * 1 + 1 * 2)


def test_zero_bubble_is_faster_with_few_micro_batches() -> None:
    topology, model = cluster({"fast": 4}), profile(8, {"fast": 1.0}, degrees=(1,), micro_batches=(1,))
    plans = make_plans(topology, model, global_batch=4, schedules=("1f1b", "interleaved", "zbv"), stages=[4])
    by_schedule: dict[str, float] = {}
    for each in plans:
        by_schedule.setdefault(each.plan.schedule, each.plan.iteration_seconds)
    assert plans[0].plan.schedule == "zbv" and "the shortest simulated iteration" in plans[0].reason
    assert all("slower" in each.reason for each in plans[1:])
    (one,) = make_plans(topology, model, global_batch=4, stages=[4], keep=1)
    assert plans[0].plan.iteration_seconds < 0.8 * one.plan.iteration_seconds


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_plan_with_chunks_is_planned_again_for_a_slow_rank(schedule: Schedule) -> None:
    topology, model = cluster({"fast": 2}), profile(BLOCKS, {"fast": 1.0}, degrees=(1,))
    plan = make_plans(topology, model, global_batch=4, schedules=(schedule,), keep=1)[0].plan
    rank = plan.rank_order[0][0][0]
    result = replan(topology, model, plan, {rank: 3.0})
    # The present plan keeps its order of passes. Its times are those of the file, three times as long on that rank.
    assert result.present.seconds == pytest.approx(simulate_plan(plan, {rank: 3.0}).seconds)
    assert result.present.plan.order_seconds == plan.order_seconds
    assert result.changed and result.best.seconds < result.present.seconds
