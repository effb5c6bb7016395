"""An allocator of a simulated device, which counts the bytes of the tensors that a CPU makes."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CountedMemory"]


class CountedMemory(TorchDispatchMode):
    """Counts storages from the operation that makes them until they are released, while it is active (``with``)."""

    def __init__(self, outside_bytes: int = 0) -> None:
        super().__init__()
        self._used = self._peak = 0
        self._outside = outside_bytes
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            address, size = storage.data_ptr(), storage.nbytes()
            if size and address not in given and address not in self._alive:
                self._alive[address] = weakref.finalize(storage, self._release, address, size)
                self._used += size
                self._peak = max(self._peak, self._used)
        return result

    def _release(self, address: int, size: int) -> None:
        del self._alive[address]
        self._used -= size

    def used_bytes(self) -> int:
        return self._used

    def reset_peak(self) -> None:
        self._peak = self._used

    def peak_bytes(self) -> int:
        return self._peak

    def outside_bytes(self) -> int:
        return self._outside


def _storages(values: Any) -> list[UntypedStorage]:
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor) and not isinstance(each, FakeTensor)]
    return [each.untyped_storage() for each in tensors]
