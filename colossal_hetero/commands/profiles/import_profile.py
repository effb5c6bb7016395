"""``colossal-hetero import``: a profile of layers from files that other programs wrote."""

from __future__ import annotations

from pathlib import Path

import click

from ..common import check_outputs, errors_on_one_line, profile_out_option, show_profile

__all__ = ["import_profile"]


@click.group("import")
def import_profile() -> None:
    """Make a profile of layers from tables of other programs."""


@import_profile.command("sailor")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="Name of the model in the files, e.g. OPT-350.")
@profile_out_option
def import_sailor(folder: Path, model: str, out: Path) -> None:
    """Measured layers of GPUs in Sailor's format.

    FOLDER is Sailor's repository (or its profiles and llm_info.json), or has the tables layer_times.csv,
    layer_memory.csv and models.json.
    """
    from ...planner.imports.sailor_repository import read_sailor
    from ...planner.profile.layer_profile import save_model_profile

    with errors_on_one_line():
        check_outputs(out)
        tables = read_sailor(folder, model)
        save_model_profile(tables.profile, out)
    show_profile(tables.profile, out)
    for note in tables.left_out:
        click.echo(f"left out or assumed: {note}")
