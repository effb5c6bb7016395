"""Trial steps leave the state unchanged; an optimizer's memory and time are known before its first step."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from colossal_hetero.profiling import optimizer_state
from colossal_hetero.profiling.optimizer_state import (
    optimizer_state_bytes,
    optimizer_step_seconds,
    step_temporary_bytes,
)
from colossal_hetero.profiling.preserved_state import preserved_state
from tests.support.snapshots import snapshot


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("shared", torch.zeros(1, 4).expand(2, 4))  # cannot be written
        self.register_buffer("odd", torch.tensor([float("nan"), 1.0]))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(x)  # replaces the buffer by another tensor
        self.odd.add_(1)
        return self.last(torch.dropout(self.norm(self.first(x)), 0.5, self.training))


def trial(model: nn.Module) -> None:
    model(torch.randn(4, 6)).sum().backward()
    random.random(), np.random.rand()


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_trial_step_changes_nothing(gradients: bool) -> None:
    model, optimizer = build()
    trial(model)
    optimizer.step()
    if not gradients:
        optimizer.zero_grad()
    model.last.weight.grad = None
    model.norm.eval()
    before = snapshot(model, optimizer)
    tensors = [*model.buffers(), *(p.grad for p in model.parameters())]
    seen = model.seen
    with preserved_state(model, optimizer):
        model.train()
        trial(model)
        optimizer.param_groups[0]["lr"] = 5.0
        trial(model)
        optimizer.zero_grad()
        trial(model)
        assert snapshot(model, optimizer) != before
    assert snapshot(model, optimizer) == before
    assert model.seen is seen and seen.item() == 4
    after = [*model.buffers(), *(p.grad for p in model.parameters())]
    assert all(one is other for one, other in zip(after, tensors, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adam([{"params": p[:2]}, {"params": p[2:], "lr": torch.tensor(0.1)}], capturable=False),
    ],
)
def test_optimizer_state_bytes_before_the_first_step(make: Callable[[list[Any]], torch.optim.Optimizer]) -> None:
    model, _ = build()
    optimizer = make(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    trial(model)
    before = snapshot(model, optimizer)
    had = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value))
    expected = optimizer_state_bytes(optimizer)
    assert snapshot(model, optimizer) == before and not calls and scheduler.last_epoch == 0
    optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    assert expected == sum(value.nbytes for value in state) - had
    assert optimizer_state_bytes(optimizer) == 0
    # The temporary memory of a step.
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 3))
    assert step_temporary_bytes(torch.optim.AdamW(model.parameters())) == 3 * 200 * 4


class Clock:
    now = 0.0


class Slow(torch.optim.AdamW):
    """Takes a second per element on the clock."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        Clock.now += sum(each.numel() for group in self.param_groups for each in group["params"])


@pytest.mark.parametrize("max_elements", [10, 1000])
def test_the_time_is_that_of_all_parameters(max_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "time", SimpleNamespace(perf_counter=lambda: Clock.now))
    monkeypatch.setattr(optimizer_state, "MAX_ELEMENTS", max_elements)
    first, second = nn.Linear(7, 3), nn.Linear(5, 2)
    optimizer = Slow([{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.5}])
    for parameter in (*first.parameters(), *second.parameters()):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    groups = [dict(group) for group in optimizer.param_groups]
    state = {key: {name: value.clone() for name, value in entry.items()} for key, entry in optimizer.state.items()}
    before = [value.detach().clone() for value in (*first.parameters(), *second.parameters())]
    assert optimizer_step_seconds(optimizer) == pytest.approx(7 * 3 + 3 + 5 * 2 + 2)
    for value, former in zip((*first.parameters(), *second.parameters()), before, strict=True):
        assert torch.equal(value, former) and torch.equal(value.grad, torch.ones_like(value))
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert optimizer.state.keys() == state.keys()
    for key, entry in optimizer.state.items():
        assert all(torch.equal(value, state[key][name]) for name, value in entry.items())
    # An optimizer that cannot step on copies has no time.
    monkeypatch.setattr(Slow, "step", Mock(side_effect=IndexError("too few dimensions")))
    assert optimizer_step_seconds(Slow(nn.Linear(2, 2).parameters(), lr=0.1)) is None
