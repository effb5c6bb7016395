"""The measured time of an optimizer's step, and that measuring changes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colossal_hetero.profiling import optimizer_state
from colossal_hetero.profiling.optimizer_state import optimizer_step_seconds


class Clock:
    now = 0.0


class Slow(torch.optim.AdamW):
    """Takes a second per element on the clock."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        Clock.now += sum(each.numel() for group in self.param_groups for each in group["params"])


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise IndexError("too few dimensions")


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


def test_an_optimizer_that_cannot_step_on_copies_has_no_time() -> None:
    assert optimizer_step_seconds(Failing(nn.Linear(2, 2).parameters(), lr=0.1)) is None
