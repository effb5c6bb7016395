"""The time of a pipeline's schedule beyond its layers, measured on a simulated clock that messages advance."""

from __future__ import annotations

from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.profiling import layer_profiler, schedule_loop
from colossal_hetero.profiling.layer_passes import LayerPasses
from colossal_hetero.profiling.layer_profiler import profile_layers
from colossal_hetero.profiling.model_layers import find_block_row
from colossal_hetero.profiling.schedule_loop import ScheduleLoop, loopback
from tests.support.layer_profiles import times_of
from tests.support.simulated_layers import WIDTH, Model, SimulatedClock, batch, use_clock

SEND, RECEIVE = 0.002, 0.003


class TimedMessages:
    """Messages that take time on the clock, of which one more may be on its way than was received."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        self.shapes: list[tuple[int, ...]] = []
        self.waiting: deque[Tensor] = deque()

    def send(self, message: Tensor) -> None:
        self.clock.advance(SEND)
        self.shapes.append(tuple(message.shape))
        self.waiting.append(message)

    def receive(self, buffer: Tensor) -> None:
        self.clock.advance(RECEIVE)
        assert buffer.shape == self.waiting.popleft().shape


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    clock = SimulatedClock()
    use_clock(clock, monkeypatch)
    return clock


def test_two_messages_each_way_are_the_schedule_and_the_layers_are_not(clock: SimulatedClock) -> None:
    model = Model(clock, blocks=((0.1, 0.2),) * 2)
    messages = TimedMessages(clock)
    loop = ScheduleLoop(LayerPasses(model, find_block_row(model), F.cross_entropy, batch(3)), messages)
    before = clock.busy
    own = loop.run()
    assert not messages.waiting
    # Per micro-batch an activation and a gradient are sent and two are received, half of them over each cut.
    assert tuple(own) == pytest.approx((SEND + RECEIVE, SEND + RECEIVE))
    # The first message to receive and the last one are beside the loop.
    count = schedule_loop.MICRO_BATCHES
    assert clock.busy - before == pytest.approx(count * 3 * 0.3 + (2 * count + 1) * (SEND + RECEIVE))
    assert set(messages.shapes) == {(3, WIDTH)}
    assert model.blocks[0].linear.weight.grad is not None and model.blocks[1].linear.weight.grad is None


@pytest.mark.parametrize("quota", [1.0, 0.25])
def test_the_profile_has_the_schedule_under_the_quota(monkeypatch: pytest.MonkeyPatch, quota: float) -> None:
    clock = SimulatedClock(quota)
    use_clock(clock, monkeypatch)

    class Timed:
        def __enter__(self) -> TimedMessages:
            return TimedMessages(clock)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(layer_profiler, "loopback", lambda device: Timed())
    model = Model(clock)
    profile: ModelProfile = profile_layers(model, batch(), F.cross_entropy, micro_batches=[1, 2]).profile
    for size in (1, 2):
        times = times_of(profile, "cpu", 1, size)
        assert times.schedule_seconds == pytest.approx((SEND + RECEIVE) / quota, rel=0.08)
        assert times.forward_seconds[1] == pytest.approx(size * 0.003 / quota, rel=0.08)


def test_messages_of_a_process_to_itself_arrive_in_order() -> None:
    # 8 MB are more than the kernel keeps for a receiver.
    sent = [torch.randn(size, 50) for size in (300, 40_000, 1)] + [torch.randn(7, dtype=torch.bfloat16)]
    with loopback(torch.device("cpu")) as messages:
        for message in sent:
            messages.send(message)
        for message in sent:
            buffer = torch.empty_like(message)
            expected = message.clone()
            message.zero_()  # a copy was sent
            messages.receive(buffer)
            assert torch.equal(buffer, expected)
