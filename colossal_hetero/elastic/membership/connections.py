"""Cut the connections of a world, so that everybody who waits in one of its collectives gets an error.

Gloo cannot abort a collective in torch 2.5. A killed process is noticed at once, because its operating system closes
its connections. A frozen process, or one behind a broken network, is not. If this process shuts down the half of a
connection from which it reads, Gloo reads its end, raises in everything that waits for the connection, and closes it.

The other half must stay open. If a thread of Gloo fails to write the answer to a message, the operation that it answers
for is told nothing, and waits until its time limit.

While Gloo connects a group, one of two members listens for the other. If that dies now, Gloo waits for ever, whatever
its time limit. So this process connects to its own listening sockets in place of the dead, and closes these
connections. A member says who it is by a number of 8 bytes, with which each listening socket counts its connections
from 0.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["OpenSocket", "WorldConnections", "answer", "cut", "open_sockets", "peer_port"]

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
    """The connections of a world: those that were opened between the construction of this object and :meth:`seal`.

    Args:
        size: number of the world's members.
    """

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
