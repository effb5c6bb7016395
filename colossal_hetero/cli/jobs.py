"""``colossal-hetero checkpoint``: list, verify and export layer checkpoints."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..common.text import byte_unit, count
from .common import Finite, check_outputs, errors_on_one_line, make_console

__all__ = ["checkpoint", "launch", "store"]

if TYPE_CHECKING:
    from ..checkpoint.verify import Entry


folder_argument = click.argument("folder", type=click.Path(path_type=Path))


@click.group()
def checkpoint() -> None:
    """List, verify and export the layer checkpoints in a folder: a local folder of a node, or the shared folder."""


@checkpoint.command("ls")
@folder_argument
def list_checkpoints(folder: Path) -> None:
    """List the checkpoints in FOLDER: step, time, size, plan, and whether they are complete."""
    from rich.table import Table

    from ..checkpoint.verify import entries

    with errors_on_one_line():
        found = entries(folder)
    table = Table("folder", "step", "epoch", "saved (UTC)", "size", "files", "ranks", "plan", "of node", "state")
    for entry in found:
        table.add_row(*_cells(entry))
    make_console().print(table)
    for entry in found:
        for fault in entry.faults:
            click.echo(f"{entry.name}: {fault}")


@checkpoint.command()
@folder_argument
@click.option("--step", type=click.IntRange(min=0), help="Verify only the checkpoint of this step.")
def verify(folder: Path, step: int | None) -> None:
    """Read every byte of the checkpoints in FOLDER and compare it with the check sums.

    Names damaged files. The exit code is 1 if there are any, or if a checkpoint is not complete.
    """
    from ..checkpoint.verify import damaged_files, entries

    damaged = False
    with errors_on_one_line():
        for entry in entries(folder, step):
            faults = list(damaged_files(entry))
            damaged |= bool(faults)
            click.echo(f"{entry.name}: {'whole' if not faults else 'damaged' if entry.copy else 'not complete'}")
            for fault in faults:
                click.echo(f"  {fault}")
    if damaged:
        raise SystemExit(1)


@checkpoint.command("export")
@folder_argument
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint to export; default: the newest complete one.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write: .safetensors or .pt; default: model.safetensors, or model.pt without that package.",
)
def export_checkpoint(folder: Path, step: int | None, out: Path | None) -> None:
    """Write the parameters of a checkpoint in FOLDER to one file, as a plain state dict of Hugging Face or timm."""
    with errors_on_one_line():
        from ..checkpoint.export import default_ending, export

        target = out or Path(f"model{default_ending()}")
        check_outputs(target)
        step, tensors = export(folder, target, step)
    click.echo(f"{target}: {count(tensors, 'tensor')} of step {step}")


def _cells(entry: Entry) -> list[str]:
    factor, unit = byte_unit(entry.bytes)
    size = f"{entry.bytes / factor:,.1f} {unit}"
    if entry.copy is None:
        return [entry.name, "", "", "", size, "", "", "", "", "torn"]
    manifest = entry.copy.manifest
    state = "damaged" if entry.faults else "complete"
    saved = manifest.saved_at.replace("T", " ").partition(".")[0]
    numbers = [str(manifest.step), str(manifest.epoch), saved, size, str(len(entry.copy.files))]
    return [entry.name, *numbers, str(manifest.world_size), manifest.plan or "-", manifest.held_by or "all", state]


# Store ---------------------------------------------------------------------------------------------------------------

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
            from ..elastic.job_store import start_store

            server, address = start_store(host, port)
            click.echo(address)
            signal.sigwait(ending)
            del server
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)


# Launch --------------------------------------------------------------------------------------------------------------


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
    from ..elastic.environment import ElasticEnvironment, parse_address
    from ..elastic.supervisor.guard import launch_node
    from ..elastic.supervisor.supervise import Launch, python_command

    with errors_on_one_line():
        if not module and not Path(script).exists():
            raise ValueError(f"there is no script {script!r}; for a module, put -m in front of its name")
        host, port = parse_address(store)
        place = ElasticEnvironment(host, port, job, node or socket.gethostname(), local_rank=0, local_world_size=nproc)
        command = python_command(script, arguments, is_module=module)
        status = launch_node(Launch(command, place, max_restarts, grace), store_timeout)
    raise SystemExit(status)
