"""``colossal-hetero checkpoint``: list, verify and export layer checkpoints; ``store``: the store of elastic jobs."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..common.text import byte_unit, count
from . import common

if TYPE_CHECKING:
    from ..checkpoint.places import Entry


folder_argument = click.argument("folder", type=common.FILE)


@click.group()
def checkpoint() -> None:
    """List, verify and export the layer checkpoints in a folder: a local folder of a node, or the shared folder."""


@checkpoint.command("ls")
@folder_argument
def list_checkpoints(folder: Path) -> None:
    """List the checkpoints in FOLDER: step, time, size, plan, and whether they are complete."""
    from ..checkpoint.places import entries
    from ..common.tables import make_table, word_column

    with common.errors_on_one_line():
        found = entries(folder)
    titles = ("folder", "step", "epoch", "saved (UTC)", "size", "files", "ranks", "plan", "of node", "state")
    common.make_console().print(
        make_table([word_column(title) for title in titles], [_cells(entry) for entry in found])
    )
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
    from ..checkpoint.places import damaged_files, entries

    damaged = False
    with common.errors_on_one_line():
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
@common.file_option("--out", "File to write: .safetensors or .pt; default: model.safetensors, or without it model.pt.")
@click.option(
    "--shard-size",
    type=common.Finite(min=0, min_open=True),
    metavar="GB",
    help="Write files of at most this size, in 10⁹ bytes, and the index with which Hugging Face loads them; default: "
    "one file.",
)
def export_checkpoint(folder: Path, step: int | None, out: Path | None, shard_size: float | None) -> None:
    """Write the parameters of a checkpoint in FOLDER to a file, or in shards, as a plain state dict of Hugging Face or
    timm."""
    with common.errors_on_one_line():
        from ..checkpoint.reader import export

        target = out or Path("model.pt" if find_spec("safetensors") is None else "model.safetensors")
        common.check_outputs(target)
        step, tensors, files = export(folder, target, step, None if shard_size is None else round(shard_size * 1e9))
    shown = target if files == 1 else f"{target}.index.json"
    shards = "" if files == 1 else f" in {count(files, 'shard')}"
    click.echo(f"{shown}: {count(tensors, 'tensor')} of step {step}{shards}")


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


@click.command()
@click.option("--host", help="Listen on this address of the machine only; default: on all of them.")
@click.option("--port", type=int, default=29400, show_default=True, help="Port to listen on; 0 means any free port.")
def store(host: str | None, port: int) -> None:
    """Run the store of elastic jobs on this machine, which must stay; SIGINT (Ctrl+C) or SIGTERM ends it.

    Prints the address, for COLOSSAL_HETERO_STORE on each node. There is no password: use a network that only your
    machines can reach.
    """
    ending = {signal.SIGINT, signal.SIGTERM}
    with common.errors_on_one_line():
        signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # also in the threads of the server
        try:
            from ..elastic.job_store import start_store

            server, address = start_store(host, port)
            click.echo(address)
            signal.sigwait(ending)
            del server
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
