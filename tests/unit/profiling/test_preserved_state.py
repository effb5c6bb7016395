"""Trial steps leave the state unchanged, and the memory of the optimizer state is known before the first step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from colossal_hetero.profiling.device_profiler import Timing, peak_flops, profile_device
from colossal_hetero.profiling.optimizer_state import optimizer_state_bytes, step_temporary_bytes
from colossal_hetero.profiling.preserved_state import preserved_state

CPU = torch.device("cpu")


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


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(
        (
            [(name, value.tolist()) for name, value in model.state_dict().items() if name != "odd"],
            model.get_buffer("odd").isnan().tolist(),
            [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
            [module.training for module in model.modules()],
            optimizer.state_dict(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )
    )


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


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
        assert not same(snapshot(model, optimizer), before)
    assert same(snapshot(model, optimizer), before)
    assert model.seen is seen and seen.item() == 4
    after = [*model.buffers(), *(p.grad for p in model.parameters())]
    assert all(one is other for one, other in zip(after, tensors, strict=True))


def test_the_state_is_also_restored_after_an_error() -> None:
    model, optimizer = build()
    before = snapshot(model, optimizer)
    with pytest.raises(ZeroDivisionError), preserved_state(model, optimizer):
        trial(model)
        raise ZeroDivisionError
    assert same(snapshot(model, optimizer), before)


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
    assert same(snapshot(model, optimizer), before) and not calls and scheduler.last_epoch == 0
    optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    assert expected == sum(value.nbytes for value in state) - had
    assert optimizer_state_bytes(optimizer) == 0


def test_the_temporary_memory_of_a_step() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 3))
    assert step_temporary_bytes(torch.optim.AdamW(model.parameters())) == 3 * 200 * 4


def profile(seconds: Callable[[int, int], float], largest: int, cap: int, **arguments: Any) -> tuple[Any, list[int]]:
    """Profile a device whose n-th run of a batch takes ``seconds(batch, n)``; return the result and all batches run."""
    sizes: list[int] = []

    def run(batch: int) -> Timing:
        sizes.append(batch)
        if batch > largest:
            raise MemoryError
        taken = seconds(batch, sizes.count(batch))
        return Timing(taken, taken / 3)

    return profile_device(run, cap, state_bytes_to_come=0, device=CPU, **arguments), sizes


def test_a_single_slow_run_is_ignored() -> None:
    result, sizes = profile(lambda batch, run: batch * (10.0 if run == 2 else 1.0), 11, 100)
    assert result.max_batch == 11 and result.memory_bound
    assert all(point.seconds == point.batch for point in result.points)
    assert {1, 11} < {point.batch for point in result.points} <= set(sizes)
    assert all(point.forward_seconds == pytest.approx(point.seconds / 3) for point in result.points)


def test_short_passes_of_a_throttled_device_are_averaged() -> None:
    # Half of the passes wait for the next period of a CPU quota.
    result, sizes = profile(lambda batch, run: batch * (0.01 if run % 2 else 0.03), 4, 4)
    assert [point.seconds for point in result.points] == pytest.approx([0.02, 0.04, 0.08], rel=0.15)
    assert sizes.count(1) > 20 > 10 > sizes.count(4)


def test_a_decrease_is_measured_again() -> None:
    # Only the first three runs of batch 2 are slow.
    result, sizes = profile(lambda batch, run: 9.0 if batch == 2 and run <= 3 else float(batch), 4, 4, repeats=3)
    assert sizes.count(2) >= 6 and [point.seconds for point in result.points] == [1.0, 2.0, 4.0]


def test_a_decrease_that_remains_is_averaged() -> None:
    result, _ = profile(lambda batch, run: {1: 1.0, 2: 3.0, 4: 2.0}[batch], 4, 4)
    assert [point.seconds for point in result.points] == [1.0, 2.0, 2.0]


def test_a_size_that_fits_only_once_is_rejected() -> None:
    fitted: list[int] = []

    def run(batch: int) -> Timing:
        fitted.append(batch)
        if batch > 7 or (batch == 7 and fitted.count(7) > 1):
            raise MemoryError
        return Timing(float(batch), 0.1)

    abandoned: list[int] = []
    result = profile_device(
        run, 50, state_bytes_to_come=0, device=CPU, abort=lambda: abandoned.append(1), on_progress=lambda _: None
    )
    assert result.max_batch == 6 and result.points[-1].batch == 6 and result.memory_bound
    assert len(abandoned) == fitted.count(8) + fitted.count(7) - 1 + sum(batch > 8 for batch in fitted)


def test_progress_reports_the_next_run() -> None:
    told: list[Any] = []
    _, sizes = profile(lambda batch, run: float(batch), 5, 8, on_progress=told.append, repeats=2)
    assert [progress.batch for progress in told] == sizes
    assert [progress.runs for progress in told] == list(range(len(sizes)))
    assert told[-1].largest == 5 and {progress.action for progress in told} == {"searching", "timing"}


def test_other_errors_are_raised() -> None:
    def run(batch: int) -> Timing:
        raise ValueError("labels do not match")

    with pytest.raises(ValueError, match="labels"):
        profile_device(run, 4, state_bytes_to_come=0, device=CPU)
    with pytest.raises(ValueError, match="repeats=0"):
        profile_device(run, 4, state_bytes_to_come=0, device=CPU, repeats=0)


def test_flops_are_measured() -> None:
    assert 1e8 < peak_flops(CPU) < 1e15
