"""Calls that balancing adds to an iteration that is not measured: they are the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from colossal_hetero import BalanceConfig
from colossal_hetero.balance.clock import CudaClock
from colossal_hetero.layers import hetero_layers
from colossal_hetero.plugin.hybrid import layer_balancing
from tests.support.fake_device import FakeDevice
from tests.support.harness import run_ranks
from tests.support.language_models import llama, train_on_tokens
from tests.support.training import boost, ours, sgd

MOST_CALLS = 15
"""Of a Llama layer more than without balancing: what surrounds its attention, less than 2 microseconds."""


def calls_of(mode: Any, layers: int) -> int:
    """Calls of functions in an iteration that is not measured, after some that are."""
    device, count = FakeDevice(), 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    def slow_down(product: Callable[[], Any]) -> Any:
        device.milliseconds += 1.0
        return product()

    clock = patch.object(layer_balancing, "make_clock", lambda *_: CudaClock())
    with patch.multiple(torch.cuda, **device.fakes), clock:
        plugin = ours(BalanceConfig(mode=mode, measure_costs=False), tp_size=2, make_vocab_size_divisible_by=4)
        run = boost(plugin, llama(num_hidden_layers=layers), sgd)
        for layer in hetero_layers(run.model).values():
            layer.slow_down = slow_down
        for _ in range(10):
            train_on_tokens(run, 1, 1)
            device.catch_up()
        for layer in hetero_layers(run.model).values():
            layer.slow_down = None
        recorded = device.recorded
        sys.setprofile(profile)
        train_on_tokens(run, 1, 1)
        sys.setprofile(None)
        assert device.recorded == recorded, "this iteration was measured"
    return count


def check_calls() -> None:
    per_layer = {mode: calls_of(mode, 2) - calls_of(mode, 1) for mode in ("off", "auto")}
    more = per_layer["auto"] - per_layer["off"]
    assert 0 <= more <= MOST_CALLS, per_layer


def test_an_unmeasured_layer_costs_a_few_calls() -> None:
    run_ranks(2, check_calls)
