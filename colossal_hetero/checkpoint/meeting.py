"""Messages between ranks that save in the background. No collectives: an ended rank must not block the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from torch.distributed import Store

from .storage import FileOperations, remove_all, write_file

__all__ = ["FolderMeeting", "Interruption", "Meeting", "MemoryMeeting", "Stopped", "StoreMeeting", "wait_for"]

PAUSES_SECONDS = (0.002, 0.1)
"""Pauses between two looks for messages: the shortest, which doubles up to the longest."""


class Meeting(Protocol):
    """Messages by name. A name is used once."""

    def put(self, name: str, message: bytes) -> None:
        """Leave a message."""

    def get(self, name: str) -> bytes | None:
        """The message, or None if it is not there yet."""

    def discard(self, name: str) -> None:
        """Forget a message, if it is there."""


class Stopped(Exception):
    """The saver was closed, or other ranks were lost, while this rank waited."""


class Interruption:
    def __init__(self, is_broken: Callable[[], bool] = lambda: False) -> None:
        self._closed = threading.Event()
        self.is_broken = is_broken

    def set(self) -> None:
        self._closed.set()

    def wait(self, seconds: float) -> bool:
        """True if waits end, after ``seconds`` at most."""
        return self.is_broken() or self._closed.wait(seconds)


class MemoryMeeting:
    def __init__(self) -> None:
        self._messages: dict[str, bytes] = {}

    def put(self, name: str, message: bytes) -> None:
        self._messages[name] = message

    def get(self, name: str) -> bytes | None:
        return self._messages.get(name)

    def discard(self, name: str) -> None:
        self._messages.pop(name, None)


class StoreMeeting:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()

    def put(self, name: str, message: bytes) -> None:
        with self._lock:
            self._store.set(name, message)  # type: ignore[arg-type]

    def get(self, name: str) -> bytes | None:
        with self._lock:
            return self._store.get(name) if self._store.check([name]) else None  # type: ignore[attr-defined]

    def discard(self, name: str) -> None:
        with self._lock:
            self._store.delete_key(name)


class FolderMeeting:
    """Messages as files in a folder that all ranks see."""

    def __init__(self, folder: Path, files: FileOperations | None = None) -> None:
        self._folder = folder
        self._files = files or FileOperations()

    def put(self, name: str, message: bytes) -> None:
        self._files.make_folder(self._folder)
        write_file(self._files, self._path(name), message)

    def get(self, name: str) -> bytes | None:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            return None

    def discard(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        remove_all(self._files, self._folder)

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "-")


def wait_for(meeting: Meeting, names: Iterable[str], deadline: float, stop: Interruption) -> dict[str, bytes]:
    """Messages that arrive before ``deadline``, a time of :func:`time.monotonic`."""
    missing, found, pause = list(names), {}, PAUSES_SECONDS[0]
    while True:
        for name in list(missing):
            message = meeting.get(name)
            if message is not None:
                found[name] = message
                missing.remove(name)
        if not missing or time.monotonic() > deadline:
            return found
        if stop.wait(pause):
            raise Stopped
        pause = min(2 * pause, PAUSES_SECONDS[1])
