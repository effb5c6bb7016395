"""Supervision of a node by two processes, so that either of them can be killed and nothing remains.

The *guard*, which the user has started, forks the *supervising process*, whose children are the workers. If the guard
is killed, the supervising process gets a signal, and ends everything below it. If that is killed, workers end with it,
and the guard ends the processes that they have left. Only if both are killed at once, these may remain. The guard also
forwards signals: the supervising process has a session of its own, so that Ctrl+C reaches workers once.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from ..environment import format_address
from .descendants import adopt_orphans, check_platform, end_descendants, end_with_parent
from .supervise import Launch, Supervisor, describe_status, say, shell_status

__all__ = [
    "BEAT_SECONDS",
    "LEASE_SECONDS",
    "NameTaken",
    "NodeName",
    "StoreClient",
    "launch_node",
    "run_guarded",
    "wait_for_store",
]


# Store client --------------------------------------------------------------------------------------------------------
# Client of torch's ``TCPStore`` without torch, so that the supervisor starts at once and stays small. Messages are
# those of ``torch/csrc/distributed/c10d/TCPStore.cpp`` in the byte order of the machine: a query is its number (one
# byte) and its arguments, and each text has its length in front (64 bits).


_VALIDATE, _COMPARE_SET = 0, 2
_MAGIC = 0x3C85F7CE
_KEY_PREFIX = "/"
_MAX_VALUE_BYTES = 1 << 20
CONNECT_POLL_SECONDS = 0.2


class StoreClient:
    def __init__(self, host: str, port: int, timeout_seconds: float = 5.0) -> None:
        self._address = format_address(host, port)
        self._socket = socket.create_connection((host, port), timeout_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(struct.pack("=BI", _VALIDATE, _MAGIC))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Set ``key`` if its value is ``expected`` (empty: or if it has none); returns its value, or ``expected``."""
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
    deadline = time.monotonic() + limit_seconds
    while True:
        try:
            return StoreClient(host, port, max(0.1, min(5.0, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() + CONNECT_POLL_SECONDS > deadline:
                raise TimeoutError(
                    f"the store at {format_address(host, port)} could not be reached within {limit_seconds:g} s (last "
                    f"reason: {error}); start it with `colossal-hetero store` on a machine that stays, check --store, "
                    "or wait longer with --store-timeout"
                ) from None
        time.sleep(CONNECT_POLL_SECONDS)


def _with_length(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("=Q", len(encoded)) + encoded


# Node name -----------------------------------------------------------------------------------------------------------
# The store has a key for each name of a node, whose value says who holds it, and changes with each beat of the holder.
# If it stays for ``LEASE_SECONDS``, the holder has ended without a word, and another one may take the name: a machine
# that starts again has the same host name as before.


BEAT_SECONDS = 1.0
LEASE_SECONDS = 6.0
POLL_SECONDS = 0.25


class NameTaken(ValueError):
    """Another supervisor has the name of this node."""


class NodeName:
    """The name ``node`` in ``job``; methods are called by one thread. ``say`` writes a message for the user."""

    def __init__(self, host: str, port: int, job: str, node: str, say: Callable[[str], None]) -> None:
        self._host, self._port = host, port
        self._job, self._node = job, node
        self._say = say
        self._key = f"colossal_hetero/nodes/{job}/{node}"
        self._holder = f"{uuid.uuid4().hex} process {os.getpid()} on {socket.gethostname()}"
        self._beat = 0
        self._client: StoreClient | None = None

    def claim(self, store_limit_seconds: float) -> None:
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
        """Show that this supervisor runs; also after the store was started again."""
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
        """Free the name. Nothing happens when the store cannot be reached."""
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
    return value.split(" ", 2)[-1] or "another process"


FORWARDED = (signal.SIGTERM, signal.SIGINT)
GUARD_HAS_ENDED = signal.SIGUSR1


def run_guarded(supervise: Callable[[socket.socket], int], beat: Callable[[], None]) -> int:
    """Call ``supervise(requests)`` in another process, whose exit status is returned; no process below it remains.

    ``beat`` is called here about once each ``BEAT_SECONDS``. When it raises :class:`NameTaken`, the workers are asked
    to end, and the exit status is not 0. With ``OSError`` the workers go on.
    """
    adopt_orphans()
    ours, theirs = socket.socketpair()
    guard = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    process = os.fork()
    if process == 0:
        ours.close()
        _run_supervising_process(supervise, theirs, guard)
    theirs.close()

    def forward(number: int, frame: FrameType | None = None) -> None:
        with suppress(OSError):  # the supervising process has ended
            ours.send(bytes([number]))

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    is_lost = _beat_until_end(ours, beat, forward)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status < 0:
        say(f"the supervising process {process} ended with {describe_status(status)}; its workers end with it")
    if not end_descendants():
        say("some processes could not be ended; they wait for a device or a disk")
    return shell_status(status) or int(is_lost)


def _run_supervising_process(supervise: Callable[[socket.socket], int], requests: socket.socket, guard: int) -> None:
    status = 1
    try:
        os.setsid()
        adopt_orphans()
        for number in FORWARDED:  # the guard says when workers get them
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        signal.signal(GUARD_HAS_ENDED, _end_at_once)
        end_with_parent(guard, GUARD_HAS_ENDED)
        status = supervise(requests)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            end_descendants()
        finally:
            os._exit(status)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    try:
        end_descendants()
    finally:
        os._exit(1)


def _beat_until_end(connection: socket.socket, beat: Callable[[], None], forward: Callable[[int], None]) -> bool:
    """Call ``beat`` until the supervising process ends; true if the name of the node was lost."""
    is_lost = False
    unreachable_since: float | None = None
    connection.settimeout(BEAT_SECONDS)
    while True:
        try:
            if not connection.recv(1):
                return is_lost
        except TimeoutError:
            pass
        except OSError:
            return is_lost
        if is_lost:
            continue
        try:
            beat()
        except NameTaken as error:
            is_lost = True
            say(f"{error}. The workers of this node are asked to end")
            forward(signal.SIGTERM)
        except OSError as error:
            if unreachable_since is None:
                unreachable_since = time.monotonic()
                say(f"the store cannot be reached ({error}); the workers go on as long as they do not need it")
        else:
            if unreachable_since is not None:
                say(f"the store can be reached again, after {time.monotonic() - unreachable_since:.0f} s")
                unreachable_since = None


# Launch node ---------------------------------------------------------------------------------------------------------


def launch_node(launch: Launch, store_limit_seconds: float) -> int:
    check_platform()
    node = launch.node
    name = NodeName(node.store_host, node.store_port, node.job, node.node, say)
    name.claim(store_limit_seconds)
    try:
        return run_guarded(lambda requests: Supervisor(launch, requests).run(), name.renew)
    finally:
        name.give_back()
