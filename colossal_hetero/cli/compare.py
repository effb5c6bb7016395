"""``colossal-hetero compare``: several plans beside each other, on one cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from ..common.text import MarkedError
from .common import (
    Batches,
    GroupedCommand,
    batch_options,
    check_outputs,
    errors_on_one_line,
    evaluate_given,
    make_console,
    memory_reserve_option,
    status_line,
)

__all__ = ["compare", "evaluate"]

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
    from ..planner.cluster.cluster_file import load_cluster
    from ..planner.profile.fitted_profiles import on_links
    from ..planner.profile.layer_profile import load_model_profile
    from ..planner.report.comparison_report import plot_comparison, render_comparison

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
            plot_comparison(found, plot)
    console = make_console()
    console.print(render_comparison(found))
    for note in notes:
        console.print(note, markup=False)


def _name(given: str, number: int, others: Sequence[str]) -> str:
    """A file's name without its ending; its number for a layout, or if two files have the same name."""
    stems = {Path(each).stem for each in others if each != given and os.path.exists(each)}
    stem = Path(given).stem
    return stem if os.path.exists(given) and stem not in stems else f"{number}"


# Evaluate ------------------------------------------------------------------------------------------------------------

EVALUATE_GROUPS = {
    "Batches of a layout": ("micro_batch", "micro_batches", "global_batch", "overlap"),
    "Machines": ("memory_reserve",),
    "Output": ("out", "plot"),
}


@click.command(cls=GroupedCommand, groups=EVALUATE_GROUPS)
@click.argument("plan")
@click.argument("cluster", type=click.Path(path_type=Path))
@click.argument("profile", type=click.Path(path_type=Path))
@batch_options
@memory_reserve_option
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan to this JSON file.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the plan's schedule: .png, .pdf or .svg."
)
def evaluate(
    plan: str,
    cluster: Path,
    profile: Path,
    micro_batch: int | None,
    micro_batches: int | None,
    global_batch: int | None,
    overlap: bool,
    memory_reserve: float | None,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Price a plan that you have, on any cluster and profile: time, memory and dollars.

    PLAN is a JSON file that `colossal-hetero plan` wrote, or a layout on one line, such as
    "tp 1, dp 4 x pp [2 x V100-16 0-9 | A100-40 10-23], micro-batch 1 x 32". CLUSTER and PROFILE are files as for
    `colossal-hetero plan`. The devices of a layout are chosen as the planner does.
    """
    from ..planner.cluster.cluster_file import load_cluster
    from ..planner.cost.plan import save_plan
    from ..planner.profile.fitted_profiles import on_links
    from ..planner.profile.layer_profile import load_model_profile
    from ..planner.report.comparison_report import render_evaluation

    with errors_on_one_line():
        check_outputs(out, picture=plot)
        topology = load_cluster(cluster)
        model = on_links(load_model_profile(profile), topology)
        if memory_reserve is not None:
            topology = topology.with_memory_reserve(round(memory_reserve * 1e9))
        batches = Batches(micro_batch, micro_batches, global_batch)
        with status_line("pricing the plan"):
            evaluated, notes = evaluate_given(plan, topology, model, batches, overlap=overlap)
        files = {"cluster": cluster.name, "profile": profile.name}
        if out is not None:
            save_plan(evaluated.plan.model_copy(update=files), out)
        if plot is not None:
            from ..planner.report.plan_picture import plot_plan

            plot_plan(evaluated.plan, plot)
    make_console().print(render_evaluation(evaluated, notes))
