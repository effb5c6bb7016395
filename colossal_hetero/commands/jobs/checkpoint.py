"""``colossal-hetero checkpoint``: list, verify and export layer checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...io.text import byte_unit, count
from ..common import check_outputs, errors_on_one_line, make_console

if TYPE_CHECKING:
    from ...checkpoint.reading.verify import Entry

__all__ = ["checkpoint"]

folder_argument = click.argument("folder", type=click.Path(path_type=Path))


@click.group()
def checkpoint() -> None:
    """List, verify and export the layer checkpoints in a folder: a local folder of a node, or the shared folder."""


@checkpoint.command("ls")
@folder_argument
def list_checkpoints(folder: Path) -> None:
    """List the checkpoints in FOLDER: step, time, size, plan, and whether they are complete."""
    from rich.table import Table

    from ...checkpoint.reading.verify import entries

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
    from ...checkpoint.reading.verify import damaged_files, entries

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


@checkpoint.command()
@folder_argument
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint to export; default: the newest complete one.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write: .safetensors or .pt; default: model.safetensors, or model.pt without that package.",
)
def export(folder: Path, step: int | None, out: Path | None) -> None:
    """Write the parameters of a checkpoint in FOLDER to one file, as a plain state dict of Hugging Face or timm."""
    with errors_on_one_line():
        from ...checkpoint.reading.export import default_ending
        from ...checkpoint.reading.export import export as export_checkpoint

        target = out or Path(f"model{default_ending()}")
        check_outputs(target)
        step, tensors = export_checkpoint(folder, target, step)
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
