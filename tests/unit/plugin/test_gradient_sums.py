"""When sums of gradients start, with a group of one rank whose messages are only recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal_hetero.plugin.zero.gradient_sums import GradientBucket, GradientSums


class RecordedSums:
    """Doubles gradients, as if another rank had the same, and records the order of starts."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.names: dict[int, str] = {}

    def start(self, bucket: GradientBucket) -> Callable[[], None]:
        label = "".join(self.names[id(each)] for each in bucket.parameters)
        self.events.append(f"start {label}")

        def finish() -> None:
            self.events.append(f"finish {label}")
            for parameter in bucket.parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else 2 * parameter.grad

        return finish


def three_layers(early: bool = True, one_group: bool = False) -> tuple[nn.Sequential, GradientSums, RecordedSums]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    recorded = RecordedSums()
    for name, layer in zip("abc", model, strict=True):
        recorded.names[id(layer.weight)] = name
        layer.weight.register_post_accumulate_grad_hook(lambda _, name=name: recorded.events.append(f"gradient {name}"))
    group = Mock(**{"size.return_value": 2})
    buckets = [GradientBucket(group, (model[2].weight, model[1].weight)), GradientBucket(group, (model[0].weight,))]
    watched = list(model.parameters()) if early else []
    return model, GradientSums(buckets, recorded.start, watched, one_group), recorded


def backward(model: nn.Module, times: int, sums: GradientSums | None = None) -> None:
    for _ in range(times):
        with nullcontext() if sums is None else sums.one_pass():
            model(torch.ones(1, 2)).sum().backward()


def check_twice(model: nn.Sequential, run: Callable[[nn.Sequential], object]) -> None:
    """The gradients are twice those after ``run`` in one process."""
    alone = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    alone.load_state_dict(model.state_dict())
    run(alone)
    for layer, same in zip(model, alone, strict=True):
        torch.testing.assert_close(layer.weight.grad, 2 * same.weight.grad)


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


def test_in_interleaved_schedules_parameters_have_passes_of_their_own() -> None:
    model, sums, recorded = three_layers()
    with sums.passes(lambda: 2):
        for chunk in (model[1:], model[1:], model[:1], model[:1]):
            backward(chunk, 1, sums)
        assert recorded.events[-6:] == ["gradient c", "gradient b", "start cb", "gradient a", "gradient a", "start a"]
        sums.finish()
    assert list(sums.passes_of) == [id(layer.weight) for layer in reversed(model)]


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
                with sums.one_pass():
                    checkpointed(model, 3)
            if step or micro_batches > 1:
                assert recorded.events[-4:] == [*["gradient a"] * 3, "start a"]
            sums.finish()
        check_twice(model, lambda alone: [checkpointed(alone, 3) for _ in range(micro_batches)])
        sums.drop()
        model.zero_grad()


def test_a_gradient_after_the_start_is_refused() -> None:
    model, sums, _ = three_layers()
    with sums.passes(lambda: 2):
        for times in (2, 3):
            is_refused = pytest.raises(RuntimeError, match="overlap_communication=False")
            with is_refused if times == 3 else nullcontext(), sums.one_pass():
                checkpointed(model, times)


def test_over_one_group_sums_start_in_the_first_pass_and_what_comes_late_is_kept() -> None:
    model, sums, recorded = three_layers(one_group=True)
    weight, started = model[0].weight, []
    for _ in range(2):
        recorded.events.clear()
        with sums.passes(lambda: 1), sums.one_pass():
            checkpointed(model, 2)
            started.append(recorded.events.index("start a"))
            assert recorded.events.count("start a") == 1
            sums.finish()
        late, sums.late = set(sums.late), set()
        assert late == ({id(weight)} if len(started) == 1 else set())
        sums.drop()
        model.zero_grad()
    assert started[0] < started[1]  # the second pass knows that two gradients come


def test_a_parameter_without_a_gradient_does_not_stop_the_sums() -> None:
    model, sums, recorded = three_layers()
    with sums.passes(lambda: 1):
        with sums.one_pass():
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
    check_twice(model, lambda alone: backward(alone, 4))
