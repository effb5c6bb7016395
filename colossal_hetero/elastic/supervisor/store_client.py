"""A client of torch's ``TCPStore`` that needs no torch: one operation, compare and set.

The supervisor of a node starts at once and stays small because it does not import torch. The messages are those of
``torch/csrc/distributed/c10d/TCPStore.cpp``, with numbers in the byte order of the machine: a query is its number (one
byte) and its arguments, and each text has its length in front (64 bits). ``tests/unit/elastic`` compares with torch's
own client.
"""

from __future__ import annotations

import socket
import struct
import time

from ..environment import format_address

__all__ = ["StoreClient", "wait_for_store"]

_VALIDATE, _COMPARE_SET = 0, 2
_MAGIC = 0x3C85F7CE
_KEY_PREFIX = "/"
_MAX_VALUE_BYTES = 1 << 20
POLL_SECONDS = 0.2


class StoreClient:
    """A connection to the store at ``host`` and ``port``.

    Raises:
        OSError: nobody answers within ``timeout_seconds``, or the answer is not that of a store. After an error of a
            method the connection is closed.
    """

    def __init__(self, host: str, port: int, timeout_seconds: float = 5.0) -> None:
        self._address = format_address(host, port)
        self._socket = socket.create_connection((host, port), timeout_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(struct.pack("=BI", _VALIDATE, _MAGIC))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Give ``key`` the value ``desired`` if its value is ``expected``, or if it has none and ``expected`` is empty.

        Returns the value of ``key`` afterwards; ``expected`` if it has none.
        """
        try:
            texts = (_KEY_PREFIX + key, expected, desired)
            self._socket.sendall(struct.pack("=B", _COMPARE_SET) + b"".join(map(_with_length, texts)))
            (length,) = struct.unpack("=Q", self._receive(8))
            if length > _MAX_VALUE_BYTES:
                raise ConnectionError("what answers there is not a store of torch (TCPStore)")
            return self._receive(length).decode()
        except (OSError, UnicodeDecodeError) as error:
            self.close()
            raise ConnectionError(f"no answer of the store at {self._address}: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _receive(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            piece = self._socket.recv(count - len(received))
            if not piece:
                raise ConnectionError("the connection was closed")
            received += piece
        return received


def wait_for_store(host: str, port: int, limit_seconds: float) -> StoreClient:
    """A connection to the store, as soon as there is one.

    Raises:
        TimeoutError: there is none after ``limit_seconds``; the message has the last reason.
    """
    deadline = time.monotonic() + limit_seconds
    while True:
        try:
            return StoreClient(host, port, max(0.1, min(5.0, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() + POLL_SECONDS > deadline:
                raise TimeoutError(
                    f"the store at {format_address(host, port)} could not be reached within {limit_seconds:g} s (last "
                    f"reason: {error}); start it with `colossal-hetero store` on a machine that stays, check --store, "
                    "or wait longer with --store-timeout"
                ) from None
        time.sleep(POLL_SECONDS)


def _with_length(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("=Q", len(encoded)) + encoded
