"""``colossal-hetero evaluate``: what a given plan or layout takes on a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from ..common import check_outputs, errors_on_one_line, make_console, memory_reserve_option, status_line
from ..option_groups import GroupedCommand
from .given_plans import Batches, batch_options, evaluate_given

__all__ = ["evaluate"]

GROUPS = {
    "Batches of a layout": ("micro_batch", "micro_batches", "global_batch", "overlap"),
    "Machines": ("memory_reserve",),
    "Output": ("out", "plot"),
}


@click.command(cls=GroupedCommand, groups=GROUPS)
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
    from ...planner.cluster.cluster_file import load_cluster
    from ...planner.plans.plan import save_plan
    from ...planner.profile.layer_profile import load_model_profile
    from ...planner.profile.on_links import on_links
    from ...planner.report.evaluation_table import render_evaluation

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
            from ...planner.report.plan_picture import plot_plan

            plot_plan(evaluated.plan, plot)
    make_console().print(render_evaluation(evaluated, notes))
