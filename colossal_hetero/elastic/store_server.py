"""The store of elastic jobs: the server of torch's ``TCPStore``, on a machine that stays."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore

from .environment import format_address

__all__ = ["start_store"]


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
