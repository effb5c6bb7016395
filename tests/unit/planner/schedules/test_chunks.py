"""Schedules: chunks by hand and against all plans; 1F1B against ranks with programs and a queue, and the formula."""

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
from colossal_hetero.planner.stages.pipeline import Slot
from tests.support.planning import make_plans
from tests.support.random_examples import examples
from tests.support.small_problems import FAST_LINK, cluster, profile

UNIT = GraphSeconds(forward=1.0, input_gradient=1.0, weight_gradient=1.0, transfer=0.0)


def equal_chunks(order: PassOrder, forward: float, backward: float) -> ChunkTimes:
    ones, zeros = np.ones(order.chunks), np.zeros(order.chunks)
    return ChunkTimes(forward * ones, backward * ones, zeros, np.zeros(order.stages))


@pytest.mark.parametrize("stages, chunks, micro_batches", [(2, 2, 4), (3, 2, 6), (4, 3, 8), (4, 2, 4)])
def test_equal_chunks_have_the_known_bubble_of_the_interleaved_schedule(stages, chunks, micro_batches):
    # Narayanan et al. 2021, section 2.2.2: the bubble is (p − 1)(f + b) with the times of one chunk.
    order = interleaved(stages, chunks, micro_batches)
    ends = simulate_passes(order, equal_chunks(order, 1.0, 2.0))
    assert ends.max() == pytest.approx(3.0 * (micro_batches * chunks + stages - 1))


def test_messages_in_one_direction_go_one_after_the_other() -> None:
    # Two forwards of 1 s each, and messages of 3 s: the second message starts when the first is there.
    order = PassOrder(
        (0, 1), ((Pass("forward", 0, 0), Pass("forward", 0, 1)), tuple(Pass("forward", 1, n) for n in (0, 1)))
    )
    times = ChunkTimes(np.ones(2), np.ones(2), np.array([3.0, 0.0]), np.zeros(2))
    assert simulate_passes(order, times).tolist() == [2.0, 1.0 + 3.0 + 3.0 + 1.0]
    # With NCCL the second message leaves only after the first forward of the receiver, if that asks for it then.
    late = replace(order, receives_late=True)
    assert simulate_passes(late, times).tolist() == [2.0, 1.0 + 3.0 + 1.0 + 3.0 + 1.0]
    assert simulate_passes(late, times, "overlapped").tolist() == [2.0, 8.0]


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
    # Where the gradients of weights have passes of their own, activations are held until those.
    kinds = (("forward", 0), ("backward", 0), ("forward", 1), ("weight", 0), ("backward", 1), ("weight", 1))
    late = PassOrder((0,), (tuple(Pass(kind, 0, number) for kind, number in kinds),))
    assert most_in_flight(late)[0].tolist() == [[2]]


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
            cuts = itertools.combinations(range(1, BLOCKS), 2 * stages - 1)
            for order, inner in itertools.product(distinct.values(), cuts):
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
def test_best_of_all_plans_of_a_schedule(fast, slow, ratio, memory, global_batch, link, schedule, seed):
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


TRANSFERS = ["blocking", "overlapped"]
PASSES = ("forward", "backward")
ROUNDING = 1e-9


def simulated(forward, backward, hops, count: int, transfers="blocking", update=0.0) -> Timeline:
    updates = np.full(len(forward), update)
    times = ChunkTimes(np.array(forward), np.array(backward), np.array([*hops, 0.0]), updates)
    return Timeline(one_forward_one_backward(len(forward), count), times, transfers)


def program(stage: int, stages: int, count: int) -> list[tuple[str, ...]]:
    """The calls of a rank, as in Colossal-AI's ``run_forward_backward``."""
    warm_up = min(stages - stage - 1, count)
    first, last = stage == 0, stage == stages - 1
    receive_forward = () if first else ("receive forward",)
    send_forward = () if last else ("send forward",)
    receive_backward = () if last else ("receive backward",)
    send_backward = () if first else ("send backward",)
    calls: list[tuple[str, ...]] = []
    for _ in range(warm_up):
        calls += [receive_forward, ("forward",), send_forward]
    if count > warm_up:
        calls.append(receive_forward)
    for number in range(count - warm_up):
        calls += [("forward",), send_forward + receive_backward, ("backward",)]
        calls.append(send_backward if number == count - warm_up - 1 else send_backward + receive_forward)
    for _ in range(warm_up):
        calls += [receive_backward, ("backward",), send_backward]
    return [call for call in calls if call]


def peer(stage: int, message: str) -> int:
    return stage + 1 if message in ("send forward", "receive backward") else stage - 1


def other_side(message: str) -> str:
    return message.replace("send", "_").replace("receive", "send").replace("_", "receive")


def slow_ends(forward, backward, hops, count: int, transfers: str) -> list[float]:
    """Time when each rank has finished its program: it makes a call when its messages are there."""
    stages = len(forward)
    calls = [program(stage, stages, count) for stage in range(stages)]
    now = [0.0] * stages
    inbox: dict[tuple[int, str], list[float]] = {}
    while any(calls):
        before = [list(each) for each in calls]
        for stage in (stage for stage in range(stages) if calls[stage]):
            call = calls[stage][0]
            if call[0] in PASSES:
                now[stage] += (forward if call[0] == "forward" else backward)[stage]
                calls[stage].pop(0)
                continue
            other = peer(stage, call[0])
            hop = hops[min(stage, other)]
            if transfers == "blocking":  # until the other rank calls for exactly these messages
                theirs = calls[other][0] if calls[other] else PASSES
                if theirs[0] not in PASSES and peer(other, theirs[0]) == stage:
                    assert sorted(theirs) == sorted(other_side(message) for message in call)
                    now[stage] = now[other] = max(now[stage], now[other]) + hop
                    calls[stage].pop(0), calls[other].pop(0)
                continue
            for message in call:
                if message.startswith("send"):
                    inbox.setdefault((other, other_side(message)), []).append(now[stage] + hop)
            received = calls[stage][0] = tuple(message for message in call if message.startswith("receive"))
            if received and inbox.get((stage, received[0])):
                now[stage] = max(now[stage], inbox[stage, received[0]].pop(0))
                received = ()
            if not received:
                calls[stage].pop(0)
        assert calls != before, "ranks wait for each other"
    return now


seconds = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 5.0]), st.floats(0.01, 5.0))


@st.composite
def single_chunks(draw: st.DrawFn, max_stages: int = 6, max_micro_batches: int = 9):
    stages = draw(st.integers(1, max_stages))
    same_ratio, hop = draw(st.booleans()), draw(st.sampled_from(["none", "one", "any"]))
    forward = draw(st.lists(seconds, min_size=stages, max_size=stages))
    backward = [2 * f for f in forward] if same_ratio else draw(st.lists(seconds, min_size=stages, max_size=stages))
    hops = draw(st.lists(seconds, min_size=stages - 1, max_size=stages - 1))
    if hop != "any":
        hops = [draw(seconds) if hop == "one" else 0.0] * (stages - 1)
    return forward, backward, hops, draw(st.integers(1, max_micro_batches))


@pytest.mark.parametrize("transfers", TRANSFERS)
@examples(ordinary=60, thorough=400)
@given(single_chunks())
def test_ends_equal_those_of_a_queue_of_events(transfers, case):
    timeline = simulated(*case, transfers)
    assert timeline.stage_seconds == pytest.approx(slow_ends(*case, transfers), rel=ROUNDING, abs=1e-12)
