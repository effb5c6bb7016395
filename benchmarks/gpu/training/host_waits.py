"""Find where the host waits for the device although nothing asks it to: hidden synchronizations."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostWait", "host_waits"]

aten = torch.ops.aten
READS = (
    *(aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.nonzero_numpy, aten.masked_select),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount),
)
"""Operations whose result, or its size, the host has to know. ``item``, ``float`` and ``if`` use the first."""

INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
"""The same if an index is boolean."""

ON_THE_HOST = ("balance/host_messages.py",)
"""Files whose tensors are on the host, whatever the device of the model."""

_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class HostWait:
    """A moment at which the host waited for the device."""

    place: str
    """The innermost line of Python outside of torch, such as ``balance/apply.py:120``."""
    files: tuple[str, ...]
    """The files of all calls that led there, innermost first."""

    def is_in(self, *ends: str) -> bool:
        """Whether a call that led there is in a file whose path ends like this."""
        return any(file.endswith(ends) for file in self.files)


@contextmanager
def host_waits(device: torch.device) -> Iterator[list[HostWait]]:
    """Collect in the list, within the block, where this process waits for ``device``.

    On a GPU it listens to the warnings of ``torch.cuda.set_sync_debug_mode``, which notices copies between host and
    device as well as operations that need a result on the host. In a backward pass it sees them at the end, without the
    line. On a CPU nobody waits; there it records operations that would wait on a GPU, but no copies, and not those of
    :data:`ON_THE_HOST`.
    """
    waits: list[HostWait] = []
    if device.type != "cuda":
        with _RecordReads(waits):
            yield waits
        return

    def record(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits.append(_this_wait())

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _RecordReads(TorchDispatchMode):
    """Records operations that make the host wait for a GPU, also those of backward passes."""

    def __init__(self, waits: list[HostWait]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(func.overloadpacket, args):
            wait = _this_wait()
            if not wait.is_in(*ON_THE_HOST):
                self._waits.append(wait)
        return func(*args, **(kwargs or {}))


def _reads(operation: Any, args: Any) -> bool:
    if operation in INDEXING:
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return operation in READS


def _this_wait() -> HostWait:
    frames = [frame for frame in _frames() if not frame.f_code.co_filename.startswith((_TORCH, __file__))]
    frames = [frame for frame in frames if not frame.f_code.co_filename.endswith("warnings.py")]
    if not frames:
        return HostWait("in a thread of torch", ())
    files = tuple(frame.f_code.co_filename for frame in frames)
    return HostWait(f"{'/'.join(Path(files[0]).parts[-2:])}:{frames[0].f_lineno}", files)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
