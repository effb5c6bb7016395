"""How many bytes a part of a model keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["SavedBytes", "saved_bytes"]


@dataclass
class SavedBytes:
    """Storages that autograd has saved, each once, however many tensors look at it."""

    excluded: set[int]
    storages: dict[int, int] = field(default_factory=dict)
    """Bytes by address. All of them live until backward, so no address is used twice."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.storages.values())

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that is kept."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.excluded:
            self.storages[storage.data_ptr()] = storage.nbytes()


@contextmanager
def saved_bytes(excluded: Iterable[Tensor]) -> Iterator[SavedBytes]:
    """Count what forward passes in the block save for backward.

    Args:
        excluded: tensors that are there anyway: parameters, and what is shared by all layers.

    What code keeps by itself, outside of autograd's saved tensors, is not seen.
    """
    saved = SavedBytes({tensor.untyped_storage().data_ptr() for tensor in excluded})

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
