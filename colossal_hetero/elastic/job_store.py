"""Part of torch's store that belongs to one job. Every call ends within a limit."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore

from .environment import format_address
from .world import StoreLostError

# Gloo cannot abort a collective in torch 2.5. The system closes the connections of a killed process, but not those of
# one that is frozen or behind a broken network. If this process shuts down the half of a connection from which it
# reads, Gloo raises in everything that waits for the connection; the other half stays open for answers. While Gloo
# connects a group, one of two members listens for the other, and waits for ever if that dies, so this process connects
# to its own listening sockets in place of the dead. A member says who it is by a number of 8 bytes, with which each
# listening socket counts its connections from 0.


ANSWER_SECONDS = 1.0  # longest time to connect to a socket of this process


class OpenSocket(NamedTuple):
    descriptor: int
    inode: int  # distinguishes the socket from a later one with the same descriptor


def open_sockets() -> frozenset[OpenSocket]:
    found = set()
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed since it was listed
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add(OpenSocket(int(name), status.st_ino))
    return frozenset(found)


def peer_port(open_socket: OpenSocket) -> int | None:
    """The port to which a TCP connection leads; None if the socket is not a connection."""
    try:
        with socket.socket(fileno=os.dup(open_socket.descriptor)) as other:
            return int(other.getpeername()[1]) if other.family in (socket.AF_INET, socket.AF_INET6) else None
    except OSError:
        return None


def cut(sockets: Iterable[OpenSocket]) -> None:
    """Let nothing arrive any more at open TCP connections. Listeners stay: Gloo ends the process when they fail."""
    now = open_sockets()
    for each in sockets:
        if each not in now:
            continue
        try:
            with socket.socket(fileno=os.dup(each.descriptor)) as other:
                is_tcp = other.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and not other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    other.shutdown(socket.SHUT_RD)
        except OSError:  # closed meanwhile, or not connected
            continue


def answer(listeners: Iterable[OpenSocket], size: int) -> None:
    """Connect to those of ``listeners`` that listen for TCP connections, as ``size`` members would, and close."""
    for each in listeners:
        try:
            with socket.socket(fileno=os.dup(each.descriptor)) as other:
                is_tcp = other.family in (socket.AF_INET, socket.AF_INET6)
                if not is_tcp or not other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                for number in range(size):
                    with socket.create_connection(other.getsockname()[:2], ANSWER_SECONDS) as connection:
                        connection.sendall(struct.pack("@q", number))
        except OSError:  # closed meanwhile
            continue


class WorldConnections:
    """Connections of a world: those that were opened between the construction and :meth:`seal`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._before = open_sockets()
        self._sealed: frozenset[OpenSocket] | None = None
        self._answered: set[OpenSocket] = set()

    def seal(self) -> None:
        """Exclude connections that are opened from now on."""
        self._sealed = open_sockets() - self._before

    def cut(self) -> None:
        """Cut the connections, and answer listeners. Before :meth:`seal`, call it again for later connections."""
        if self._sealed is not None:
            cut(self._sealed)
            return
        opened = open_sockets() - self._before
        cut(opened)
        new = opened - self._answered
        self._answered |= new
        answer(new, self._size)


T = TypeVar("T")

LOOKS = 5
"""Looks of the guard within the limit. It counts no seconds: a frozen process must not take its store for lost."""


class JobStore:
    """Keys of a job in a ``TCPStore`` that another process serves (``colossal-hetero store``).

    A thread watches the calls. A store that is frozen, or behind a broken network, does not answer and does not close
    the connection: the thread closes it, and the call raises.
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
        return bool(self._call(self._store.check, list(keys)))  # type: ignore[attr-defined]

    def get(self, key: str) -> bytes:
        return self._call(self._store.get, key)

    def set(self, key: str, value: str) -> None:
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


def start_store(host: str | None, port: int) -> tuple[TCPStore, str]:
    """Start the server, on all addresses without a ``host``; returns the store, whose end ends it, and its address."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port} does not exist; valid are 1 to 65535, and 0 for any free port")
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    if host is None:
        listener.close()  # torch's usual server, that of libuv, takes no socket; it listens on all addresses
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        return store, format_address(socket.gethostname(), port)
    descriptor = listener.detach()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=False)
    return store, format_address(host, port)


def _listen(host: str | None, port: int) -> socket.socket:
    try:
        if host is None:
            return socket.create_server(
                ("", port),
                family=socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET,
                dualstack_ipv6=socket.has_dualstack_ipv6(),
                backlog=1024,
            )
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        where = format_address(host, port) if host else f"port {port}"
        raise OSError(
            f"no store can listen on {where}: {error.strerror or error}; give another --port, or as --host an address "
            "of this machine"
        ) from None
