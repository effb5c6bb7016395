"""The measured step runs the user's model on the user's data; kinds of losses; lines of progress."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_hetero.profiling.loss_check import MAX_NOISE, kind_of_loss
from colossal_hetero.profiling.loss_mean import ROUNDING, Evidence, Pair, _Comparison, why_not_samples
from colossal_hetero.profiling.training_step import TrialRun, default_training_step


class Transformer(nn.Module):
    """Has the call signature of models of ``transformers``."""

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

    # Other kinds of batches need a custom training step.
    for other in (torch.ones(2), (torch.ones(2),), (torch.ones(2),) * 3, "text"):
        with pytest.raises(TypeError, match=r"pass training_step=f to the plugin, where f\(model, criterion, batch\)"):
            default_training_step(nn.Identity(), nn.MSELoss(), other)
    with pytest.raises(TypeError, match="tuple without a criterion"):
        default_training_step(nn.Identity(), None, (torch.ones(2), torch.ones(2)))


def trial(
    model: nn.Module, step: Any, data: Any = None, backward: Any = torch.Tensor.backward, **options: Any
) -> TrialRun:
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
    """What a model returns; tensors are in attributes."""

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


losses = st.floats(1e-6, 1e6) | st.floats(-1e6, -1e-6)


@given(losses, st.floats(-MAX_NOISE / 2.1, MAX_NOISE / 2.1))
def test_means_and_sums_are_told_apart_in_spite_of_noise(loss: float, noise: float) -> None:
    one = (loss * (1 - noise / 2), loss * (1 + noise / 2))
    for deviation in (-noise, 0.0, noise):
        assert kind_of_loss(one, loss * (1 + deviation)) == "mean"
        assert kind_of_loss(one, 2 * loss * (1 + deviation / 2)) == "sum"


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
