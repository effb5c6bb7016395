"""Count the bytes that a part of a model keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["SavedBytes", "saved_bytes"]


@dataclass
class SavedBytes:
    """Storages that autograd has saved; a storage that several tensors share counts once."""

    excluded: set[int]
    """Addresses of storages that do not count."""
    storages: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage, by address. All live until backward, so an address is not used again."""

    @property
    def total(self) -> int:
        """Bytes of all storages."""
        return sum(self.storages.values())

    def total_without(self, tensor: Tensor) -> int:
        """Bytes of all storages except that of ``tensor``."""
        return self.total - self.storages.get(tensor.untyped_storage().data_ptr(), 0)

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.excluded:
            self.storages[storage.data_ptr()] = storage.nbytes()


@contextmanager
def saved_bytes(excluded: Iterable[Tensor]) -> Iterator[SavedBytes]:
    """Count the tensors that forward passes in the block save for backward.

    Tensors that a model keeps itself, outside of autograd's saved tensors, are not counted.

    Args:
        excluded: tensors that exist anyway: parameters, and tensors that all layers share.
    """
    saved = SavedBytes({tensor.untyped_storage().data_ptr() for tensor in excluded})

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
