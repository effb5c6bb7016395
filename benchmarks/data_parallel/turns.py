"""Common parts of the benchmarks of uneven batches: a model, its data, and training runs that take turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import TensorDataset

from benchmarks.common import Timed

# isort: split
from colossalai.booster import Booster
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase


def digits() -> TensorDataset:
    """scikit-learn's 1797 digits, float32 ``[3, 32, 32]``, and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8.0 - 1.0
    images = interpolate(small, size=(32, 32), mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
    return TensorDataset(images, torch.tensor(found.target))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Turns(Timed):
    """One of several models in training with data-parallel plugins that take turns.

    Args:
        name: name in the table.
        plugin: a plugin of Colossal-AI or ours.
        model: the model, which is boosted here.
        data: the whole data set; each rank samples its part.
        batch_size: samples per rank for Colossal-AI's plugins; without it for ours, which choose it.
    """

    def __init__(
        self, name: str, plugin: DPPluginBase, model: nn.Module, data: TensorDataset, batch_size: int | None = None
    ) -> None:
        self.name = name
        self.plugin = plugin
        self.seconds: list[float] = []
        size = {} if batch_size is None else {"batch_size": batch_size}
        loader = plugin.prepare_dataloader(data, shuffle=True, drop_last=True, **size)
        self._booster = Booster(plugin=plugin)
        self._model, self._optimizer, self._criterion, self._loader, _ = self._booster.boost(
            model, make_optimizer(model), criterion=cross_entropy, dataloader=loader
        )
        self._batches = self._endless()

    def _endless(self) -> Iterator[tuple[Any, bool]]:
        """Batches of all epochs without end, each with whether the optimizer steps after it."""
        epoch = 0
        while True:
            self._loader.sampler.set_epoch(epoch)
            for batch in self._loader:
                current = getattr(self._loader, "current", None)
                yield batch, current is None or current.is_last
            epoch += 1

    @property
    def epoch_iterations(self) -> int:
        """Optimizer steps per epoch, for loaders of our plugins."""
        return self._loader.global_batches

    def iterate(self) -> float:
        """Train until the next optimizer step."""
        start = time.perf_counter()
        is_last = False
        while not is_last:
            (images, labels), is_last = next(self._batches)
            loss: Tensor = self._criterion(self._model(images), labels)
            self._booster.backward(loss, self._optimizer)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return time.perf_counter() - start

    @property
    def division(self) -> str:
        """Samples by rank, for our plugins; otherwise empty."""
        allocation = getattr(self.plugin, "allocation", None)
        return "" if allocation is None else " + ".join(str(share.samples) for share in allocation.shares)
