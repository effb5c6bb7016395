"""The measured step: the user's model and data, kinds of losses, state that trials leave as it is."""

import gc
import math
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_hetero.profiling import optimizer_state
from colossal_hetero.profiling.loss_check import kind_of_loss
from colossal_hetero.profiling.loss_mean import ROUNDING, Evidence, Pair, _Comparison, why_not_samples
from colossal_hetero.profiling.preserved_state import preserved_state
from colossal_hetero.profiling.training_step import TrialRun, default_training_step
from tests.support.snapshots import snapshot


class Transformer(nn.Module):
    def __init__(self, with_loss: bool) -> None:
        super().__init__()
        self.with_loss = with_loss

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        loss = inputs.sum() if self.with_loss and labels is not None else None
        return SimpleNamespace(loss=loss, logits=inputs)


def test_pairs_and_mappings() -> None:
    inputs, labels = torch.ones(2, 3), torch.zeros(2, 3)
    assert default_training_step(nn.Identity(), nn.MSELoss(), (inputs, labels)) == 1.0
    assert default_training_step(nn.Identity(), nn.MSELoss(), [inputs, labels]) == 1.0
    batch = {"inputs": inputs, "labels": labels}
    assert default_training_step(Transformer(True), None, batch) == 6.0
    outputs_and_batch = lambda outputs, batch: (outputs.logits - batch["labels"]).sum() + 1  # noqa: E731
    assert default_training_step(Transformer(False), outputs_and_batch, batch) == 7.0


def trial(model: nn.Module, step: Any, data: Any = None, backward: Any = torch.Tensor.backward, **options) -> TrialRun:
    """Trials on the samples 0, 1 and 2."""
    loader = DataLoader(data or TensorDataset(torch.arange(3.0).unsqueeze(1)), batch_size=2, **options)
    return TrialRun(model, SimpleNamespace(backward=backward), None, step, loader)  # type: ignore[arg-type]


def test_any_number_of_samples_can_be_run_in_training_mode() -> None:
    """Also more samples than there are, because the largest micro-batch may be larger than a small data set."""
    seen: list[tuple[list[float], bool]] = []

    def step(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
        seen.append((batch[0].flatten().tolist(), model.training and model[0].training))
        return model(batch[0]).mean()

    model = nn.Sequential(nn.Linear(1, 1)).eval()
    run = trial(model, step)
    assert run(2) > 0
    run(7), run(1)
    model.eval()
    assert run.loss([0]).shape == ()
    assert seen == [([0, 1], True), ([0, 1, 2, 0, 1, 2, 0], True), ([0], True), ([0], False)]
    assert model[0].weight.grad is not None


class Outputs:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = {"hidden": [values * 2], "logits": values * 3}


def test_trials_keep_outputs_as_the_names_of_a_loop_do() -> None:
    """The outputs exist during backward and the next forward pass, in which the memory of larger ones is reserved."""
    alive: list[weakref.ref] = []
    seen: dict[str, list[Any]] = {"forward": [], "backward": [], "reserved": []}

    class Net(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            seen["forward"].append(sum(each() is not None for each in alive))
            outputs = Outputs(super().forward(inputs))
            alive.append(weakref.ref(outputs.values["logits"]))
            return outputs

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        seen["backward"].append(sum(each() is not None for each in alive))

    def step(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
        return model(batch[0]).values["logits"].mean()

    @contextmanager
    def reserved(size_bytes: int, device: torch.device) -> Iterator[None]:
        seen["reserved"].append(max(size_bytes, 0))
        yield

    run = trial(Net(1, 5), step, backward=backward)
    run.step_bytes = 77
    with patch("colossal_hetero.profiling.training_step.reserved_memory", reserved):
        for samples in (2, 2, 8, 4):
            run(samples)
    assert seen["forward"] == [0, 1, 1, 1] and seen["backward"] == [1, 1, 1, 1]
    # Two tensors of 5 numbers of 4 bytes per sample, and the loss.
    of_two, of_eight = 2 * 2 * 5 * 4 + 4, 8 * 2 * 5 * 4 + 4
    # After the first backward pass of a size, the temporary memory of a step is needed.
    assert seen["reserved"] == [0, 77, 0, of_two * 4 - of_two, 77, 0, 77]
    assert run._kept_bytes == 4 * 2 * 5 * 4 + 4 < of_eight
    run.release()
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_a_failed_trial_keeps_nothing_and_a_data_set_may_return_whole_batches() -> None:
    def fails(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
        if len(batch[0]) > 2:
            raise MemoryError
        return model(batch[0]).mean()

    run = trial(nn.Linear(1, 5), fails)
    run(2)
    assert run._kept
    with pytest.raises(MemoryError):
        run(3)
    assert not run._kept

    class Whole(TensorDataset):
        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            return self.tensors[0][indices]

    seen: list[torch.Tensor] = []
    step = lambda model, criterion, batch: (seen.append(batch), model(batch).mean())[1]  # noqa: E731
    trial(nn.Linear(1, 1), step, Whole(torch.arange(3.0).unsqueeze(1)), collate_fn=lambda batch: batch)(4)
    assert seen[0].flatten().tolist() == [0, 1, 2, 0]


def test_pairs_show_a_mean_over_samples_or_another_one_or_nothing() -> None:
    for pairs, leaves_out, why in (
        ([Pair(0.5, 0.001), Pair(0.501, 0.001)], False, None),
        ([Pair(0.5, 0.001), Pair(0.46, 0.001)], False, ""),  # weights 1 and 1.17
        ([Pair(0.5, 0.001), Pair(0.46, 0.03)], False, None),  # rounding in bfloat16
        ([Pair(0.5, 0.001), Pair(0.2, 0.2)], False, None),  # shows nothing
        ([Pair(0.2, 0.2), Pair(math.nan, math.inf)], False, "no samples could be compared"),  # at ln(classes)
        ([Pair(math.nan, 0.0)], False, ""),  # a sum, or samples compared with each other
        ([Pair(0.75, 0.001)], True, ""),
        ([Pair(0.5, 0.001)], True, "may leave labels out"),  # perhaps all equally many
    ):
        found = why_not_samples([Evidence(), Evidence(tuple(pairs), leaves_out)])
        assert found == why if not why else found is not None and why in found, pairs
        assert why_not_samples([Evidence(tuple(pairs)), Evidence(is_random=True)]) is not None


def test_samples_that_a_loader_changes_at_random_are_compared_all_the_same() -> None:
    model = nn.Linear(2, 1)
    run: Any = SimpleNamespace(
        at_once=1,
        drawn=range,
        batch=lambda indices: torch.rand(len(indices), 2),
        loss_of=lambda images: model(images).square().mean(),
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        criterion=None,
    )
    assert why_not_samples([_Comparison(run, ROUNDING["fp32"]).evidence()]) is None


def test_examples_of_means_and_sums() -> None:
    for one, twice, kind in (
        ((0.7, 0.7), 0.7, "mean"),
        ((0.7, 0.7), 1.4, "sum"),
        ((0.0, 0.0), 0.0, "mean"),
        ((-3.0, -3.0), -6.0, "sum"),
        ((0.703, 0.703), 0.699, "mean"),  # bfloat16
        ((0.0, 0.0), math.log(2), "unknown"),  # one sample against the others of its batch
        ((1.0, 1.0), 1.5, "unknown"),  # a sum and a penalty of the weights
        ((1.0, 1.6), 2.6, "unknown"),  # too random
        ((math.nan, math.nan), math.nan, "not finite"),
        ((1.0, 1.0), math.inf, "not finite"),
    ):
        assert kind_of_loss(one, twice) == kind, (one, twice)


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


def trial_step(model: nn.Module) -> None:
    model(torch.randn(4, 6)).sum().backward()
    random.random(), np.random.rand()


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_trial_step_changes_nothing(gradients: bool) -> None:
    model, optimizer = build()
    trial_step(model)
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
        trial_step(model)
        optimizer.param_groups[0]["lr"] = 5.0
        trial_step(model)
        optimizer.zero_grad()
        trial_step(model)
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
    trial_step(model)
    before = snapshot(model, optimizer)
    had = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value))
    expected = optimizer_state.optimizer_state_bytes(optimizer)
    assert snapshot(model, optimizer) == before and not calls and scheduler.last_epoch == 0
    optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    assert expected == sum(value.nbytes for value in state) - had
    assert optimizer_state.optimizer_state_bytes(optimizer) == 0
    # The temporary memory of a step.
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 3))
    assert optimizer_state.step_temporary_bytes(torch.optim.AdamW(model.parameters())) == 3 * 200 * 4


class Clock:
    now = 0.0


class Slow(torch.optim.AdamW):
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
    assert optimizer_state.optimizer_step_seconds(optimizer) == pytest.approx(7 * 3 + 3 + 5 * 2 + 2)
    for value, former in zip((*first.parameters(), *second.parameters()), before, strict=True):
        assert torch.equal(value, former) and torch.equal(value.grad, torch.ones_like(value))
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert optimizer.state.keys() == state.keys()
    for key, entry in optimizer.state.items():
        assert all(torch.equal(value, state[key][name]) for name, value in entry.items())
    # An optimizer that cannot step on copies has no time.
    monkeypatch.setattr(Slow, "step", Mock(side_effect=IndexError("too few dimensions")))
    assert optimizer_state.optimizer_step_seconds(Slow(nn.Linear(2, 2).parameters(), lr=0.1)) is None
