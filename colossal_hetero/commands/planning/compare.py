"""``colossal-hetero compare``: several plans beside each other, on one cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from ...io.marked_error import MarkedError
from ..common import check_outputs, errors_on_one_line, make_console, status_line
from ..option_groups import GroupedCommand
from .given_plans import Batches, batch_options, evaluate_given

__all__ = ["compare"]

GROUPS = {
    "Machines and model": ("cluster", "profile"),
    "Batches of layouts": ("micro_batch", "micro_batches", "global_batch", "overlap"),
    "Output": ("plot",),
}


@click.command(cls=GroupedCommand, groups=GROUPS)
@click.argument("plans", nargs=-1, required=True)
@click.option("--cluster", type=click.Path(path_type=Path), required=True, help="Cluster file.")
@click.option("--profile", type=click.Path(path_type=Path), required=True, help="Profile of the model's layers.")
@batch_options
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the parts of each time: .png, .pdf or .svg."
)
def compare(
    plans: tuple[str, ...],
    cluster: Path,
    profile: Path,
    micro_batch: int | None,
    micro_batches: int | None,
    global_batch: int | None,
    overlap: bool,
    plot: Path | None,
) -> None:
    """Compare PLANS on one cluster: time, price, memory that is left, devices, and how they differ.

    Each is a JSON file that `colossal-hetero plan` wrote, or a layout on one line as for `colossal-hetero evaluate`.
    """
    from ...planner.cluster.cluster_file import load_cluster
    from ...planner.profile.layer_profile import load_model_profile
    from ...planner.profile.on_links import on_links
    from ...planner.report.evaluation_table import render_comparison

    with errors_on_one_line():
        check_outputs(None, picture=plot)
        topology = load_cluster(cluster)
        model = on_links(load_model_profile(profile), topology)
        batches = Batches(micro_batch, micro_batches, global_batch)
        found, notes = [], []
        with status_line("pricing the plans"):
            for number, each in enumerate(plans, 1):
                try:
                    evaluated, remarks = evaluate_given(each, topology, model, batches, overlap=overlap)
                except MarkedError:
                    raise
                except ValueError as error:
                    raise ValueError(f"plan {number} ({each}): {error}") from None
                name = _name(each, number, plans)
                found.append((name, evaluated))
                notes += [f"{name}: {remark}" for remark in remarks]
        if plot is not None:
            from ...planner.report.comparison_picture import plot_comparison

            plot_comparison(found, plot)
    console = make_console()
    console.print(render_comparison(found))
    for note in notes:
        console.print(note, markup=False)


def _name(given: str, number: int, others: Sequence[str]) -> str:
    """What is before the ending of a file's name; its number if it is a layout, or if two files have the same name."""
    stems = {Path(each).stem for each in others if each != given and os.path.exists(each)}
    stem = Path(given).stem
    return stem if os.path.exists(given) and stem not in stems else f"{number}"
