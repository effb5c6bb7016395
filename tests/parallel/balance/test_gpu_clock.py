"""Events that a GPU's clock records for a Llama layer, and the times of its blocks, on a device of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_hetero import BalanceConfig
from colossal_hetero.balance.clock import CudaClock, IterationTimes
from colossal_hetero.layers import hetero_layers
from colossal_hetero.plugin.hybrid import layer_balancing
from tests.support.fake_device import FakeDevice
from tests.support.harness import run_ranks
from tests.support.language_models import llama, train_on_tokens
from tests.support.training import boost, ours, sgd

COLLECTIVES = 7
"""Of a layer: two in the forward pass, one for each of the five column-parallel layers in the backward pass."""

MICRO_BATCHES = 2

ACTIVATION = 0.5
"""Milliseconds of an activation function or a norm in the backward pass; half of it in the forward pass."""


def advancing(device: FakeDevice, milliseconds: float) -> Callable[..., None]:
    def advance(*_: Any) -> None:
        device.milliseconds += milliseconds

    return advance


def run_llama(layers: int, iterations: int) -> tuple[list[int], list[IterationTimes]]:
    """The events recorded in each iteration, and the times of those that are measured."""
    device = FakeDevice()
    reduce = dist.all_reduce

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        device.milliseconds += 64.0
        return reduce(*arguments, **options)

    with (
        patch.multiple(torch.cuda, **device.fakes),
        patch.object(layer_balancing, "make_clock", lambda *_: CudaClock()),
        patch.object(dist, "all_reduce", all_reduce),
    ):
        config = BalanceConfig(mode="auto", measure_costs=False)
        plugin = ours(config, tp_size=2, make_vocab_size_divisible_by=4)
        run = boost(plugin, llama(num_hidden_layers=layers), sgd)
        parallel = list(hetero_layers(run.model).values())
        for number, layer in enumerate(parallel):

            def slow_down(product: Callable[[], Any], milliseconds: float = 1.0 + number % 7) -> Any:
                device.milliseconds += milliseconds
                return product()

            layer.slow_down = slow_down
        for module in run.model.modules():
            if isinstance(module, nn.SiLU) or type(module).__name__ == "LlamaRMSNorm":
                module.register_forward_hook(advancing(device, ACTIVATION / 2))
                module.register_full_backward_hook(advancing(device, ACTIVATION))
        balancer: Any = run.plugin.balancer
        events, times = [], []
        read = balancer._clock.read
        balancer._clock.read = lambda: times.extend(found := read()) or found
        for _ in range(iterations):
            before = device.recorded
            train_on_tokens(run, 1, MICRO_BATCHES)
            device.catch_up()
            events.append(device.recorded - before)
            assert (events[-1] == 0) == (parallel[0].clock is None)
    return events, times


def check_events() -> None:
    one, _ = run_llama(1, 18)
    three, times = run_llama(3, 18)
    per_layer = [(more - few) / 2 / MICRO_BATCHES for few, more in zip(one, three, strict=True)]
    measured = [number for number, count in enumerate(three) if count]
    detailed = [0, 8, 16]
    # While nothing changes, few iterations are measured; in the others nothing is recorded, and layers mark no clock.
    assert [number for number in measured if number > 8] == [16]
    for number in measured:
        # The ends of a collective, and two events in each of the four passes of a block, but for its end.
        assert per_layer[number] == (40 if number in detailed else 2 * COLLECTIVES + 6), number
    first, second = times[0], times[1]
    attention, mlp, head = first.kinds.values()
    assert second.kinds[0] == pytest.approx(attention) and second.kinds[2] == pytest.approx(head)
    # The backward pass of the activation function lies in front of the second product beside a collective.
    beside = 3 * MICRO_BATCHES * ACTIVATION * 1e-3
    assert second.kinds[1] == pytest.approx((mlp.movable + beside, mlp.fixed)), (first, second)
    assert second.other_seconds == pytest.approx(first.other_seconds)
    whole = [each.work_seconds + each.communication_seconds for each in (first, second)]
    assert whole[0] == pytest.approx(whole[1])


def test_a_layer_costs_events_at_its_collectives_and_where_a_blocks_products_begin() -> None:
    run_ranks(2, check_events)
