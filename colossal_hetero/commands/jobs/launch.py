"""``colossal-hetero launch``: the workers of one node of an elastic job."""

from __future__ import annotations

import socket
from pathlib import Path

import click

from ..common import Finite, errors_on_one_line

__all__ = ["launch"]


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--store", required=True, metavar="HOST:PORT", help="Address that `colossal-hetero store` has printed.")
@click.option("--job", default="default", show_default=True, help="Name of the job. Several jobs can share a store.")
@click.option("--node", help="Name of this node, unique in the job; default: the host name.")
@click.option(
    "--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Number of workers on this node."
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How often each worker that ends with an error is started again.",
)
@click.option(
    "--grace",
    type=Finite(min=0),
    default=30,
    show_default=True,
    help="Seconds from the first signal until workers that have not ended are killed.",
)
@click.option(
    "--store-timeout",
    type=Finite(min=0),
    default=60,
    show_default=True,
    help="Seconds to wait for the store at the start.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    store: str,
    job: str,
    node: str | None,
    nproc: int,
    max_restarts: int,
    grace: float,
    store_timeout: float,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGUMENTS as the workers of this node of an elastic job. Start it on each node.

    A worker that ends with an error is started again, and the others go on. SIGTERM and SIGINT are forwarded to the
    workers. The exit code is 0 if all workers ended with 0, otherwise that of the first worker that failed.
    """
    from ...elastic.environment import ElasticEnvironment, parse_address
    from ...elastic.supervisor.launch_node import launch_node
    from ...elastic.supervisor.supervise import Launch
    from ...elastic.supervisor.worker import python_command

    with errors_on_one_line():
        if not module and not Path(script).exists():
            raise ValueError(f"there is no script {script!r}; for a module, put -m in front of its name")
        host, port = parse_address(store)
        place = ElasticEnvironment(host, port, job, node or socket.gethostname(), local_rank=0, local_world_size=nproc)
        command = python_command(script, arguments, is_module=module)
        status = launch_node(Launch(command, place, max_restarts, grace), store_timeout)
    raise SystemExit(status)
