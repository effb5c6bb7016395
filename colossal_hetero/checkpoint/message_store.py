"""Messages between ranks that save in the background. No collectives: an ended rank must not block the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from torch.distributed import HashStore, Store

__all__ = ["Interruption", "MessageStore", "Stopped"]

PAUSES_SECONDS = (0.002, 0.1)
"""Pauses between two looks for messages: the shortest, which doubles up to the longest."""


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


class MessageStore:
    """Messages by name, in a store of torch or in memory; a name is used once."""

    def __init__(self, store: Store | None, stop: Interruption) -> None:
        self._store: Store = HashStore() if store is None else store
        self._stop = stop
        self._lock = threading.Lock()

    def put(self, name: str, message: bytes) -> None:
        with self._lock:
            self._store.set(name, message)  # type: ignore[arg-type]

    def get(self, name: str) -> bytes | None:
        """The message, or None if it is not there yet."""
        with self._lock:
            return self._store.get(name) if self._store.check([name]) else None  # type: ignore[attr-defined]

    def discard(self, name: str) -> None:
        with self._lock:
            self._store.delete_key(name)

    def wait_for(self, names: Iterable[str], deadline: float) -> dict[str, bytes]:
        """Messages that arrive before ``deadline``, a time of :func:`time.monotonic`."""
        missing, found, pause = list(names), {}, PAUSES_SECONDS[0]
        while True:
            for name in list(missing):
                message = self.get(name)
                if message is not None:
                    found[name] = message
                    missing.remove(name)
            if not missing or time.monotonic() > deadline:
                return found
            if self._stop.wait(pause):
                raise Stopped
            pause = min(2 * pause, PAUSES_SECONDS[1])
