"""What given plans take on a cluster, as text: one plan with its stages, or several beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...io.text import byte_unit, count, duration, times
from ..evaluation.differences import devices_in_words, differences
from ..evaluation.evaluate import EvaluatedPlan
from ..plans.ranked_plan import RankedPlan
from .plan_table import layout, render

__all__ = ["render_comparison", "render_evaluation"]

MAX_STAGES_SHOWN = 4
"""Stages without enough memory that are named."""


def render_evaluation(evaluated: EvaluatedPlan, notes: Sequence[str] = ()) -> RenderableType:
    """The stages of a plan, its time by the closed form and by simulation, its memory and its price.

    Args:
        evaluated: The plan.
        notes: Further lines.
    """
    plan = evaluated.plan
    off = plan.iteration_seconds / evaluated.simulated_seconds - 1
    simulated = duration(evaluated.simulated_seconds)
    lines = [f"by event simulation: {simulated}; the prediction above is {off:+.1%} of it", *_memory(evaluated)]
    if evaluated.cost is None:
        lines.append("price: unknown, because the cluster file does not have the prices of all nodes")
    else:
        cost = evaluated.cost
        sent = f", of which {cost.egress_dollars * 1000:,.2f} $ for what is sent between clusters"
        lines.append(
            f"price: {cost.dollars_per_hour:,.2f} $ an hour, {cost.dollars_per_iteration * 1000:,.2f} $ for 1,000 "
            f"iterations{sent if cost.egress_dollars else ''}"
        )
    if evaluated.problem is not None:
        lines.append(f"it cannot be run: {evaluated.problem}")
    return Group(render([RankedPlan(plan, "")]), *(Text(line) for line in (*lines, *notes)))


def _memory(evaluated: EvaluatedPlan) -> list[str]:
    if evaluated.fits:
        stage = evaluated.fullest
        size, unit = byte_unit(stage.memory_available_bytes)
        share = stage.memory_bytes / stage.memory_available_bytes
        return [
            f"memory: every stage fits; the fullest, on {stage.device}, uses {stage.memory_bytes / size:.1f} of "
            f"{stage.memory_available_bytes / size:.1f} {unit} ({share:.0%})"
        ]
    lines = []
    for replica, index, stage in evaluated.too_large[:MAX_STAGES_SHOWN]:
        size, unit = byte_unit(stage.memory_available_bytes)
        lines.append(
            f"memory: stage {index} of replica {replica} does not fit; it needs {stage.memory_bytes / size:.1f} {unit} "
            f"and {stage.device} has {stage.memory_available_bytes / size:.1f} {unit}"
        )
    more = len(evaluated.too_large) - len(lines)
    return [*lines, f"memory: {count(more, 'other stage')} without enough"] if more else lines


def render_comparison(plans: Sequence[tuple[str, EvaluatedPlan]]) -> RenderableType:
    """A table of several plans of one cluster, and how each differs from the fastest that fits in memory.

    Args:
        plans: Each with its name.
    """
    best = fastest(plans)
    unit, seconds, simulated = times(
        [each.plan.iteration_seconds for _, each in plans], [each.simulated_seconds for _, each in plans]
    )
    priced = all(each.cost is not None for _, each in plans)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nplan", overflow="fold", min_width=4)
    for name in (f"closed form\n[{unit}]", f"simulation\n[{unit}]", "× best\ntime", "\nsamples/s"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    if priced:
        table.add_column("$ / 1,000\niterations", justify="right", no_wrap=True)
    table.add_column("memory\nleft", justify="right", no_wrap=True)
    table.add_column("\ndevices", overflow="fold")
    table.add_column("\nlayout", overflow="fold", ratio=1)
    for number, (name, each) in enumerate(plans):
        plan = each.plan
        ratio = plan.iteration_seconds / plans[best][1].plan.iteration_seconds
        cells = [name, seconds[number], simulated[number], f"{ratio:.3f}", f"{plan.samples_per_second:,.2f}"]
        if each.cost is not None and priced:
            cells.append(f"{each.cost.dollars_per_iteration * 1000:,.2f}")
        cells += [_left(each), devices_in_words(plan), layout(plan)]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if number == best else None)
    return Group(table, *(Text(line) for line in _in_words(plans, best)))


def fastest(plans: Sequence[tuple[str, EvaluatedPlan]]) -> int:
    """The number of the fastest plan, of those that fit in memory if there are any."""
    return min(
        range(len(plans)), key=lambda number: (not plans[number][1].fits, plans[number][1].plan.iteration_seconds)
    )


def _left(evaluated: EvaluatedPlan) -> str:
    stage = evaluated.fullest
    size, unit = byte_unit(stage.memory_available_bytes)
    left = (stage.memory_available_bytes - stage.memory_bytes) / size
    return f"{left:.1f} {unit}" if evaluated.fits else f"{-left:.1f} {unit} too little"


def _in_words(plans: Sequence[tuple[str, EvaluatedPlan]], best: int) -> list[str]:
    """How each plan differs from the best one."""
    name, first = plans[best]
    lines = []
    for number, (other, each) in enumerate(plans):
        if number == best:
            continue
        percent = 100 * (each.plan.iteration_seconds / first.plan.iteration_seconds - 1)
        speed = "slower" if percent >= 0 else "faster, but it does not fit in memory"
        alike = f"as fast as {name}"
        lines.append(f"{other}: {alike if abs(percent) < 0.05 else f'{abs(percent):.1f} % {speed} than {name}'}")
        found = differences(first.plan, each.plan)
        lines += [f"  {line}" for line in found] if found else ["  the same layout on other devices, or the same plan"]
        if each.problem is not None:
            lines.append(f"  it cannot be run: {each.problem}")
    return lines
