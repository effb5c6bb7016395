"""``colossal-hetero evaluate``: the price of plans that one has, several beside each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..common.text import MarkedError
from .common import (
    GroupedCommand,
    Whole,
    check_outputs,
    cluster_argument,
    errors_on_one_line,
    file_option,
    load_inputs,
    make_console,
    memory_reserve_option,
    profile_argument,
    status_line,
)

if TYPE_CHECKING:
    from ..planner.cluster.topology import Topology
    from ..planner.cost.evaluate import EvaluatedPlan
    from ..planner.profile.layer_profile import ModelProfile


GROUPS = {
    "Predictions": ("global_batch", "overlap"),
    "Machines": ("memory_reserve",),
    "Output": ("out", "plot"),
}


@click.command(cls=GroupedCommand, groups=GROUPS)
@click.argument("plans", metavar="PLAN...", nargs=-1, required=True)
@cluster_argument
@profile_argument
@click.option(
    "--global-batch",
    type=Whole(),
    help="Samples per optimizer step; divided over the pipelines of a layout that has no number of micro-batches.",
)
@click.option(
    "--overlap",
    is_flag=True,
    help="Communication between replicas overlaps with passes, as in `colossal-hetero plan`.",
)
@memory_reserve_option
@file_option("--out", "Write the plan, if it is one, to this JSON file.")
@file_option("--plot", "Draw the schedule of the plan: .png, .pdf or .svg.")
def evaluate(
    plans: tuple[str, ...],
    cluster: Path,
    profile: Path,
    global_batch: int | None,
    overlap: bool,
    memory_reserve: float | None,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Price plans that you have, on any cluster and profile: time, memory and dollars. Several are compared.

    Each PLAN is a JSON file that `colossal-hetero plan` wrote, or a layout on one line, such as
    "tp 1, dp 4 x pp [2 x V100-16 0-9 | A100-40 10-23], micro-batch 1 x 32". CLUSTER and PROFILE are files as for
    `colossal-hetero plan`. The devices of a layout are chosen as the planner does.
    """
    from ..planner.cost.plan import save_plan
    from ..planner.cost.simulate import simulate_plan
    from ..planner.report.plan_picture import plot_plan
    from ..planner.report.plan_table import render_comparison, render_evaluation

    with errors_on_one_line():
        check_outputs(out, picture=plot)
        for name, given in (("--out", out), ("--plot", plot)):
            if given is not None and len(plans) > 1:
                raise ValueError(f"{name} is for one plan, but {len(plans)} were given; leave it out")
        topology, model = load_inputs(cluster, profile, memory_reserve)
        found, notes = [], []
        with status_line("pricing the plans"):
            for number, each in enumerate(plans, 1):
                try:
                    evaluated, remarks = _evaluated(each, topology, model, global_batch, overlap)
                except MarkedError:
                    raise
                except ValueError as error:
                    if len(plans) == 1:
                        raise
                    raise ValueError(f"plan {number} ({each}): {error}") from None
                found.append((_name(each, number, plans), evaluated))
                notes += remarks if len(plans) == 1 else [f"{found[-1][0]}: {remark}" for remark in remarks]
        (_, first), *others = found
        if out is not None:
            save_plan(first.plan.model_copy(update={"cluster": cluster.name, "profile": profile.name}), out)
        if plot is not None:
            plot_plan(simulate_plan(first.plan), plot)
    console = make_console()
    console.print(render_comparison(found) if others else render_evaluation(first, notes))
    for note in notes if others else ():
        console.print(note, markup=False)


def _name(given: str, number: int, others: Sequence[str]) -> str:
    """A file's name without its ending; its number for a layout, or if two files have the same name."""
    stems = {Path(each).stem for each in others if each != given and os.path.exists(each)}
    stem = Path(given).stem
    return stem if os.path.exists(given) and stem not in stems else f"{number}"


def _evaluated(
    given: str, topology: Topology, profile: ModelProfile, global_batch: int | None, overlap: bool
) -> tuple[EvaluatedPlan, list[str]]:
    """The cost of a plan on these machines, and notes about it."""
    from ..planner.cost.evaluate import evaluate_layout, evaluate_plan, why_other_devices
    from ..planner.cost.layout_line import layout_of, read_layout
    from ..planner.cost.plan import load_plan
    from ..planner.profile.fitted_profiles import as_profiled

    if not os.path.exists(given) and "[" not in given:
        raise ValueError(
            f"{given or 'an empty name'}: no such file; a layout on one line names its pipelines in brackets, such as "
            "dp 2 x pp [A100-40 0-23], micro-batch 2 x 32"
        )
    if not os.path.exists(given):
        layout = read_layout(given)
        return evaluate_layout(topology, profile, layout, global_batch=global_batch, overlap=overlap), []
    plan = load_plan(given)
    problem = why_other_devices(as_profiled(topology, profile), plan)
    if problem is None:
        return evaluate_plan(topology, profile, plan, overlap=overlap), []
    note = f"the devices were chosen again, because the file was made for other machines: {problem}"
    return evaluate_layout(topology, profile, layout_of(plan), overlap=overlap), [note]
