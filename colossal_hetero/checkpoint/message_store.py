"""Messages between ranks that save in the background. No collectives: an ended rank must not block the others."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from torch.distributed import HashStore, Store

PAUSES_SECONDS = (0.002, 0.1)  # pauses between two looks for messages: the shortest, which doubles up to the longest.


class Stopped(Exception):
    """The saver was closed, or other ranks were lost, while this rank waited."""


class MessageStore:
    """Messages of all ranks, in a store of torch or in memory: by channel, number of the save or round, and name.

    A rank removes its own but for the last two numbers of a channel, since none begins before all ranks have finished
    the one before.
    """

    def __init__(self, store: Store | None, run: str, rank: int, ranks: int, is_broken: Callable[[], bool]) -> None:
        self._store: Store = HashStore() if store is None else store
        self._run, self._rank, self._ranks, self.is_broken = run, rank, ranks, is_broken
        self._closed = threading.Event()
        self._own: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._lock = threading.Lock()

    def put(self, channel: str, number: int, what: str, message: bytes) -> None:
        with self._lock:
            own = self._own[channel]
            own[number].add(what)
            while len(own) > 2:
                oldest = next(iter(own))
                for name in own.pop(oldest):
                    self._store.delete_key(self._name(channel, oldest, name))
            self._store.set(self._name(channel, number, what), message)  # type: ignore[arg-type]

    def get(self, channel: str, number: int, what: str) -> bytes | None:
        """The message, or None if it is not there yet."""
        name = self._name(channel, number, what)
        with self._lock:
            return self._store.get(name) if self._store.check([name]) else None  # type: ignore[attr-defined]

    def wait_for(self, channel: str, number: int, names: Iterable[str], deadline: float) -> dict[str, bytes]:
        """Messages that arrive before ``deadline``, a time of :func:`time.monotonic`, by name."""
        missing, found, pause = list(names), {}, PAUSES_SECONDS[0]
        while True:
            for name in list(missing):
                message = self.get(channel, number, name)
                if message is not None:
                    found[name] = message
                    missing.remove(name)
            if not missing or time.monotonic() > deadline:
                return found
            if self.is_broken() or self._closed.wait(pause):
                raise Stopped
            pause = min(2 * pause, PAUSES_SECONDS[1])

    def say_heard(self, channel: str, number: int) -> None:
        """Tell rank 0 that this rank has what it waited for."""
        if self._rank != 0:
            self.put(channel, number, f"heard-{self._rank}", b"")

    def wait_until_heard(self, deadline: float) -> None:
        """Let rank 0 wait until all ranks know how the last saves and rounds went, since the store may be gone soon."""
        if self._rank == 0:
            for channel, numbers in self._own.items():
                self.wait_for(channel, max(numbers), [f"heard-{rank}" for rank in range(1, self._ranks)], deadline)

    def close(self) -> None:
        """End all waits."""
        self._closed.set()

    def _name(self, channel: str, number: int, what: str) -> str:
        return f"{self._run}/{channel}/{number}/{what}"
