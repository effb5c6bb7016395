"""``colossal-hetero simulate``: run a plan through the event simulation of its schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click

from ..io.rank_factors import parse_rank_factors
from .common import check_outputs, errors_on_one_line, make_console

__all__ = ["simulate"]


class Slow(click.ParamType):
    """RANK:FACTOR[,RANK:FACTOR…]: which ranks are slow, and by how much."""

    name = "rank:factor,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[int, float]:
        """Factors by rank."""
        if isinstance(value, dict):
            return value
        try:
            return parse_rank_factors(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--slow", type=Slow(), help="Ranks whose work takes longer, e.g. 3:2: rank 3 takes twice as long.")
@click.option(
    "--transfers",
    type=click.Choice(["blocking", "overlapped"]),
    default="blocking",
    show_default=True,
    help="Whether stages wait while they send (blocking, as with NCCL) or continue (overlapped, as with Gloo).",
)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the simulated iteration: .png, .pdf or .svg."
)
def simulate(plan: Path, slow: dict[int, float] | None, transfers: str, plot: Path | None) -> None:
    """Simulate one iteration of PLAN, a JSON file that `colossal-hetero plan` wrote, event by event.

    Prints how long each stage is busy and idle, and compares the simulated iteration with the closed form. With --slow,
    it also compares with the iteration without slow ranks.
    """
    from ..planner.plans.plan import load_plan
    from ..planner.plans.simulate import simulate_plan
    from ..planner.report.simulation_table import render_simulation

    with errors_on_one_line():
        check_outputs(picture=plot)
        planned, transfer_mode = load_plan(plan), cast(Any, transfers)
        simulation = simulate_plan(planned, slow, transfer_mode)
        without = simulate_plan(planned, transfers=transfer_mode) if slow else None
        if plot is not None:
            from ..planner.report.plan_picture import plot_plan

            plot_plan(planned, plot, simulation=simulation)
    make_console().print(render_simulation(simulation, without))
