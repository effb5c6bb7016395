"""Run one forward and backward pass of the user's model and loss, on samples of the user's dataset."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from colossalai.interface import OptimizerWrapper
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from ..accelerator import get_accelerator

__all__ = ["TrainingStep", "TrialRun", "default_training_step"]

TrainingStep = Callable[[nn.Module, "Callable | None", Any], torch.Tensor]
"""``(model, criterion, batch) -> mean loss over the batch``, with the batch on the device."""


def default_training_step(model: nn.Module, criterion: Callable | None, batch: Any) -> torch.Tensor:
    """The loss for the two common types of batch.

    For a pair ``(inputs, targets)`` it is ``criterion(model(inputs), targets)``. For a mapping it is the ``loss`` of
    ``model(**batch)`` or, if the outputs have no loss, ``criterion(outputs, batch)``, as in Colossal-AI's scripts for
    transformers.

    Raises:
        TypeError: the batch has another type; the message says what to pass to the plugin.
    """
    if isinstance(batch, Mapping):
        outputs = model(**batch)
        loss = getattr(outputs, "loss", None)
        if loss is not None:
            return loss
        if criterion is not None:
            return criterion(outputs, batch)
    elif isinstance(batch, tuple | list) and len(batch) == 2 and criterion is not None:
        inputs, targets = batch
        return criterion(model(inputs), targets)
    kind = type(batch).__name__ + (" without a criterion" if criterion is None else "")
    raise TypeError(
        f"there is no default training step for a batch of type {kind}; pass training_step=f to the plugin, where "
        "f(model, criterion, batch) returns the mean loss"
    )


@dataclass
class TrialRun:
    """Runs trial micro-batches of any size, without drawing from the loader.

    The samples are the first ones of the dataset, repeated if the micro-batch is larger than the dataset.
    """

    model: nn.Module
    optimizer: OptimizerWrapper
    criterion: Callable | None
    training_step: TrainingStep
    loader: DataLoader

    def __post_init__(self) -> None:
        self._samples: list[Any] = []

    def __call__(self, samples: int) -> float:
        """Run forward and backward of a micro-batch; the seconds that they take, without loading the samples."""
        device = get_accelerator().get_current_device()
        batch = tree_map(lambda part: _to(part, device), self.loader.collate_fn(self._first(samples)))
        get_accelerator().synchronize()
        begin = time.perf_counter()
        loss = self.training_step(self.model, self.criterion, batch)
        self.optimizer.backward(loss)
        get_accelerator().synchronize()
        return time.perf_counter() - begin

    def _first(self, samples: int) -> Any:
        """The samples as a ``DataLoader`` passes them to its ``collate_fn``."""
        dataset: Any = self.loader.dataset
        length = len(dataset)
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__([index % length for index in range(samples)])
        while len(self._samples) < min(samples, length):
            self._samples.append(dataset[len(self._samples)])
        return [self._samples[index % length] for index in range(samples)]


def _to(part: Any, device: torch.device) -> Any:
    return part.to(device) if isinstance(part, torch.Tensor) else part
