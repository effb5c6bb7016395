"""When sums of gradients start, with a group of one rank whose messages are only recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal_hetero.plugin.replicas.layer_sums import LayerSums, SharedBucket


class RecordedSums:
    """Doubles gradients, as if another rank had the same, and records the order of starts."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.names: dict[int, str] = {}

    def start(self, bucket: SharedBucket) -> Callable[[], None]:
        label = "".join(self.names[id(each)] for each in bucket.parameters)
        self.events.append(f"start {label}")

        def finish() -> None:
            self.events.append(f"finish {label}")
            for parameter in bucket.parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else 2 * parameter.grad

        return finish


def three_layers(early: bool = True) -> tuple[nn.Sequential, LayerSums, RecordedSums]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    recorded = RecordedSums()
    for name, layer in zip("abc", model, strict=True):
        recorded.names[id(layer.weight)] = name
        layer.weight.register_post_accumulate_grad_hook(lambda _, name=name: recorded.events.append(f"gradient {name}"))
    group = Mock(**{"size.return_value": 2})
    buckets = [SharedBucket(group, (model[2].weight, model[1].weight)), SharedBucket(group, (model[0].weight,))]
    return model, LayerSums(buckets, recorded.start, early), recorded


def backward(model: nn.Module, times: int, sums: LayerSums | None = None) -> None:
    for _ in range(times):
        if sums is not None:
            sums.begin_pass()
        model(torch.ones(1, 2)).sum().backward()


def test_a_sum_starts_in_the_last_backward_pass_when_its_gradients_are_there() -> None:
    model, sums, recorded = three_layers()
    with sums.passes(lambda: 2):
        backward(model, 1, sums)
        assert "start" not in " ".join(recorded.events)
        recorded.events.clear()
        backward(model, 1, sums)
        assert recorded.events == ["gradient c", "gradient b", "start cb", "gradient a", "start a"]
        sums.finish()
    assert recorded.events[-2:] == ["finish cb", "finish a"]


def checkpointed(model: nn.Sequential, times: int) -> None:
    """A backward pass through the first layer, in so many reentrant checkpoints, and through the others."""
    values = torch.ones(1, 2, requires_grad=True)
    for _ in range(times):
        values = checkpoint(model[0], values, use_reentrant=True)
    model[1:](values).sum().backward()


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_layer_in_several_checkpoints_is_summed_when_all_its_gradients_are_there(micro_batches: int) -> None:
    model, sums, recorded = three_layers()
    for step in range(2):
        recorded.events.clear()
        with sums.passes(lambda: micro_batches):
            for _ in range(micro_batches):
                sums.begin_pass()
                checkpointed(model, 3)
            if step or micro_batches > 1:
                assert recorded.events[-4:] == [*["gradient a"] * 3, "start a"]
            sums.finish()
        alone = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
        alone.load_state_dict(model.state_dict())
        for _ in range(micro_batches):
            checkpointed(alone, 3)
        for layer, same in zip(model, alone, strict=True):
            torch.testing.assert_close(layer.weight.grad, 2 * same.weight.grad)
        sums.drop()
        model.zero_grad()


def test_a_gradient_after_the_start_is_refused() -> None:
    model, sums, _ = three_layers()
    with sums.passes(lambda: 2):
        for times in (2, 3):
            sums.begin_pass()
            with pytest.raises(RuntimeError, match="overlap_communication=False") if times == 3 else nullcontext():
                checkpointed(model, times)


def test_a_parameter_without_a_gradient_does_not_stop_the_sums() -> None:
    model, sums, recorded = three_layers()
    with sums.passes(lambda: 1):
        model[0](torch.ones(1, 2)).sum().backward()
        assert recorded.events == ["gradient a"]  # the sum of the others comes first on all ranks
        sums.finish()
    assert recorded.events[1:] == ["start cb", "start a", "finish cb", "finish a"]
    assert sums.used == {id(model[0].weight)}


def test_gradients_that_are_summed_already_are_not_summed_again() -> None:
    model, sums, _ = three_layers()
    for _ in range(2):
        with sums.passes(lambda: 1):
            backward(model, 1)
            sums.finish()
    with sums.passes(None):  # accumulates only
        backward(model, 1)
    with sums.passes(lambda: 1):
        backward(model, 1)
        sums.finish()
    alone = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    alone.load_state_dict(model.state_dict())
    backward(alone, 4)
    for layer, same in zip(model, alone, strict=True):
        torch.testing.assert_close(layer.weight.grad, 2 * same.weight.grad)


def test_dropped_gradients_do_not_come_back() -> None:
    model, sums, _ = three_layers()
    with sums.passes(lambda: 1):
        backward(model, 1)
        sums.finish()
    with sums.passes(None):
        backward(model, 1)
    sums.drop()
    model.zero_grad()
    with sums.passes(lambda: 1):
        backward(model, 1)
        sums.finish()
    expected = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    expected.load_state_dict(model.state_dict())
    backward(expected, 1)
    torch.testing.assert_close(model[0].weight.grad, 2 * expected[0].weight.grad)
