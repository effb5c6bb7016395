"""Keeps the state after the last step in a memory file, while the next iteration runs.

[Note: keeping a state] Between two commits (see ``plugin/unequal/commit.py``) nothing changes a parameter. So a state
is noted when an iteration begins, and written from where it is, without another copy. If the process is about to end,
a state that is noted can still be written: by whoever notices it first, also by another thread while the main thread
waits for a rank that has ended. Before a rank agrees to a commit, its file is written. So when a file of the next state
is begun, all ranks have those of the state before, and older files can go.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

import torch
from torch import Tensor

from ...checkpoint.format.pieces import TensorPiece
from ...checkpoint.saving.worker import Worker
from .memory_file import KeptState, write_memory_file
from .memory_folder import FileName, MemoryFolder

__all__ = ["StateKeeper"]

LOOK_SECONDS = 60.0


class StateKeeper:
    """The states of one rank in one world. See [Note: keeping a state].

    Args:
        folder: of the job on this node.
        slot: number of this worker on its node.
        every: how many steps are between two states that are written although nothing happens.
        tidies: whether this worker removes what former worlds have left on its node.
    """

    def __init__(self, folder: MemoryFolder, slot: int, every: int, tidies: bool) -> None:
        self._folder, self._slot, self._every, self._tidies = folder, slot, every, tidies
        self._changed = threading.Condition(threading.RLock())  # held while a state is written
        self._noted: KeptState | None = None
        self._written: FileName | None = None
        self._ready: list[torch.cuda.Event] = []
        self._has_failed = False
        self._worker = Worker("memory files")

    @property
    def version(self) -> int | None:
        """Steps that are done in the state that is noted; None if there is none now."""
        noted = self._noted
        return None if noted is None else noted.name.version

    def note(self, kept: KeptState) -> None:
        """From now on this state can be written, until :meth:`forget`. Nothing in it changes meanwhile."""
        devices = {piece.data.device for piece in kept.pieces if piece.data.is_cuda}
        with self._changed:
            self._noted, self._ready = kept, [torch.cuda.current_stream(device).record_event() for device in devices]
            self._changed.notify_all()
        if self._written is None or kept.name.version % self._every == 0:
            self._worker.submit(self._write)

    def note_again(self, pieces: list[TensorPiece]) -> None:
        """This rank now holds these pieces of the state that is noted, which was written without them."""
        with self._changed:
            if self._noted is not None:
                self._noted, self._written = replace(self._noted, pieces=pieces), None

    def settle(self) -> None:
        """Wait until what is being written is written."""
        while not self._worker.wait(time.monotonic() + LOOK_SECONDS):
            pass

    def forget(self) -> None:
        """The state that is noted is about to change."""
        with self._changed:
            self._noted = None

    def write(self) -> bool:
        """Write the state that is noted, unless it is written; whether it is now. Any thread may call it."""
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
        """Write the state that is noted; if a step is being made, that after the step."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._noted is None and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
            return self.write()

    def close(self) -> None:
        """Training has ended: nothing is written any more."""
        self.settle()
        self.forget()
        self._worker.close()

    def _write(self) -> None:
        """In a thread."""
        self.write()

    def _remove_older(self) -> None:
        """Keep only the latest file of this rank; see [Note: keeping a state]."""
        if self._written is None:
            return
        for file in self._folder.files():
            is_own = file.state.world == self._written.state.world and file.slot == self._slot
            is_former = self._tidies and file.state.world != self._written.state.world
            if is_former or (is_own and file != self._written):
                self._folder.remove(file)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy beside what the main thread has ordered; a kernel that waits for an ended rank does not hold it up."""
        if not tensor.is_cuda:
            return tensor
        stream = torch.cuda.Stream(tensor.device)
        for event in self._ready:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            return tensor.cpu()

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
