"""Running out of memory in training: the repeated pass is the same, or words say what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from colossal_hetero.data_parallel import out_of_memory
from colossal_hetero.data_parallel.out_of_memory import OutOfMemoryGuard


@pytest.fixture(autouse=True)
def outside_of_any_group() -> Any:
    with (
        patch.object(out_of_memory, "MIN_BYTES", 1),
        patch.object(out_of_memory.dist, "get_rank", lambda: 1),
    ):
        yield


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.GELU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(5 * 36, 4)
    )


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [value.grad.clone() for value in model.parameters() if value.grad is not None]


class RunsOut(nn.Module):
    """Raises an out-of-memory error as long as ``left`` is above 0, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.left > 0 and self.training:
            self.left -= 1
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return inputs


def guarded(may_repeat: bool) -> tuple[nn.Module, RunsOut, Any]:
    runs_out = RunsOut()
    model = nn.Sequential(make_model(), runs_out)
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    loader: Any = SimpleNamespace(current=SimpleNamespace(samples=3, global_batch=7))
    guard = OutOfMemoryGuard(loader, may_repeat=may_repeat)
    guard.attach(model, optimizer)  # type: ignore[arg-type]
    return model, runs_out, optimizer


def test_a_repeated_pass_gives_the_same_result(caplog: pytest.LogCaptureFixture) -> None:
    inputs = torch.randn(3, 3, 8, 8)
    found = []
    for failures in (0, 1):
        model, runs_out, optimizer = guarded(True)
        runs_out.left = failures
        torch.manual_seed(2)
        losses = []
        for _ in range(3):
            loss = model(inputs).square().mean()
            optimizer.backward(loss)
            losses.append(loss.detach())
        found.append([*losses, *gradients(model), torch.rand(1)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    told = caplog.text
    assert told.count("rank 1 ran out of memory in the forward pass of a micro-batch of 3 samples") == 1
    assert "nothing is lost" in told and "max_micro_batch=2" in told


def test_a_pass_that_cannot_be_repeated_says_what_happened() -> None:
    model, runs_out, _ = guarded(False)
    runs_out.left = 1
    with pytest.raises(RuntimeError, match=r"rank 1 .* forward pass of a micro-batch of 3 samples of global batch 7"):
        model(torch.randn(3, 3, 8, 8))
    model, runs_out, _ = guarded(True)
    runs_out.left = 2
    with pytest.raises(RuntimeError, match="the pass cannot be repeated"):
        model(torch.randn(3, 3, 8, 8))


def test_other_errors_and_evaluation_are_left_alone() -> None:
    model, runs_out, optimizer = guarded(True)
    with pytest.raises(RuntimeError, match="size"):
        model(torch.randn(3, 4, 8, 8))
    runs_out.left = 1
    assert model.eval()(torch.randn(3, 3, 8, 8)).shape == (3, 4)
    with pytest.raises(AttributeError):
        optimizer.backward(None)
