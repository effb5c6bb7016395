"""Where units cannot be permanently re-sharded: what a plugin's options stand in the way of."""

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
