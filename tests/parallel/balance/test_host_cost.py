"""The cost of balancing on the host: calls in an iteration that is not measured, and no operation waits for a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.training.host_waits import host_waits
from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance.clock import CudaClock
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.layers import hetero_layers
from colossal_hetero.layers.language_head import VocabularyRows
from colossal_hetero.plugin.hybrid import layer_balancing
from tests.support.fake_device import FakeDevice
from tests.support.harness import run_ranks
from tests.support.language_models import llama, train_on_tokens
from tests.support.training import batch, boost, loss_of, ours, scripted, sgd, tiny_vit

CONFIGS: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "resize columns at random": {"mode": "resize", "pruning": Pruning(resizing="column", priority="random")},
    "resize columns by priority": {
        "mode": "resize",
        "pruning": Pruning(resizing="column", priority="priority", priority_interval=2, imputation="same"),
    },
    "resize blocks": {"mode": "resize", "pruning": Pruning(priority="priority-diff", priority_interval=2)},
    "migrate columns": {"mode": "migrate", "migration": "broadcast-reduce"},
    "semi": {"mode": "semi", "pruning": Pruning(priority="priority", priority_interval=2)},
    "auto": {"mode": "auto", "max_resize": 0.3, "pruning": Pruning(priority="priority-diff", priority_interval=2)},
}
ITERATIONS = 8


def slow_and_fast_again(rank: int, iteration: int) -> float:
    return 4.0 if rank == 1 and iteration < 4 else 1.0


def _waits(choices: dict[str, Any]) -> tuple[list[str], int]:
    """Where the host would wait, and how many plans were followed."""
    config = BalanceConfig(warmup_iterations=0, patience=1, measure_costs=False, **choices)
    with scripted(slow_and_fast_again):
        run = boost(ours(config, tp_size=2), tiny_vit(depth=1), sgd)
    plans: list[BalancePlan] = [run.plugin.balancer.plan]
    with host_waits(torch.device("cpu")) as waits:
        for number in range(ITERATIONS):
            images, labels = batch(number)
            run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()
            if run.plugin.balancer.plan != plans[-1]:
                plans.append(run.plugin.balancer.plan)
    return sorted({wait.place for wait in waits}), len(plans)


def _all_waits() -> dict[str, tuple[list[str], int]]:
    return {name: _waits(choices) for name, choices in CONFIGS.items()}


def test_a_training_iteration_does_not_wait_for_the_device_in_any_mode() -> None:
    for found in run_ranks(2, _all_waits):
        assert {name: places for name, (places, _) in found.items()} == {name: [] for name in CONFIGS}
        assert all(plans > 2 for name, (_, plans) in found.items() if name != "off"), found


def test_rows_of_a_vocabulary_are_found_without_waiting() -> None:
    numbers = torch.tensor([4, 5, 6, 7, 1])  # 6 and 7 are padding
    with host_waits(torch.device("cpu")) as waits:
        columns = VocabularyRows(numbers, vocabulary=6).columns_of(torch.tensor([5, 0, 1, 4, -100]))
    assert columns.tolist() == [1, -1, 4, 0, -1]
    assert not waits


def test_waits_are_recorded_with_their_place() -> None:
    values = torch.arange(4.0)
    with host_waits(torch.device("cpu")) as waits:
        values[values > 1]
        values[torch.tensor([0, 1])]
        if values.sum():
            values[values > 1] = 0.0
    assert [wait.place.partition(":")[0] for wait in waits] == ["balance/test_host_cost.py"] * 3
    assert all(wait.is_in("tests/parallel/balance/test_host_cost.py") for wait in waits)


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
        for _ in range(17):
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
