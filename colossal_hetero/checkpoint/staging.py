"""The copy in host memory from which a save writes while training goes on."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from numpy import uint8
from numpy.typing import NDArray
from torch import Tensor

from .pieces import TensorPiece

ALIGNMENT = 64


class _Pages(mmap.mmap):
    """Whole pages of memory. No two registrations may share a page."""

    unregister: Callable[[int], Any] | None = None
    address = 0

    def __del__(self) -> None:  # when no tensor uses the memory; it is unmapped after this
        if self.unregister is not None:
            self.unregister(self.address)


def pinned_memory(size: int, device: torch.device) -> Tensor:
    """Bytes of the host that a GPU copies to by itself; ordinary memory, with slower copies, where that is refused.

    torch's own page-locked memory is rounded up to a power of two, and torch keeps it after it is released.
    """
    pages = _Pages(-1, max(size, 1))
    memory = torch.frombuffer(pages, dtype=torch.uint8, count=max(size, 1))[:size]
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(memory.data_ptr(), len(pages), 0)) == 0:
        pages.unregister, pages.address = cudart.cudaHostUnregister, memory.data_ptr()
        return memory
    with suppress(RuntimeError):  # CUDA reports the refusal a second time, after the next kernel that is launched
        torch.ones(1, device=device)
    return memory


class StagingBuffer:
    """Memory of the host that is kept between saves; page-locked, if that is possible, where a piece is on a GPU.

    :meth:`copy` only orders copies from a GPU, which the current stream makes before later work; :meth:`finish` waits.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_for_gpus = False
        self._events: list[Any] = []

    def copy(self, pieces: Sequence[TensorPiece]) -> list[NDArray[uint8]]:
        """Copy the pieces; returns the memory of each, ``[bytes]``, row by row, valid until the next call."""
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += -(-piece.data.numel() * piece.data.element_size() // ALIGNMENT) * ALIGNMENT
        devices = {piece.data.device for piece in pieces if piece.data.is_cuda}
        if self._memory.numel() < end or (devices and not self._is_for_gpus):
            self.finish()
            self._memory = torch.empty(0, dtype=torch.uint8)  # released before the new memory is taken
            self._is_for_gpus = bool(devices)
            self._memory = pinned_memory(end, next(iter(devices))) if devices else torch.empty(end, dtype=torch.uint8)
        copies = []
        with torch.no_grad():
            for piece, start in zip(pieces, starts, strict=True):
                source = piece.data.detach()
                copied = self._memory[start : start + source.numel() * source.element_size()]
                copied.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
                copies.append(copied.numpy())
        self._events = []
        for device in devices:
            self._events.append(torch.cuda.Event())
            self._events[-1].record(torch.cuda.current_stream(device))
        return copies

    def finish(self) -> None:
        """Wait until everything is copied; any thread may call it."""
        for event in self._events:
            event.synchronize()

    def __del__(self) -> None:
        self.finish()  # a GPU may still copy to the memory, which is unmapped now


class Worker:
    """Runs jobs one after another. The thread does not keep the process alive, so a write that hangs cannot either."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        return self._jobs.unfinished_tasks == 0

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise an error, after those before it."""
        self._jobs.put(job)

    def wait(self, deadline: float) -> bool:
        """True if all jobs are done before ``deadline``, a time of :func:`time.monotonic`."""
        with self._jobs.all_tasks_done:
            return self._jobs.all_tasks_done.wait_for(lambda: self.is_idle, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End the thread after its jobs, if no write hangs: in a store of torch, it would abort the process's end."""
        self._jobs.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                job()
            finally:
                self._jobs.task_done()
