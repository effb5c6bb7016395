"""Writer of the state after the last step to a memory file, while the next iteration runs.

[Note: keeping a state] Between two commits (``plugin/replicas/replica_gradients.py``) nothing changes a parameter. So a
state is noted when an iteration begins, and written from where it is, without another copy. If the process is about to
end, it can still be written by whoever notices it first, also by another thread. Before a rank agrees to a commit, its
file is written. So when a file of the next state is begun, all ranks have those before, and older files can go.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.pieces import TensorPiece
from ..checkpoint.staging import Worker, pinned_memory
from .memory_file import FileName, KeptState, MemoryFolder, write_memory_file

LOOK_SECONDS = 60.0
COMMIT_SECONDS = 2.0  # longest time from when the last rank begins a commit until it has ended on all ranks
CHUNK = 8 << 20  # most bytes that a GPU copies at once


class StateKeeper:
    """The states of one rank in one world. See [Note: keeping a state]."""

    def __init__(self, folder: MemoryFolder, slot: int, every: int, tidies: bool) -> None:
        self._folder, self._slot, self._every, self._tidies = folder, slot, every, tidies
        self._changed = threading.Condition(threading.RLock())  # held while a state is written
        self._noted: KeptState | None = None
        self._written: FileName | None = None
        self._copies: dict[torch.device, _HostCopies] = {}
        self._has_failed = self._commits = self._is_ending = False
        self._worker = Worker("memory files")

    @property
    def version(self) -> int | None:
        """Steps that are done in the state that is noted; None if there is none now."""
        noted = self._noted
        return None if noted is None else noted.name.version

    def note(self, kept: KeptState) -> None:
        """Let this state, in which nothing changes meanwhile, be written until :meth:`forget`."""
        with self._changed:
            self._order(kept.pieces)
            self._noted = kept
            self._changed.notify_all()
        if self._written is None or kept.name.version % self._every == 0:
            self._worker.submit(self._write)

    def note_again(self, pieces: list[TensorPiece]) -> None:
        """Replace the pieces of the noted state, which was written without them."""
        with self._changed:
            if self._noted is not None:
                self._order(pieces)
                self._noted, self._written = replace(self._noted, pieces=pieces), None

    def settle(self) -> None:
        while not self._worker.wait(time.monotonic() + LOOK_SECONDS):
            pass

    @contextmanager
    def commit(self) -> Iterator[None]:
        """In this block, all ranks agree on the next step. When it ends without an error, the noted state is forgotten,
        because the step changes it. After :meth:`write_within`, this waits for ever: the process is about to end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_ending)
            self._commits = True
        try:
            yield
            self.forget()
        finally:
            with self._changed:
                self._commits = False
                self._changed.notify_all()

    def forget(self) -> None:
        with self._changed:
            self._noted = None

    def write(self) -> bool:
        """Write the noted state, unless it is written; true if it is written now. Any thread may call it."""
        with self._changed:
            if self._noted is None:
                return False
            name = FileName(self._noted.name, self._slot)
            if name == self._written:
                return True
            self._remove_older()
            try:
                write_memory_file(self._folder.file(name), self._noted, self._to_host)
            except OSError as error:
                self._report(error)
                return False
            self._written = name
            return True

    def write_within(self, seconds: float) -> bool:
        """Write the noted state before the process ends; if a step is being made, the state after it.

        If this rank waits in a commit, the other ranks may have ended it already, and write the state after it.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._is_ending = True
            self._changed.wait_for(lambda: not self._commits, min(seconds, COMMIT_SECONDS))
            while self._noted is None and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
            return self.write()

    def close(self) -> None:
        self.settle()
        self.forget()
        self._worker.close()

    def _write(self) -> None:
        self.write()

    def _remove_older(self) -> None:
        if self._written is None:
            return
        for file in self._folder.files():
            is_own = file.state.world == self._written.state.world and file.slot == self._slot
            is_former = self._tidies and file.state.world != self._written.state.world
            if is_former or (is_own and file != self._written):
                self._folder.remove(file)

    def _order(self, pieces: list[TensorPiece]) -> None:
        for device in {piece.data.device for piece in pieces if piece.data.is_cuda}:
            if device not in self._copies:
                self._copies[device] = _HostCopies(device)
            self._copies[device].stream.wait_stream(torch.cuda.current_stream(device))

    def _to_host(self, tensor: Tensor) -> Iterator[Tensor]:
        return self._copies[tensor.device].chunks(tensor) if tensor.is_cuda else iter([tensor])

    def _report(self, error: OSError) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        print(
            f"colossal_hetero: the state cannot be kept in memory: {self._folder.path}: {error.strerror}; training "
            "goes on, and after a restart it continues from an older state or from the latest checkpoint",
            file=sys.stderr,
            flush=True,
        )


class _HostCopies:
    """Copies tensors of one GPU beside what the main thread has ordered, also while that waits for an ended rank, whose
    peers' streams do not go on. torch hands out 32 streams of normal priority in turn, to ProcessGroupNCCL too; NCCL
    gets those of high priority only with ``is_high_priority_stream`` or ``TORCH_NCCL_HIGH_PRIORITY``. Streams and
    memory are made in advance, because page-locking memory may wait for all kernels of the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        memory = pinned_memory(2 * CHUNK, device)
        self._halves = [(half, torch.cuda.Event()) for half in memory.split(CHUNK)]

    def chunks(self, tensor: Tensor) -> Iterator[Tensor]:
        """The elements of a tensor, row by row. A chunk is valid until the next; that is copied meanwhile."""
        ordered: tuple[Tensor, torch.cuda.Event] | None = None
        for part, (memory, event) in zip(_parts(tensor), itertools.cycle(self._halves), strict=False):
            with torch.cuda.stream(self.stream):
                copy = memory[: part.numel() * part.element_size()].view(part.dtype).view(part.shape)
                copy.copy_(part, non_blocking=True)
                event.record(self.stream)
            if ordered is not None:
                ordered[1].synchronize()
                yield ordered[0]
            ordered = copy, event
        if ordered is not None:
            ordered[1].synchronize()
            yield ordered[0]


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.numel() * tensor.element_size() <= CHUNK:
        yield tensor
        return
    for part in tensor.chunk(2) if len(tensor) > 1 else tensor.unbind():
        yield from _parts(part)
