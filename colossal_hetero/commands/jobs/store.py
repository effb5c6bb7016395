"""``colossal-hetero store``: the store through which the nodes of an elastic job find each other."""

from __future__ import annotations

import signal

import click

from ..common import errors_on_one_line

__all__ = ["store"]

DEFAULT_PORT = 29400


@click.command()
@click.option("--host", help="Listen on this address of the machine only; default: on all of them.")
@click.option(
    "--port", type=int, default=DEFAULT_PORT, show_default=True, help="Port to listen on; 0 means any free port."
)
def store(host: str | None, port: int) -> None:
    """Run the store of elastic jobs on this machine, which must stay; SIGINT (Ctrl+C) or SIGTERM ends it.

    Prints the address for `colossal-hetero launch --store`. There is no password: use a network that only your machines
    can reach.
    """
    ending = {signal.SIGINT, signal.SIGTERM}
    with errors_on_one_line():
        signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # also in the threads of the server
        try:
            from ...elastic.store_server import start_store

            server, address = start_store(host, port)
            click.echo(address)
            signal.sigwait(ending)
            del server
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
