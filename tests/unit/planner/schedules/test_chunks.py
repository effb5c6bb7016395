"""Stages of several chunks: passes, simulation, memory, divisions and plans, against formulas and enumeration."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.topology import Channel, Topology
from colossal_hetero.planner.cost.chunked_price import ChunkedPipeline, divide_blocks, most_in_flight, price_chunks
from colossal_hetero.planner.cost.pass_order import (
    GraphSeconds,
    Pass,
    PassOrder,
    Schedule,
    interleaved,
    one_forward_one_backward,
    zero_bubble_v,
)
from colossal_hetero.planner.cost.runnable import why_not_runnable
from colossal_hetero.planner.cost.simulate import ChunkTimes, Timeline, simulate_passes, simulate_plan
from colossal_hetero.planner.profile.layer_costs import LayerCosts
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver.replan import replan
from colossal_hetero.planner.stages.pipeline import Slot
from tests.support.planning import make_plans
from tests.support.random_examples import examples
from tests.unit.planner.solver.test_search import FAST_LINK, cluster, profile

UNIT = GraphSeconds(forward=1.0, input_gradient=1.0, weight_gradient=1.0, transfer=0.0)


def equal_chunks(order: PassOrder, forward: float, backward: float) -> ChunkTimes:
    ones, zeros = np.ones(order.chunks), np.zeros(order.chunks)
    return ChunkTimes(forward * ones, backward * ones, zeros, zeros, np.zeros(order.stages))


# Times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages, chunks, micro_batches", [(2, 2, 4), (3, 2, 6), (4, 3, 8), (4, 2, 4)])
def test_equal_chunks_have_the_known_bubble_of_the_interleaved_schedule(
    stages: int, chunks: int, micro_batches: int
) -> None:
    # Narayanan et al. 2021, section 2.2.2: the bubble is (p − 1)(f + b) with the times of one chunk.
    order = interleaved(stages, chunks, micro_batches)
    ends = simulate_passes(order, equal_chunks(order, 1.0, 2.0))
    assert ends.max() == pytest.approx(3.0 * (micro_batches * chunks + stages - 1))


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_equal_passes_of_the_zero_bubble_schedule_wait_only_at_the_ends(stages: int) -> None:
    micro_batches = 2 * stages
    order = zero_bubble_v(stages, micro_batches, UNIT)
    ends = simulate_passes(order, equal_chunks(order, 1.0, 2.0))
    # Every stage works for 6 seconds per micro-batch; the last stage gets its first input after p − 1.
    assert ends.max() == pytest.approx(6.0 * micro_batches + stages - 1)
    timeline = Timeline(order, equal_chunks(order, 1.0, 2.0))
    assert sum(event.kind == "weight" for event in timeline.events[0]) == 2 * micro_batches
    assert {event.chunk for event in timeline.events[0]} == {0, 1}


def test_messages_in_one_direction_go_one_after_the_other() -> None:
    # Two forwards of 1 s each, and messages of 3 s: the second message starts when the first is there.
    order = PassOrder(
        (0, 1), ((Pass("forward", 0, 0), Pass("forward", 0, 1)), tuple(Pass("forward", 1, n) for n in (0, 1)))
    )
    times = ChunkTimes(np.ones(2), np.ones(2), np.zeros(2), np.array([3.0, 0.0]), np.zeros(2))
    assert simulate_passes(order, times).tolist() == [2.0, 1.0 + 3.0 + 3.0 + 1.0]
    # With NCCL the second message leaves only after the first forward of the receiver, if that asks for it then.
    late = replace(order, receives_late=True)
    assert simulate_passes(late, times).tolist() == [2.0, 1.0 + 3.0 + 1.0 + 3.0 + 1.0]
    assert simulate_passes(late, times, "overlapped").tolist() == [2.0, 8.0]


@pytest.mark.parametrize("make", [lambda: interleaved(3, 2, 4), lambda: zero_bubble_v(3, 4, UNIT)])
def test_micro_batches_that_colossalai_does_not_run_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"4 micro-batches for 3 stages: .* multiple of the number of stages"):
        make()


# Memory ----------------------------------------------------------------------------------------------------------


def test_activations_that_are_held_at_the_same_time() -> None:
    for stages, micro_batches in itertools.product((1, 2, 4), (1, 3, 8)):
        held = most_in_flight(one_forward_one_backward(stages, micro_batches))
        assert [rows.tolist() for rows in held] == [
            [[min(micro_batches, stages - s) if chunk == s else 0 for chunk in range(stages)]] for s in range(stages)
        ]
    for stages, chunks, multiple in itertools.product((2, 3, 4), (2, 3), (1, 2, 4)):
        total = stages * multiple * chunks
        for stage, rows in enumerate(most_in_flight(interleaved(stages, chunks, stages * multiple))):
            # The warm-up's forwards, and one more.
            assert rows.sum(axis=1).max() == min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, total)
    for stages in (2, 3, 4):
        held = most_in_flight(zero_bubble_v(stages, 4 * stages, UNIT))
        # Colossal-AI's limit: as many as the first stage holds under 1F1B, in halves.
        assert max(rows.sum(axis=1).max() for rows in held) <= 2 * stages


# Division --------------------------------------------------------------------------------------------------------


def costs(draw: st.DrawFn, blocks: int) -> LayerCosts:
    speed = draw(st.floats(0.3, 3.0))
    scale = np.array(draw(st.lists(st.floats(0.5, 2.0), min_size=blocks, max_size=blocks)))
    return LayerCosts(
        forward_seconds=speed * scale,
        backward_seconds=2 * speed * scale,
        update_seconds=0.1 * speed * scale,
        state_bytes=scale,
        gradient_bytes=scale,
        activation_bytes=0.5 * np.ones(blocks),
        output_bytes=np.ones(blocks),
        schedule_seconds=draw(st.sampled_from([0.0, 0.1])),
    )


@st.composite
def pipelines(draw: st.DrawFn) -> ChunkedPipeline:
    stages, blocks = draw(st.integers(2, 3)), draw(st.integers(6, 9))
    micro_batches = stages * draw(st.integers(1, 2))
    hop = Channel("link", draw(st.sampled_from([1.0, 5.0, np.inf])))
    is_zero_bubble = draw(st.booleans())
    order = zero_bubble_v(stages, micro_batches, UNIT) if is_zero_bubble else interleaved(stages, 2, micro_batches)
    stage_of = order.stage_of_chunk
    limit = draw(st.sampled_from([np.inf, 14.0]))
    return ChunkedPipeline(
        tuple(Slot(f"slot {stage}", costs(draw, blocks), limit) for stage in range(stages)),
        tuple(hop if a != b else None for a, b in itertools.pairwise(stage_of)),
        order,
    )


@given(pipelines())
@examples(ordinary=25, thorough=500)
def test_the_division_is_the_best_of_all(pipeline: ChunkedPipeline) -> None:
    chunks, blocks = pipeline.order.chunks, pipeline.blocks
    best = np.inf
    for inner in itertools.combinations(range(1, blocks), chunks - 1):
        bounds = np.array([[0, *inner, blocks]])
        if (pipeline.memory_bytes(bounds)[:, 0] <= [slot.memory_bytes for slot in pipeline.slots]).all():
            best = min(best, float(pipeline.seconds(bounds)[0]))
    found = divide_blocks([pipeline])
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert found[0] == pytest.approx(best, rel=1e-9)
    # With more blocks than can all be compared, blocks are moved: close to the best here, if memory does not matter.
    moved = divide_blocks([pipeline], max_compared=0)
    assert moved is None or moved[0] >= best * (1 - 1e-9)
    if all(np.isinf(slot.memory_bytes) for slot in pipeline.slots):
        assert moved is not None and moved[0] <= 1.05 * best


BLOCKS = 6


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
                stages_of = [stage for replica in plan.replicas for stage in replica.stages]
                if all(stage.memory_bytes <= stage.memory_available_bytes for stage in stages_of):
                    best = min(best, plan.iteration_seconds)
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
    if not np.isfinite(best):
        if schedule == "zbv":
            return  # another order of the passes may fit
        with pytest.raises(ValueError, match=r"no plan of the schedule|memory"):
            make_plans(topology, model, global_batch=global_batch, schedules=(schedule,))
        return
    found = make_plans(topology, model, global_batch=global_batch, schedules=(schedule,))[0].plan
    assert all(stage.memory_bytes <= stage.memory_available_bytes for each in found.replicas for stage in each.stages)
    assert why_not_runnable(found) is None
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
