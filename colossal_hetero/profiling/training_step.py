"""Run one forward and backward pass of the user's model and loss, on samples of the user's dataset."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from colossalai.interface import OptimizerWrapper
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from ..colossalai_support.accelerator import get_accelerator
from .memory import reserved_memory

TrainingStep = Callable[[nn.Module, "Callable | None", Any], torch.Tensor]
"""``(model, criterion, batch) -> mean loss over the batch``, with the batch on the device."""


def default_training_step(model: nn.Module, criterion: Callable | None, batch: Any) -> torch.Tensor:
    """The loss ``criterion(model(inputs), targets)`` of a pair, and of a mapping the ``loss`` of ``model(**batch)`` or,
    without one, ``criterion(outputs, batch)``, as in Colossal-AI's scripts for transformers."""
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
    """Runs trial micro-batches of any size, without drawing from the loader: the samples from ``first`` on, repeated if
    the dataset has fewer, in training mode; :func:`.preserved_state` around them restores it.

    [Note: kept outputs] The names of a loop (``outputs = model(...)``, ``loss``) are bound again only after the next
    forward pass, so the outputs of a micro-batch exist during its backward pass and the next forward pass. A trial
    therefore keeps its outputs and loss until the forward pass of the next one is over. If that is larger, its loop
    would keep more: the difference, by the bytes per sample of the latest outputs, is reserved during the forward pass.
    The optimizer's temporary memory is allocated for a moment after the first backward pass of each size."""

    model: nn.Module
    optimizer: OptimizerWrapper
    criterion: Callable | None
    training_step: TrainingStep
    loader: DataLoader
    step_bytes: int = 0
    first: int = 0
    at_once: int = 1
    """Samples that a loss needs at least; where it is computed of one sample otherwise, that one is repeated."""

    def __post_init__(self) -> None:
        self._samples: dict[int, Any] = {}
        self._stepped: set[int] = set()
        self._kept: list[Any] = []
        self._kept_bytes = 0
        self._sample_bytes = 0.0

    def __call__(self, samples: int) -> float:
        """Run forward and backward of a micro-batch; the seconds of both, without loading the samples."""
        device = get_accelerator().get_current_device()
        self.model.train()
        batch = self.batch(range(self.first, self.first + samples))
        missing = math.ceil(self._sample_bytes * samples) - self._kept_bytes
        try:
            with self._recorded_outputs() as outputs:
                with reserved_memory(missing, device):
                    get_accelerator().synchronize()
                    begin = time.perf_counter()
                    outputs.append(self.training_step(self.model, self.criterion, batch))
                self._keep(outputs)
                self.optimizer.backward(outputs[-1])
                get_accelerator().synchronize()
                seconds = time.perf_counter() - begin
            if samples not in self._stepped:
                with reserved_memory(self.step_bytes, device):
                    self._stepped.add(samples)
        except BaseException:
            self._keep([])
            raise
        self._kept_bytes = _tensor_bytes(outputs, device)
        self._sample_bytes = self._kept_bytes / samples
        return seconds

    def loss(self, indices: Sequence[int]) -> Tensor:
        """The loss of the samples at these indices of the dataset, without gradients, in the model's present mode."""
        return self.loss_of(self.batch(indices))

    def loss_of(self, batch: Any) -> Tensor:
        """As :meth:`loss`, of a batch on the device."""
        with torch.no_grad():
            return self.training_step(self.model, self.criterion, batch)

    def release(self) -> None:
        self._keep([])

    def _keep(self, outputs: list[Any]) -> None:
        self._kept, self._kept_bytes = outputs, 0

    @contextmanager
    def _recorded_outputs(self) -> Iterator[list[Any]]:
        outputs: list[Any] = []
        handle = self.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            yield outputs
        finally:
            handle.remove()

    def batch(self, indices: Sequence[int]) -> Any:
        """The samples at these indices, counted on from the start at the end of the dataset, as a loop gets them."""
        device = get_accelerator().get_current_device()
        batch = self.loader.collate_fn(self._drawn(indices))
        return tree_map(lambda part: part.to(device) if hasattr(part, "to") else part, batch)

    def drawn(self, count: int) -> list[int]:
        """Indices of ``count`` samples at random, fewer if an epoch has fewer; other ones on every rank."""
        loader: Any = self.loader
        return loader.some_samples(count, dist.get_rank())

    def _drawn(self, indices: Sequence[int]) -> Any:
        dataset: Any = self.loader.dataset
        wanted = [index % len(dataset) for index in indices]
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(wanted)
        self._samples.update((index, dataset[index]) for index in wanted if index not in self._samples)
        return [self._samples[index] for index in wanted]


def with_dicts(batch: Any) -> Any:
    """``batch`` with a dict in place of each mapping whose tensors torch does not find, such as a ``BatchEncoding``."""
    return tree_map(
        lambda leaf: {key: with_dicts(value) for key, value in leaf.items()} if isinstance(leaf, Mapping) else leaf,
        batch,
    )


def _tensor_bytes(values: Any, device: torch.device) -> int:
    """Bytes on ``device`` of tensors in containers and attributes, without parameters; shared memory counts once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.device == device and value.layout == torch.strided and not isinstance(value, nn.Parameter):
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif not isinstance(value, (nn.Module, type)):
            waiting.extend(vars(value).values() if hasattr(value, "__dict__") else ())
    return sum(storages.values())
