"""``colossal-hetero simulate``: run a plan through the event simulation of its schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click

from .common import check_outputs, errors_on_one_line, make_console

__all__ = ["simulate"]


class Slow(click.ParamType):
    """Which ranks are slow, and by how much."""

    name = "rank:factor,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[int, float]:
        """Factors by rank."""
        if isinstance(value, dict):
            return value
        slow: dict[int, float] = {}
        for part in str(value).split(","):
            rank, _, factor = part.partition(":")
            try:
                number, times = int(rank), float(factor)
            except ValueError:
                self.fail(f"{part!r} is no rank with its factor; write 3:2 for rank 3 at half its speed", param, ctx)
            if number in slow:
                self.fail(f"rank {number} is there twice", param, ctx)
            slow[number] = times
        return slow


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--slow", type=Slow(), help="Ranks whose work takes longer, e.g. 3:2 for rank 3 at half its speed.")
@click.option(
    "--transfers",
    type=click.Choice(["blocking", "overlapped"]),
    default="blocking",
    show_default=True,
    help="Whether stages stand still while they send, as with NCCL, or go on, as with Gloo.",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw it: .png, .pdf or .svg.")
def simulate(plan: Path, slow: dict[int, float] | None, transfers: str, plot: Path | None) -> None:
    """Simulate an iteration of PLAN, a JSON file that planning wrote, event by event.

    Prints how long each stage is busy and idle, and the iteration beside what the closed form predicts; with --slow,
    what becomes of it if ranks slow down.
    """
    from ..planner.plans.plan import load_plan
    from ..planner.plans.simulate import simulate_plan
    from ..planner.report.simulation_table import render_simulation

    with errors_on_one_line():
        check_outputs(picture=plot)
        planned, way = load_plan(plan), cast(Any, transfers)
        simulation = simulate_plan(planned, slow, way)
        without = simulate_plan(planned, transfers=way) if slow else None
        if plot is not None:
            from ..planner.report.plan_picture import plot_plan

            plot_plan(planned, plot, simulation=simulation)
    make_console().print(render_simulation(simulation, without))
