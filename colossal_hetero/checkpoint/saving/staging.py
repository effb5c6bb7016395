"""The copy in host memory from which a save writes while training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from numpy import uint8
from numpy.typing import NDArray

from ..format.pieces import TensorPiece

__all__ = ["StagingBuffer"]

ALIGNMENT = 64


class StagingBuffer:
    """Memory of the host that is kept between saves; page-locked if a piece is on a GPU.

    A copy from a GPU has only been ordered when :meth:`copy` returns: the current stream makes it before later work,
    which so cannot change what is copied. :meth:`finish` waits for it.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._events: list[Any] = []

    def copy(self, pieces: Sequence[TensorPiece]) -> list[NDArray[uint8]]:
        """Copy the pieces. Returns the memory of each: ``[bytes]``, row by row, valid until the next call."""
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += -(-piece.data.numel() * piece.data.element_size() // ALIGNMENT) * ALIGNMENT
        devices = {piece.data.device for piece in pieces if piece.data.is_cuda}
        if self._memory.numel() < end or (devices and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # released before the new memory is taken
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=bool(devices))
        copies = []
        with torch.no_grad():
            for piece, start in zip(pieces, starts, strict=True):
                source = piece.data.detach()
                copied = self._memory[start : start + source.numel() * source.element_size()]
                copied.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
                copies.append(copied.numpy())
        self._events = _record(devices)
        return copies

    def finish(self) -> None:
        """Wait until everything is copied; any thread may call it."""
        for event in self._events:
            event.synchronize()


def _record(devices: Iterable[torch.device]) -> list[Any]:
    events = []
    for device in devices:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events
