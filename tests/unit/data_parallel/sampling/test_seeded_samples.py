"""Augmentation of a sample depends on the epoch and its place in it, not on who loads it."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from colossal_hetero.data_parallel.loader import make_loader
from colossal_hetero.data_parallel.sampler import SeededSamples

pytestmark = pytest.mark.unit


class Noisy(Dataset[Tensor]):
    """Each sample is its index and random numbers of torch, NumPy and Python."""

    name = "noisy"

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(()), torch.tensor(np.random.rand()), torch.tensor(random.random())
        return torch.stack([torch.tensor(float(index)), *(each.float() for each in noise)])


def drawn(division: Sequence[int], num_workers: int = 0, epoch: int = 0, seed: int = 7) -> Tensor:
    """All samples of an epoch in its order, each loaded by its rank."""
    parts = []
    for rank in range(len(division)):
        loader = make_loader(
            *(Noisy(), 10, rank, len(division)), shuffle=True, seed=seed, num_workers=num_workers, seeds_samples=True
        )
        loader.divide_by(lambda samples: [[size] for size in division])
        loader.set_epoch(epoch)
        parts.append(list(loader))
    return torch.cat([torch.cat(batches) for batches in zip(*parts, strict=True)])


@pytest.mark.parametrize(("division", "num_workers"), [((3, 7), 0), ((5, 1, 4), 0), ((3, 7), 2)])
def test_samples_do_not_depend_on_the_division(division: tuple[int, ...], num_workers: int) -> None:
    expected = drawn([10])
    assert torch.equal(drawn(division, num_workers), expected)
    assert len(torch.unique(expected[:, 1])) == len(expected)


def test_epochs_and_seeds_differ() -> None:
    by_index = [each[each[:, 0].argsort()] for each in (drawn([10]), drawn([10], epoch=1), drawn([10], seed=8))]
    for other in by_index[1:]:
        assert torch.equal(by_index[0][:, 0], other[:, 0])
        assert not (by_index[0][:, 1:] == other[:, 1:]).any()


def test_a_resumed_epoch_draws_the_same() -> None:
    loader = make_loader(Noisy(), 10, 0, 1, shuffle=True, seed=7, seeds_samples=True)
    loader.divide_by(lambda samples: [[samples]])
    loader.load_state_dict({**loader.state_dict(), "global_batches_done": 1})
    assert torch.equal(torch.cat(list(loader)), drawn([10])[10:])


def test_the_random_states_of_the_process_are_kept() -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    loader = make_loader(Noisy(), 10, 0, 1, seeds_samples=True)
    loader.divide_by(lambda samples: [[samples]])
    batches = iter(loader)
    before = states()
    next(batches)
    assert states() == before


def test_a_wrapped_data_set_is_used_as_before() -> None:
    data = SeededSamples(Noisy())
    for each in (data, copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert each.name == "noisy" and len(each) == 20 and each[3][0] == 3
    with pytest.raises(AttributeError, match="other"):
        _ = data.other
