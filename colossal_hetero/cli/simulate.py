"""``colossal-hetero simulate``: run a plan through the event simulation of its schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ..common.text import parse_rank_factors
from .common import FILE, check_outputs, choice_option, errors_on_one_line, file_option, make_console

if TYPE_CHECKING:
    from ..planner.cost.plan import Plan
    from ..planner.cost.simulate import Transfers
    from ..planner.solver.replan import Replanned


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
@click.argument("plan", type=FILE)
@click.option("--slow", type=Slow(), help="Ranks whose work takes longer, e.g. 3:2: rank 3 takes twice as long.")
@choice_option(
    "--transfers",
    *("blocking", "overlapped"),
    help="Whether stages wait while they send (blocking, as with NCCL) or continue (overlapped, as with Gloo). In "
    "schedules other than 1F1B only messages wait, until the receiver asks for them.",
)
@file_option("--cluster", "With --slow: the cluster file of the plan; default: the file of that name next to PLAN.")
@file_option("--profile", "With --slow: the profile file of the plan; default: the file of that name next to PLAN.")
@file_option("--out", "With --slow: write the best plan for the slow ranks to this JSON file.")
@file_option("--plot", "Draw the simulated iteration: .png, .pdf or .svg.")
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

    with errors_on_one_line():
        given = {"--cluster": cluster, "--profile": profile, "--out": out}
        if not slow and any(given.values()):
            named = ", ".join(name for name, path in given.items() if path is not None)
            raise ValueError(f"{named}: only with --slow, for the best plan with slow ranks")
        check_outputs(out, picture=plot)
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
    console = make_console()
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
