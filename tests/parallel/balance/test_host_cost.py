"""The cost of balancing on the host: calls, events of a GPU's clock, and no operation that waits for a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu.training.host_waits import host_waits
from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance.clock import CudaClock, IterationTimes
from colossal_hetero.layers import hetero_layers
from colossal_hetero.layers.language_head import VocabularyRows
from colossal_hetero.plugin.hybrid import layer_balancing
from tests.support.checks import Checks
from tests.support.fake_device import FakeDevice
from tests.support.language_models import llama, train_on_tokens
from tests.support.training import Trained, batch, boost, loss_of, ours, scripted, sgd, tiny_vit

checks = Checks()

BY_PRIORITY = dict(priority="priority", priority_interval=2)
BY_DIFF = dict(priority="priority-diff", priority_interval=2)
CONFIGS: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "resize columns at random": {"mode": "resize", "pruning": Pruning(resizing="column", priority="random")},
    "resize columns by priority": {
        "mode": "resize",
        "pruning": Pruning(resizing="column", imputation="same", **BY_PRIORITY),  # type: ignore[arg-type]
    },
    "resize blocks": {"mode": "resize", "pruning": Pruning(**BY_DIFF)},  # type: ignore[arg-type]
    "migrate columns": {"mode": "migrate", "migration": "broadcast-reduce"},
    "semi": {"mode": "semi", "pruning": Pruning(**BY_PRIORITY)},  # type: ignore[arg-type]
    "semi by differences": {"mode": "semi", "max_resize": 0.3, "pruning": Pruning(**BY_DIFF)},  # type: ignore[arg-type]
    "auto": {"mode": "auto"},
}


@checks.on(2)
def a_training_iteration_does_not_wait_for_the_device_in_any_mode() -> None:
    """Rank 1 is slow, and fast again."""
    for name, choices in CONFIGS.items():
        config = BalanceConfig(warmup_iterations=0, patience=1, measure_costs=False, **choices)
        with scripted(lambda rank, iteration: 4.0 if rank == 1 and iteration < 4 else 1.0):
            run = boost(ours(config, tp_size=2), tiny_vit(depth=1), sgd)
        plans = [run.plugin.balancer.plan]
        with host_waits(torch.device("cpu")) as waits:
            for number in range(8):
                images, labels = batch(number)
                run.finish(loss_of(run.model(images), labels))
                if run.plugin.balancer.plan != plans[-1]:
                    plans.append(run.plugin.balancer.plan)
        assert not {wait.place for wait in waits}, name
        assert name == "off" or len(plans) > 2, name


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
COLLECTIVES = 7
"""Of a layer: two in the forward pass, one for each of the five column-parallel layers in the backward pass."""
MICRO_BATCHES = 2
ACTIVATION = 0.5
"""Milliseconds of an activation function or a norm in the backward pass; half of it in the forward pass."""


@contextmanager
def llama_on_a_device(mode: Any, layers: int) -> Iterator[tuple[FakeDevice, Trained]]:
    """A run on a device of the test, where each layer's products take a time of their own, and collectives 64 ms."""
    device, reduce = FakeDevice(), dist.all_reduce

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        device.milliseconds += 64.0
        return reduce(*arguments, **options)

    with (
        patch.multiple(torch.cuda, **device.fakes),
        patch.object(layer_balancing, "make_clock", lambda *_: CudaClock()),
        patch.object(dist, "all_reduce", all_reduce),
    ):
        plugin = ours(BalanceConfig(mode=mode, measure_costs=False), tp_size=2, make_vocab_size_divisible_by=4)
        run = boost(plugin, llama(num_hidden_layers=layers), sgd)
        for number, layer in enumerate(hetero_layers(run.model).values()):

            def slow_down(product: Callable[[], Any], milliseconds: float = 1.0 + number % 7) -> Any:
                device.milliseconds += milliseconds
                return product()

            layer.slow_down = slow_down
        yield device, run


def calls_of(mode: str, layers: int) -> int:
    """Calls of functions in an iteration that is not measured, after some that are."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with llama_on_a_device(mode, layers) as (device, run):
        for _ in range(18):  # the times of iteration 16 are read after the next one
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


@checks.on(2)
def an_unmeasured_layer_costs_a_few_calls() -> None:
    per_layer = {mode: calls_of(mode, 2) - calls_of(mode, 1) for mode in ("off", "auto")}
    assert 0 <= per_layer["auto"] - per_layer["off"] <= MOST_CALLS, per_layer


def events_of(layers: int) -> tuple[list[int], list[IterationTimes]]:
    """The events recorded in each iteration, and the times of those that are measured."""
    with llama_on_a_device("auto", layers) as (device, run):

        def advance(milliseconds: float) -> Callable[..., None]:
            return lambda *_: setattr(device, "milliseconds", device.milliseconds + milliseconds)

        for module in run.model.modules():
            if isinstance(module, nn.SiLU) or type(module).__name__ == "LlamaRMSNorm":
                module.register_forward_hook(advance(ACTIVATION / 2))
                module.register_full_backward_hook(advance(ACTIVATION))
        clock, events, times = run.plugin.balancer._clock, list[int](), list[IterationTimes]()
        read, first = clock.read, next(iter(hetero_layers(run.model).values()))
        clock.read = lambda: times.extend(found := read()) or found
        for _ in range(18):
            before = device.recorded
            train_on_tokens(run, 1, MICRO_BATCHES)
            device.catch_up()
            events.append(device.recorded - before)
            assert (events[-1] == 0) == (first.clock is None)
    return events, times


@checks.on(2)
def a_layer_costs_events_at_its_collectives_and_where_a_blocks_products_begin() -> None:
    (one, _), (three, (times, *_)) = events_of(1), events_of(3)
    per_layer = [(more - few) / 2 / MICRO_BATCHES for few, more in zip(one, three, strict=True)]
    measured = [number for number, count in enumerate(three) if count]
    # While nothing changes, few iterations are measured; in the others nothing is recorded, and layers mark no clock.
    assert [number for number in measured if number > 8] == [16]
    for number in measured:
        # The ends of a collective, and two events in each of the four passes of a block, but for its end.
        assert per_layer[number] == 2 * COLLECTIVES + 6, number
    # Three products of each layer, and the activation function. Its backward pass counts twice, because it lies in
    # front of the second product beside a collective, for which the product before is taken.
    passes = 3 * MICRO_BATCHES * 1e-3
    attention, mlp, head = passes * 3 * (1 + 2 + 3 + 4), passes * (3 * (5 + 6 + 7) + 2.5 * ACTIVATION), passes
    assert [each.movable for each in times.kinds.values()] == pytest.approx([attention, mlp, head])
    norms = (1 + 3 * 2) * MICRO_BATCHES * 1.5 * ACTIVATION * 1e-3
    assert times.other_seconds == pytest.approx(norms)


test_on_ranks = checks.test()
