"""What a loss is a mean over, from the losses of a few samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from colossal_hetero.profiling.batches.loss_mean import IGNORED, mean_of_labels, mean_of_samples

CLASSES = 5


def over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def over_next_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return over_tokens(logits[:, :-1], labels[:, 1:])


def safe_over_next_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """Divided by at least one, so that it is never nan."""
    shifted = labels[:, 1:]
    total = cross_entropy(logits[:, :-1].flatten(0, 1), shifted.flatten(), reduction="sum")
    return total / (shifted != IGNORED).sum().clamp(min=1)


def over_sequences(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples of each one's mean over its tokens."""
    means = [over_tokens(one[None], own[None]).nan_to_num() for one, own in zip(logits, labels, strict=True)]
    return torch.stack(means).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "loss, expected",
    [
        (over_tokens, "tokens"),
        (over_next_tokens, "next_tokens"),
        (safe_over_next_tokens, "next_tokens"),
        (over_sequences, "other"),
    ],
)
def test_losses_with_ignored_labels(loss: Callable, expected: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 7, CLASSES, generator=generator).to(dtype)
    labels = torch.randint(CLASSES, (1, 7), generator=generator)
    nothing = torch.full_like(labels, IGNORED)
    first = nothing.clone()
    first[0, 0] = 2
    with_nothing = loss(logits.repeat(2, 1, 1), torch.cat([labels, nothing]))
    found = mean_of_labels(*(each.item() for each in (loss(logits, labels), with_nothing, loss(logits, first))))
    assert found == expected


@pytest.mark.parametrize(
    "one, other, both, expected",
    [
        (1.0, 3.0, 2.0, "samples"),
        (1.0, 3.0, 2.01, "samples"),
        (10.9, 10.8, 10.86, "samples"),  # rounding in bfloat16
        (1.0, 3.0, 4.0, "other"),  # a sum
        (1.0, 3.0, 1.4, "other"),  # weighted by classes
        (0.7, 0.7, 1.4, "other"),
        (1.0, math.nan, math.nan, "other"),
    ],
)
def test_losses_of_two_samples(one: float, other: float, both: float, expected: str) -> None:
    assert mean_of_samples(one, other, both) == expected
