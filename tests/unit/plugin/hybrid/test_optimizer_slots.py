"""What optimizers keep of a parameter, and with which of them units cannot be permanently re-sharded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from colossalai.interface import OptimizerWrapper
from torch import nn

from colossal_hetero.plugin.hybrid.optimizer_slots import HybridOptimizerMemory

PLAIN = dict(zero_stage=0, dp_size=1, sp_size=1)


def memory_of(optimizer: torch.optim.Optimizer, is_elastic: bool = False, **plugin: Any) -> HybridOptimizerMemory:
    model = SimpleNamespace(module=nn.Linear(2, 2))
    return HybridOptimizerMemory(SimpleNamespace(**(PLAIN | plugin)), model, OptimizerWrapper(optimizer), is_elastic)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(is_elastic=True), "elastic training moves whole layers"),
        (dict(zero_stage=1), "ZeRO stage 1"),
        (dict(dp_size=2), "2 replicas"),
        (dict(sp_size=3), "3 replicas"),
        ({}, None),
    ],
)
def test_obstacles_of_the_plugin(options: dict[str, Any], reason: str | None) -> None:
    obstacle = memory_of(torch.optim.SGD([nn.Parameter(torch.zeros(2))]), **options).obstacle
    assert obstacle is None if reason is None else reason in str(obstacle)


class MyAdam(torch.optim.Adam):
    """A subclass may update parameters in another way."""


@pytest.mark.parametrize("kind", [MyAdam, torch.optim.Adagrad])
def test_other_optimizers_are_refused(kind: type) -> None:
    assert kind.__name__ in str(memory_of(kind([nn.Parameter(torch.zeros(2))])).obstacle)


def test_tensors_of_the_state_are_slots_and_numbers_are_not() -> None:
    parameter, frozen = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Adam([parameter], amsgrad=True)
    memory = memory_of(optimizer)
    parameter.sum().backward()
    optimizer.step()
    memory.prepare()
    slots = memory.slots_of(parameter)
    assert [slot.name for slot in slots] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    for slot in slots:
        assert slot.tensor is optimizer.state[parameter][slot.name]
        slot.put(torch.full((5, 2), 7.0))
        assert torch.equal(optimizer.state[parameter][slot.name], torch.full((5, 2), 7.0))
    assert memory.slots_of(frozen) == []
