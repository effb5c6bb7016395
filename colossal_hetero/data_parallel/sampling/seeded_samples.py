"""Samples whose random augmentation does not depend on which rank, or which of its workers, loads them.

The sampler gives every sample a seed that depends on its place in the order of the epoch, and the data set is asked for
the sample while torch, NumPy and Python draw random numbers from that seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

__all__ = ["DrawnSample", "SeededSamples", "drawn_sample", "seeded"]


class DrawnSample(NamedTuple):
    """What a sampler asks a :class:`SeededSamples` for."""

    number: int
    """In the data set."""
    seed: int
    """Of its augmentation, in [0, 2⁶²)."""


def drawn_sample(index: int, seed: int, epoch: int, place: int) -> DrawnSample:
    """The sample at ``place`` in the order of ``epoch``, of a loader with this ``seed``."""
    # Python's hash of integers is the same in all processes.
    return DrawnSample(index, hash((seed, epoch, place)) % 2**62)


class SeededSamples(Dataset[Any]):
    """``dataset``, also by :class:`DrawnSample`; it has the attributes of ``dataset``."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0] if isinstance(index, DrawnSample) else self.dataset[index]

    def __getitems__(self, drawn: Sequence[DrawnSample]) -> list[Any]:
        """Several samples, as data loaders ask for them."""
        samples = []
        with _random_states_kept():
            for number, seed in drawn:
                _seed(seed)
                samples.append(self.dataset[number])
        return samples

    def __getattr__(self, name: str) -> Any:
        # Unpickling and copying ask for special methods before the data set is there.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


@contextmanager
def seeded(seed: int, generator: Any = None) -> Iterator[None]:
    """In the block, torch, NumPy and Python draw random numbers from ``seed``, and so does a ``torch.Generator``."""
    with _random_states_kept():
        _seed(seed)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        yield


@contextmanager
def _random_states_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes long, for devices that data does not need
    np.random.seed(seed % 2**32)
    random.seed(seed)
