"""The event simulation of a plan as a table: how each stage spends an iteration."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...io.text import aligned, count, times
from ..plans.simulate import PlanSimulation
from .plan_table import layout, ranges_in_words, replica_groups, short_ranks, special_form

__all__ = ["render_replanning", "render_simulation"]

MAX_ROWS = 64
"""Largest number of stages that are printed."""


def render_simulation(simulation: PlanSimulation, without: PlanSimulation | None = None) -> RenderableType:
    """A row for each stage, and the iteration time by simulation and, for 1F1B, by the closed form.

    Replicas that are alike share their rows.

    Args:
        simulation: The simulated plan.
        without: The simulation of the same plan without slow ranks, to compare with.
    """
    plan = simulation.plan
    parts: list[RenderableType] = [Text.assemble((plan.model, "bold"), f": {layout(plan)}")]
    if simulation.slow:
        ranks = ", ".join(f"rank {rank} slowed {factor:g} ×" for rank, factor in sorted(simulation.slow.items()))
        parts.append(Text(f"with {ranks}"))
    parts += [_stages(simulation), *(Text(line) for line in _totals(simulation, without))]
    return Group(*parts)


def render_replanning(present: PlanSimulation, best: PlanSimulation) -> str:
    """What planning again for the slow ranks brings, in one line.

    Args:
        present: The present plan with the slow ranks.
        best: The best plan for them; the same object if it is the present plan.
    """
    unit, (now, planned) = times([present.seconds, best.seconds])
    if best is present:
        return f"planned again for these ranks: no plan is faster than the present one ({now} {unit})"
    return (
        f"planned again for these ranks: {planned} {unit} instead of {now} {unit} "
        f"({present.seconds / best.seconds:.2f} × as fast): {layout(best.plan)}"
    )


def _stages(simulation: PlanSimulation) -> Table:
    plan, whole = simulation.plan, simulation.seconds
    groups = replica_groups(plan)
    lines = [(group, index) for group in groups for index in range(len(group.first.stages))]
    shown = lines[:MAX_ROWS]
    columns: list[list[float]] = [[], [], [], []]
    for group, index in shown:
        timeline = simulation.timelines[group.numbers[0]]
        share = timeline.shares[index]
        compute, transfer = share.compute * timeline.seconds, share.transfer * timeline.seconds
        idle = max(whole - compute - transfer - plan.synchronization_seconds, 0.0)
        for column, value in zip(columns, (compute, transfer, idle, plan.synchronization_seconds), strict=True):
            column.append(value)
    unit, *texts = times(*columns)
    many = len(plan.replicas) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in (*(["\nreplica"] if many else []), "\nstage", "\ndevice", "\nranks"):
        table.add_column(name, overflow="fold")
    names = ("layers\n[a, b)", f"busy\n[{unit}]", f"transfer\n[{unit}]", f"idle\n[{unit}]")
    for name in (*names, *([f"sync.\n[{unit}]"] if many else []), "idle\n[%]"):
        # In a plain string rich would read the brackets as markup.
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row, (group, index) in enumerate(shown):
        stage = group.first.stages[index]
        if row and index == 0:
            table.add_section()
        ranks = sorted(rank for replica in group.replicas for rank in replica.stages[index].ranks)
        number = f" (×{len(group.numbers)})" if len(group.numbers) > 1 else ""
        cells = [f"{short_ranks(group.numbers)}{number}" if index == 0 else ""] if many else []
        cells += [
            str(index),
            f"{stage.device}{special_form(stage)}",
            short_ranks(ranks),
            ranges_in_words(stage.block_ranges),
        ]
        cells += [column[row] for column in texts[: 4 if many else 3]]
        cells.append(f"{100 * columns[2][row] / whole:.0f}")
        table.add_row(*(Text(cell) for cell in cells))
    if len(shown) < len(lines):
        table.caption = f"{len(shown)} of {count(len(lines), 'stage')}"
    return table


def _totals(simulation: PlanSimulation, without: PlanSimulation | None) -> list[str]:
    plan = simulation.plan
    unit, (simulated, closed) = times([simulation.seconds, plan.iteration_seconds])
    off = plan.iteration_seconds / simulation.seconds - 1
    (speed,) = aligned([plan.global_batch / simulation.seconds])
    line = f"iteration time by event simulation: {simulated} {unit} ({speed} samples/s)"
    if plan.schedule == "1f1b":
        lines = [f"{line}; by the closed form: {closed} {unit} ({off:+.1%})"]
    else:
        lines = [f"{line}; stages compute while they send, as Colossal-AI's schedule {plan.schedule} does"]
    if without is not None:
        unit, (before,) = times([without.seconds])
        ratio = simulation.seconds / without.seconds
        lines.append(f"without slow ranks: {before} {unit}; with them the iteration takes {ratio:.2f} × as long")
    return lines
