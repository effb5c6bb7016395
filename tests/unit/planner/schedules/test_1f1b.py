"""The simulation of 1F1B compared with a slow and simple one, in which ranks run programs from a queue of events, and
with the formula."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.cost.pass_order import one_forward_one_backward
from colossal_hetero.planner.cost.simulate import ChunkTimes, Timeline
from tests.support.random_examples import examples

TRANSFERS = ["blocking", "overlapped"]
ROUNDING = 1e-9


def simulated(forward, backward, hops, count: int, transfers="blocking", schedule=0.0, update=0.0) -> Timeline:
    each = np.ones(len(forward))
    times = ChunkTimes(np.array(forward), np.array(backward), schedule * each, np.array([*hops, 0.0]), update * each)
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
    """Time when each rank has finished its program."""
    stages = len(forward)
    calls = [program(stage, stages, count) for stage in range(stages)]
    at = [0] * stages
    arrived_at_call: dict[int, float] = {}
    inbox: dict[tuple[int, str], list[float]] = {}
    ends = [0.0] * stages
    queue = [(0.0, stage, 0) for stage in range(stages)]
    heapq.heapify(queue)

    def go_on(time: float, stage: int) -> None:
        at[stage] += 1
        arrived_at_call.pop(stage, None)
        heapq.heappush(queue, (time, stage, at[stage]))

    while queue:
        time, stage, place = heapq.heappop(queue)
        if place != at[stage]:
            continue  # several messages queued this rank
        if at[stage] == len(calls[stage]):
            ends[stage] = time
            continue
        call = calls[stage][at[stage]]
        if call[0] in ("forward", "backward"):
            go_on(time + (forward if call[0] == "forward" else backward)[stage], stage)
        elif transfers == "blocking":
            # Wait until the other rank calls for exactly these messages.
            other = peer(stage, call[0])
            arrived_at_call[stage] = time
            theirs = calls[other][at[other]] if other in arrived_at_call else ()
            if theirs and peer(other, theirs[0]) == stage:
                assert sorted(theirs) == sorted(other_side(message) for message in call)
                done = max(time, arrived_at_call[other]) + hops[min(stage, other)]
                go_on(done, stage)
                go_on(done, other)
        else:
            other = peer(stage, call[0])
            if stage not in arrived_at_call:
                arrived_at_call[stage] = time
                for message in call:
                    if message.startswith("send"):
                        there = time + hops[min(stage, other)]
                        inbox.setdefault((other, other_side(message)), []).append(there)
                        if other in arrived_at_call:
                            heapq.heappush(queue, (time, other, at[other]))
            wanted = [message for message in call if message.startswith("receive")]
            if not wanted:
                go_on(time, stage)
            elif inbox.get((stage, wanted[0])):
                go_on(max(time, inbox[stage, wanted[0]].pop(0)), stage)
    assert all(place == len(program) for place, program in zip(at, calls, strict=True)), "ranks wait for each other"
    return ends


seconds = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 5.0]), st.floats(0.01, 5.0))


@st.composite
def pipelines(draw: st.DrawFn, max_stages: int = 6, max_micro_batches: int = 9):
    stages = draw(st.integers(1, max_stages))
    same_ratio, hop = draw(st.booleans()), draw(st.sampled_from(["none", "one", "any"]))
    forward = draw(st.lists(seconds, min_size=stages, max_size=stages))
    backward = [2 * f for f in forward] if same_ratio else draw(st.lists(seconds, min_size=stages, max_size=stages))
    hops = draw(st.lists(seconds, min_size=stages - 1, max_size=stages - 1))
    if hop != "any":
        hops = [draw(seconds) if hop == "one" else 0.0] * (stages - 1)
    return forward, backward, hops, draw(st.integers(1, max_micro_batches))


def closed_form(forward, backward, hops, count: int) -> tuple[list[float], float]:
    around = [0.0, *hops, 0.0]
    times = [f + b + x + y for f, b, (x, y) in zip(forward, backward, pairwise(around), strict=True)]
    return times, sum(times) + (count - 1) * max(times)


@pytest.mark.parametrize("transfers", TRANSFERS)
@examples(ordinary=60, thorough=400)
@given(pipelines())
def test_ends_equal_those_of_a_queue_of_events(transfers, case):
    timeline = simulated(*case, transfers)
    assert timeline.stage_seconds == pytest.approx(slow_ends(*case, transfers), rel=ROUNDING, abs=1e-12)


@examples(ordinary=80, thorough=200)
@given(pipelines())
def test_closed_form_is_never_below_with_one_ratio_without_transfers(case):
    forward, _, _, count = case
    hops = [0.0] * (len(forward) - 1)
    times, closed = closed_form(forward, [2 * f for f in forward], hops, count)
    seconds = simulated(forward, [2 * f for f in forward], hops, count).seconds
    assert seconds <= closed * (1 + ROUNDING)
    if times[-1] == max(times) or count == 1 or len(set(times)) == 1:
        assert seconds == pytest.approx(closed)
    assert simulated([1.0] * 8, [2.0] * 8, [0.0] * 7, 32).shares[0].bubble == pytest.approx(7 / 39)


def test_updates_are_at_the_end_and_half_of_the_schedule_with_each_pass():
    case = ([1.0, 3.0, 2.0], [2.0, 6.0, 4.0], [0.1, 0.1], 5)
    timeline = simulated(*case, schedule=0.4, update=0.5)
    alike = simulated([1.2, 3.2, 2.2], [2.2, 6.2, 4.2], *case[2:])
    assert timeline.stage_seconds == pytest.approx(alike.stage_seconds)
    assert timeline.seconds == pytest.approx(alike.seconds + 0.5)
    assert [events[-1].kind for events in timeline.events] == ["update"] * 3
