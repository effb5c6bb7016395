"""The part of torch's store that belongs to one job. Every call ends within a limit."""

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

__all__ = ["JobStore", "OpenSocket", "WorldConnections", "answer", "cut", "open_sockets", "peer_port", "start_store"]


# Connections ---------------------------------------------------------------------------------------------------------
#
# Cut the connections of a world, so that everybody who waits in one of its collectives gets an error.
#
# Gloo cannot abort a collective in torch 2.5. A killed process is noticed at once, because its operating system closes
# its connections. A frozen process, or one behind a broken network, is not. If this process shuts down the half of a
# connection from which it reads, Gloo reads its end, raises in everything that waits for the connection, and closes it.
#
# The other half must stay open. If a thread of Gloo fails to write the answer to a message, the operation that it
# answers for is told nothing, and waits until its time limit.
#
# While Gloo connects a group, one of two members listens for the other. If that dies now, Gloo waits for ever, whatever
# its time limit. So this process connects to its own listening sockets in place of the dead, and closes these
# connections. A member says who it is by a number of 8 bytes, with which each listening socket counts its connections
# from 0.


ANSWER_SECONDS = 1.0
"""Longest time to connect to a socket of this process."""


class OpenSocket(NamedTuple):
    """A socket of this process."""

    descriptor: int
    inode: int
    """Another socket that gets the same descriptor later has another one."""


def open_sockets() -> frozenset[OpenSocket]:
    """All sockets that this process has now."""
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
    """Let nothing arrive any more at those of ``sockets`` that are still open and are TCP connections.

    A socket that listens is left alone: Gloo ends the process when it fails.
    """
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
    """The connections of a world: those that were opened between the construction of this object and :meth:`seal`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._before = open_sockets()
        self._sealed: frozenset[OpenSocket] | None = None
        self._answered: set[OpenSocket] = set()

    def seal(self) -> None:
        """Connections that are opened from now on do not belong to the world."""
        self._sealed = open_sockets() - self._before

    def cut(self) -> None:
        """Cut the connections. Before :meth:`seal`, these are all that were opened up to now; call it again for later
        ones. Then nobody waits any more for a connection of a dead member either."""
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
"""The guard looks so many times within the limit. It counts looks, not seconds, so that a process that was frozen does
not take its own store for lost."""


class JobStore:
    """Keys of a job in a ``TCPStore`` that another process serves (``colossal-hetero store``).

    A thread watches the calls: a store that is frozen, or behind a broken network, does not answer and does not close
    the connection either. The thread then closes it, and the call raises.
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
        """True if all ``keys`` are there."""
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


# Store server --------------------------------------------------------------------------------------------------------


def start_store(host: str | None, port: int) -> tuple[TCPStore, str]:
    """Start the server in this process; the store, which is the server's life, and the address to give to nodes.

    It listens on the address ``host`` only, or on all addresses of this machine; the address for nodes then has the
    name of this machine. With port 0 the system chooses a free port.
    """
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
    """A socket that listens, on IPv4 and IPv6 if ``host`` is None."""
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
