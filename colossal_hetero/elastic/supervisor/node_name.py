"""The name of a node in a job belongs to one supervisor at a time.

The store has a key for each name. Its value says who holds the name, and changes with each beat of the holder. When the
value does not change for ``LEASE_SECONDS``, the holder has ended without a word, and another one may take the name: a
machine that starts again has the same host name as before.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from .store_client import StoreClient, wait_for_store

__all__ = ["BEAT_SECONDS", "LEASE_SECONDS", "NameTaken", "NodeName"]

BEAT_SECONDS = 1.0
LEASE_SECONDS = 6.0
"""Several beats, because a busy machine may be late with some."""
POLL_SECONDS = 0.25


class NameTaken(ValueError):
    """Another supervisor has the name of this node."""


class NodeName:
    """The name ``node`` in ``job``; methods are called by one thread.

    ``say`` writes a message for the user.
    """

    def __init__(self, host: str, port: int, job: str, node: str, say: Callable[[str], None]) -> None:
        self._host, self._port = host, port
        self._job, self._node = job, node
        self._say = say
        self._key = f"colossal_hetero/nodes/{job}/{node}"
        self._holder = f"{uuid.uuid4().hex} process {os.getpid()} on {socket.gethostname()}"
        self._beat = 0
        self._client: StoreClient | None = None

    def claim(self, store_limit_seconds: float) -> None:
        """Wait for the store and take the name.

        Raises:
            TimeoutError: the store could not be reached.
            NameTaken: another supervisor has the name, and runs.
        """
        self._client = wait_for_store(self._host, self._port, store_limit_seconds)
        found = self._take(self._client, "")
        if found is None:
            return
        self._say(f"waiting up to {LEASE_SECONDS:g} s to see whether {_who(found)}, the last node {self._node!r}, runs")
        deadline = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            now = self._take(self._client, "")
            if now is None:  # the holder has given it back
                return
            if now != found:
                raise self._taken(now)
        found = self._take(self._client, found)
        if found is not None:
            raise self._taken(found)

    def renew(self) -> None:
        """Show that this supervisor runs; also after the store was started again.

        Raises:
            OSError: the store cannot be reached; call again later.
            NameTaken: this supervisor was silent for too long, and another one has taken the name.
        """
        if self._client is None:
            self._client = StoreClient(self._host, self._port, BEAT_SECONDS)
        client, self._client = self._client, None
        found = self._take(client, self._value())
        if found == self._value():  # a new store
            found = self._take(client, "")
        self._client = client
        if found is not None:
            raise self._taken(found)

    def give_back(self) -> None:
        """The name is free again. Nothing happens when the store cannot be reached."""
        if self._client is not None:
            with suppress(OSError):
                self._client.compare_set(self._key, self._value(), "")
            self._client.close()

    def _take(self, client: StoreClient, expected: str) -> str | None:
        """Replace ``expected`` by the next value of this holder: None, or what the store has instead."""
        desired = self._value(1)
        found = client.compare_set(self._key, expected, desired)
        if found != desired:
            return found
        self._beat += 1
        return None

    def _value(self, later: int = 0) -> str:
        return f"{self._beat + later} {self._holder}"

    def _taken(self, value: str) -> NameTaken:
        return NameTaken(
            f"node {self._node!r} is already in job {self._job!r}: {_who(value)} has this name. Each node of a job "
            "needs a name of its own: give another one with --node, or another job with --job"
        )


def _who(value: str) -> str:
    """``process 12 on host`` of a value in the store."""
    return value.split(" ", 2)[-1] or "another process"
