"""Connections of a world are cut, and nothing else."""

from __future__ import annotations

import socket
import sys

import pytest

from colossal_hetero.elastic.job_store import WorldConnections, open_sockets, peer_port


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return client, server


def is_cut(connection: socket.socket) -> bool:
    connection.settimeout(0.0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("sealed", [True, False])
def test_only_connections_of_the_world_are_cut(sealed: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before, _before = connected(listener)
        world = WorldConnections(size=2)
        with socket.create_server(("127.0.0.1", 0)) as own_listener:
            client, server = connected(own_listener)
            unix, other = socket.socketpair()
            if sealed:
                world.seal()
            after, _after = connected(own_listener)
            world.cut()
            world.cut()
            assert is_cut(client) and is_cut(server)
            assert not is_cut(before)
            assert is_cut(after) != sealed
            other.send(b"!")
            assert unix.recv(1) == b"!"
            own_listener.setblocking(False)
            for number in () if sealed else (0, 1):  # in place of members that do not come
                with own_listener.accept()[0] as answer:
                    assert answer.recv(9) == number.to_bytes(8, sys.byteorder)
            with pytest.raises(BlockingIOError):
                own_listener.accept()
            for each in connected(own_listener):  # it still listens
                each.close()
        for each in (before, _before, client, server, unix, other, after, _after):
            each.close()


def test_the_port_of_a_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        earlier = open_sockets()
        client, server = connected(listener)
        with client, server:
            ports = {peer_port(each) for each in open_sockets() - earlier}
            assert ports == {listener.getsockname()[1], client.getsockname()[1]}
