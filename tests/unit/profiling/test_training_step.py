"""The measured training step runs the user's model on the user's data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


@pytest.mark.parametrize("batch", [torch.ones(2), (torch.ones(2),), (torch.ones(2),) * 3, "text"])
def test_other_kinds_of_batches_need_a_custom_training_step(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"pass training_step=f to the plugin, where f\(model, criterion, batch\)"):
        default_training_step(nn.Identity(), nn.MSELoss(), batch)


def test_a_pair_without_a_criterion_is_an_error() -> None:
    with pytest.raises(TypeError, match="tuple without a criterion"):
        default_training_step(nn.Identity(), None, (torch.ones(2), torch.ones(2)))


def test_any_number_of_samples_can_be_run() -> None:
    """Also more samples than there are, because the largest micro-batch may be larger than a small data set."""
    seen: list[torch.Tensor] = []

    def step(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
        seen.append(batch[0])
        return model(batch[0]).mean()

    model = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(3.0).unsqueeze(1)), batch_size=2)
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    run = TrialRun(model, optimizer, None, step, loader)  # type: ignore[arg-type]
    assert run(2) > 0
    run(7)
    run(1)
    assert [batch.flatten().tolist() for batch in seen] == [[0, 1], [0, 1, 2, 0, 1, 2, 0], [0]]
    assert model.weight.grad is not None


def test_a_data_set_may_return_whole_batches() -> None:
    class Whole(TensorDataset):
        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            return self.tensors[0][indices]

    seen: list[torch.Tensor] = []

    def step(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
        seen.append(batch)
        return model(batch).mean()

    loader = DataLoader(Whole(torch.arange(3.0).unsqueeze(1)), batch_size=2, collate_fn=lambda batch: batch)
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    TrialRun(nn.Linear(1, 1), optimizer, None, step, loader)(4)  # type: ignore[arg-type]
    assert seen[0].flatten().tolist() == [0, 1, 2, 0]
