"""The part of torch's store that belongs to one job. Every call ends within a limit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from .connections import cut, open_sockets, peer_port
from .errors import StoreLostError

__all__ = ["JobStore"]

T = TypeVar("T")

LOOKS = 5
"""The guard looks so many times within the limit. It counts looks, not seconds, so that a process that was frozen does
not take its own store for lost."""


class JobStore:
    """Keys of a job in a ``TCPStore`` that another process serves (``colossal-hetero store``).

    A thread watches the calls: a store that is frozen, or behind a broken network, does not answer and does not close
    the connection either. The thread then closes it, and the call raises.

    Args:
        host: name or address of the machine with the store.
        port: its port.
        job: name of the job.
        limit_seconds: longest wait for an answer.

    Raises:
        StoreLostError: by every method, when the store does not answer within the limit.
    """

    def __init__(self, host: str, port: int, job: str, limit_seconds: float) -> None:
        self.host, self.port = host, port
        self._limit = limit_seconds
        self._looks: dict[int, list[int]] = {}  # by thread with a call: how often the guard has seen it
        self._closed = threading.Event()
        before = open_sockets()
        self._store = dist.PrefixStore(f"elastic/{job}", self.connect())
        self._sockets = {each for each in open_sockets() - before if peer_port(each) == port}
        thread = threading.Thread(target=_guard, args=(weakref.ref(self), self._closed, limit_seconds / LOOKS))
        thread.daemon = True
        thread.start()

    def connect(self) -> dist.TCPStore:
        """Another connection to the store, without the prefix of the job."""
        try:
            return dist.TCPStore(
                self.host, self.port, is_master=False, timeout=timedelta(seconds=self._limit), wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            raise self._lost() from error

    def close(self) -> None:
        """End the thread. Calls still work, but without a limit."""
        self._closed.set()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are there."""
        return bool(self._call(self._store.check, list(keys)))  # type: ignore[attr-defined]

    def get(self, key: str) -> bytes:
        """The value of a key, which must be there."""
        return self._call(self._store.get, key)

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._call(self._store.set, key, value)

    def add(self, key: str, number: int) -> int:
        """Add to the number of a key, which is 0 at first; the sum."""
        return int(self._call(self._store.add, key, number))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set the value of a key if its value is ``expected``, or if it has none and that is ``""``; its value now."""
        return self._call(self._store.compare_set, key, expected, value)

    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        thread = threading.get_ident()
        self._looks[thread] = [0]
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise self._lost() from error
        finally:
            del self._looks[thread]

    def _lost(self) -> StoreLostError:
        return StoreLostError(
            f"the store at {self.host}:{self.port} does not answer within {self._limit:g} s, so no world can form; "
            "start it with `colossal-hetero store`, or start it again, and then start the job again from its last "
            "checkpoint"
        )

    def look(self) -> None:
        """Cut the connection if a call has lasted too long."""
        for looks in list(self._looks.values()):
            looks[0] += 1
            if looks[0] > LOOKS:
                cut(self._sockets)


def _guard(reference: weakref.ref[JobStore], closed: threading.Event, pause_seconds: float) -> None:
    while not closed.wait(pause_seconds):
        store = reference()
        if store is None:
            return
        store.look()
        del store
