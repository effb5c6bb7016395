"""What plans cost that one has: ``colossal-hetero evaluate`` prices and compares them, ``simulate`` runs one event by
event, and ``batches`` divides a global batch over devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ..common.text import MarkedError, parse_rank_factors
from . import common

if TYPE_CHECKING:
    from ..planner.cluster.topology import Topology
    from ..planner.cost.evaluate import EvaluatedPlan
    from ..planner.cost.plan import Plan
    from ..planner.cost.simulate import Transfers
    from ..planner.profile.layer_profile import ModelProfile
    from ..planner.solver.replan import Replanned


@click.command()
@click.argument("plans", metavar="PLAN...", nargs=-1, required=True)
@common.cluster_argument
@common.profile_argument
@click.option(
    "--global-batch",
    type=common.COUNT,
    help="Samples per optimizer step; divided over the pipelines of a layout that has no number of micro-batches.",
)
@click.option(
    "--overlap",
    is_flag=True,
    help="Communication between replicas overlaps with passes, as in `colossal-hetero plan`.",
)
@common.memory_reserve_option
@common.file_option("--out", "Write the plan, if it is one, to this JSON file.")
@common.file_option("--plot", "Draw the schedule of the plan: .png, .pdf or .svg.")
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

    with common.errors_on_one_line():
        common.check_outputs(out, picture=plot)
        for name, given in (("--out", out), ("--plot", plot)):
            if given is not None and len(plans) > 1:
                raise ValueError(f"{name} is for one plan, but {len(plans)} were given; leave it out")
        topology, model = common.load_inputs(cluster, profile, memory_reserve)
        found, notes = [], []
        with common.status("pricing the plans"):
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
    console = common.make_console()
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


class Slow(click.ParamType):
    """RANK:FACTOR[,RANK:FACTOR…]: ranks that are slow, and by how much."""

    name = "rank:factor,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[int, float]:
        if isinstance(value, dict):
            return value
        try:
            return parse_rank_factors(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("plan", type=common.FILE)
@click.option("--slow", type=Slow(), help="Ranks whose work takes longer, e.g. 3:2: rank 3 takes twice as long.")
@common.choice_option(
    "--transfers",
    *("blocking", "overlapped"),
    help="Whether stages wait while they send (blocking, as with NCCL) or continue (overlapped, as with Gloo). In "
    "schedules other than 1F1B only messages wait, until the receiver asks for them.",
)
@common.file_option("--cluster", "With --slow: the plan's cluster file; default: the file of that name next to PLAN.")
@common.file_option("--profile", "With --slow: the plan's profile file; default: the file of that name next to PLAN.")
@common.file_option("--out", "With --slow: write the best plan for the slow ranks to this JSON file.")
@common.file_option("--plot", "Draw the simulated iteration: .png, .pdf or .svg.")
def simulate(
    plan: Path,
    slow: dict[int, float] | None,
    transfers: str,
    cluster: Path | None,
    profile: Path | None,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Simulate one iteration of PLAN, a JSON file that `colossal-hetero plan` wrote, event by event.

    Prints how long each stage is busy and idle, and compares the simulated iteration of a 1F1B plan with the closed
    form. With --slow, it also compares with the iteration without slow ranks, and with the best plan for the slow
    ranks.
    """
    from ..planner.cost.plan import load_plan, save_plan
    from ..planner.cost.simulate import simulate_plan
    from ..planner.report.plan_table import render_replanning, render_simulation

    with common.errors_on_one_line():
        given = {"--cluster": cluster, "--profile": profile, "--out": out}
        if not slow and any(given.values()):
            named = ", ".join(name for name, path in given.items() if path is not None)
            raise ValueError(f"{named}: only with --slow, for the best plan with slow ranks")
        common.check_outputs(out, picture=plot)
        planned, transfer_mode = load_plan(plan), cast(Any, transfers)
        simulation = simulate_plan(planned, slow, transfer_mode)
        without = simulate_plan(planned, transfers=transfer_mode) if slow else None
        replanned = None
        if slow:
            replanned = _replanned(plan, planned, slow, transfer_mode, cluster, profile, must=any(given.values()))
            if replanned is not None and out is not None:
                save_plan(replanned.best.plan, out)
        if plot is not None:
            from ..planner.report.plan_picture import plot_plan

            plot_plan(simulation, plot)
    console = common.make_console()
    console.print(render_simulation(simulation, without))
    if replanned is not None:
        console.print(render_replanning(replanned.present, replanned.best), markup=False, soft_wrap=True)
    elif slow:
        console.print("with --cluster and --profile also: what planning again would bring", soft_wrap=True)
    if replanned is not None and out is not None:
        console.print(f"{out}: {'the new plan' if replanned.changed else 'the present plan'}", soft_wrap=True)


def _replanned(
    path: Path,
    plan: Plan,
    slow: dict[int, float],
    transfers: Transfers,
    cluster: Path | None,
    profile: Path | None,
    must: bool,
) -> Replanned | None:
    """Gain of planning again. None if files that the plan was made from are missing, unless it ``must`` be."""
    from ..planner.cluster.cluster_file import load_cluster
    from ..planner.profile.fitted_profiles import on_links
    from ..planner.profile.layer_profile import load_profile
    from ..planner.solver.replan import replan

    named = (cluster, plan.cluster), (profile, plan.profile)
    found = [given or (path.parent / name if name else None) for given, name in named]
    options = zip(("--cluster", "--profile"), found, strict=True)
    missing = [option for option, file in options if file is None or not file.is_file()]
    if missing and not must:
        return None
    if None in found:
        raise ValueError(f"the plan does not name its files; give {' and '.join(missing)}")
    topology = load_cluster(str(found[0]))
    return replan(topology, on_links(load_profile(str(found[1])), topology), plan, slow, transfers)


@click.command()
@common.profile_argument
@common.global_batch_option
@click.option("--stage", type=click.IntRange(0, 3), help="Stage of ZeRO; default: the stage of the profile.")
@common.choice_option(
    "--accumulation",
    *("shared", "per_rank"),
    help="Number of micro-steps per global batch: the same on all devices, or its own on each (stages 0 and 1).",
)
@common.choice_option(
    "--method", *("exact", "uniform", "flops", "adapt", "poplar"), help="Rule that divides the global batch."
)
@common.file_option(
    "--cluster", "Cluster file of the same ranks, written by colossal-hetero probe; adapt uses its links."
)
@common.file_option("--out", "Write the division to this JSON file.")
def batches(
    profile: Path,
    global_batch: int,
    stage: int | None,
    accumulation: str,
    method: str,
    cluster: Path | None,
    out: Path | None,
) -> None:
    """Divide a global batch over the devices of PROFILE, a JSON file that profiling wrote.

    Prints each device's samples, compute time and waiting time, and compares the methods.
    """
    from ..common.files import write_json
    from ..planner.batches.adapt import with_cluster_links
    from ..planner.batches.batch_profile import load_profile
    from ..planner.cluster.cluster_file import load_cluster
    from ..planner.report.batch_report import as_json, compare, render

    with common.errors_on_one_line():
        common.check_outputs(out)
        loaded = load_profile(profile)
        if cluster is not None:
            loaded = with_cluster_links(loaded, load_cluster(cluster))
        report = compare(loaded, global_batch, stage=stage, accumulation=accumulation, method=method)
        if out is not None:
            write_json(as_json(report), out)
    common.make_console().print(render(report))
