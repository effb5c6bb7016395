"""The fewest samples that a model trains with are found by torch's error message."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colossal_hetero.profiling.rank_profiler import is_too_few_samples, smallest_batch


def normalized(samples: int, per_sample: int = 1) -> torch.Tensor:
    return nn.BatchNorm1d(3)(torch.randn(samples // per_sample, 3))


@pytest.mark.parametrize(("per_sample", "expected"), [(1, 2), (2, 4), (3, 8)])
def test_more_samples_are_tried_until_a_batch_normalization_runs(per_sample: int, expected: int) -> None:
    aborted: list[None] = []
    found = smallest_batch(
        lambda samples: normalized(max(samples, per_sample), per_sample), 64, lambda: aborted.append(None)
    )
    assert found == expected and len(aborted) == [1, 2, 3, 4, 8].index(expected)


def test_models_without_batch_normalization_run_one_sample() -> None:
    assert smallest_batch(lambda samples: nn.Linear(3, 3)(torch.randn(samples, 3)), 1, pytest.fail) == 1


def test_more_samples_than_allowed() -> None:
    with pytest.raises(ValueError, match=r"micro-batches of at least 2 samples.*GroupNorm") as caught:
        smallest_batch(normalized, 1, lambda: None)
    assert is_too_few_samples(caught.value)


def test_pairs_and_triplets() -> None:
    def run(samples: int) -> None:
        if samples % at_once:
            raise ValueError(f"cannot be divided by {at_once}")

    for at_once in (2, 3, 4):
        assert smallest_batch(run, 64, lambda: None) == at_once
        with pytest.raises(ValueError, match=f"divided by {at_once}"):
            smallest_batch(run, at_once - 1, lambda: None)


def test_other_errors_are_those_of_one_sample() -> None:
    def fail(samples: int) -> None:
        tried.append(samples)
        raise ValueError(f"no such label in {samples} samples")

    tried: list[int] = []
    with pytest.raises(ValueError, match="in 1 samples"):
        smallest_batch(fail, 64, lambda: None)
    assert tried == [1, 2, 3, 4]
    tried.clear()
    with pytest.raises(MemoryError):
        smallest_batch(out_of_memory, 64, pytest.fail)


def out_of_memory(samples: int) -> None:
    raise MemoryError
