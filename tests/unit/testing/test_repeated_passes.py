"""Repeated passes take time but do not change the results."""

from __future__ import annotations

from typing import Any

import torch

from colossal_hetero.testing.stragglers import repeat_passes


def test_repeated_passes_change_only_the_time():
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    passes = []

    class Counted(torch.autograd.Function):
        """Returns its input and records each forward and backward pass."""

        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            passes.append("forward")
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            passes.append("backward")
            return gradient

    class Counter(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return Counted.apply(value)

    models[1].append(Counter())
    names = [name for name, _ in models[1].named_parameters()]
    repeat_passes(models[1], 5)
    assert [name for name, _ in models[1].named_parameters()] == names
    inputs = torch.randn(4, 5)
    for model in models:
        for _ in range(2):
            model(inputs).square().mean().backward()
    assert passes.count("forward") == passes.count("backward") == 10
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    passes.clear()
    models[1].eval()
    models[1](inputs)
    with torch.no_grad():
        models[1].train()(inputs)
    assert passes == ["forward"] * 2
