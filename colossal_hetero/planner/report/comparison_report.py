"""Given plans on a cluster, as text and pictures: one plan with its stages, several beside each other, a front."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...common.text import BLUE, GRAY, LIGHT_BLUE, ORANGE, byte_unit, count, duration, save_figure, times
from ..cost.evaluate import HOUR, EvaluatedPlan, devices_in_words, differences, time_parts
from ..cost.ranked_plan import RankedPlan
from ..search.pareto_front import FrontPoint, NodeType
from .plan_table import layout, render

__all__ = [
    "dollars",
    "nodes_in_words",
    "plot_comparison",
    "plot_front",
    "proved_edge",
    "render_comparison",
    "render_evaluation",
    "render_front",
    "totals",
    "training_in_words",
]

MAX_STAGES_SHOWN = 4


def render_evaluation(evaluated: EvaluatedPlan, notes: Sequence[str] = ()) -> RenderableType:
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
    """A table of several plans of one cluster, and the difference of each from the fastest that fits in memory."""
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
    """Index of the fastest plan, of those that fit in memory if there are any."""
    return min(
        range(len(plans)), key=lambda number: (not plans[number][1].fits, plans[number][1].plan.iteration_seconds)
    )


def _left(evaluated: EvaluatedPlan) -> str:
    stage = evaluated.fullest
    size, unit = byte_unit(stage.memory_available_bytes)
    left = (stage.memory_available_bytes - stage.memory_bytes) / size
    return f"{left:.1f} {unit}" if evaluated.fits else f"{-left:.1f} {unit} too little"


def _in_words(plans: Sequence[tuple[str, EvaluatedPlan]], best: int) -> list[str]:
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


# Comparison picture --------------------------------------------------------------------------------------------------


def plot_comparison(plans: Sequence[tuple[str, EvaluatedPlan]], path: Path) -> None:
    """A bar for each plan: its parts by the closed form, and a mark for the simulated time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.9 * len(plans)), layout="constrained")
    axes = figure.add_subplot()
    rows = range(len(plans))
    left = [0.0] * len(plans)
    parts = [time_parts(each.plan) for _, each in plans]
    for name, color in zip(parts[0], (BLUE, LIGHT_BLUE, ORANGE), strict=True):
        widths = [each[name] for each in parts]
        axes.barh(rows, widths, left=left, color=color, label=name, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    simulated = [each.simulated_seconds for _, each in plans]
    axes.plot(simulated, rows, "|", color="black", markersize=12, label="by event simulation")
    for row, (_, each) in enumerate(plans):
        if not each.fits:
            axes.text(left[row], row, " does not fit in memory", va="center", fontsize=8)
    axes.set_yticks(rows, [f"{name}\n{textwrap.fill(layout(each.plan), 60)}" for name, each in plans], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds per iteration")
    axes.grid(axis="x", color=GRAY)
    axes.set_axisbelow(True)
    axes.margins(x=0.25)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    save_figure(figure, path)


# Front table ---------------------------------------------------------------------------------------------------------


def render_front(
    front: Sequence[FrontPoint], types: Sequence[NodeType], chosen: FrontPoint, samples: int | None = None
) -> Table:
    """A row for each point, the fastest first; the chosen one is bold."""
    unit, seconds = times([point.seconds for point in front])
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nnodes", overflow="fold")
    table.add_column(Text(f"iteration\n[{unit}]"), justify="right", no_wrap=True)
    table.add_column("\n$ / hour", justify="right", no_wrap=True)
    table.add_column("$ / 1,000\niterations", justify="right", no_wrap=True)
    if samples is not None:
        table.add_column(Text("training\n[h]"), justify="right", no_wrap=True)
        table.add_column(Text("training\n[$]"), justify="right", no_wrap=True)
    table.add_column("\ngap", justify="right", no_wrap=True)
    table.add_column("\nlayout", overflow="fold", ratio=1)
    for point, iteration in zip(front, seconds, strict=True):
        cells = [
            nodes_in_words(point, types),
            iteration,
            f"{point.cost.dollars_per_hour:,.2f}",
            dollars(1000 * point.dollars),
        ]
        if samples is not None:
            hours, price = totals(point, samples)
            cells += [f"{hours:,.1f}", dollars(price)]
        cells += [f"{point.gap:.1%}", layout(point.plan)]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if point is chosen else None)
    return table


def totals(point: FrontPoint, samples: int) -> tuple[float, float]:
    iterations = samples / point.plan.global_batch
    return iterations * point.seconds / HOUR, iterations * point.dollars


def training_in_words(seconds: float | None, dollars_each: float | None, *, iterations: float) -> str:
    hours = "" if seconds is None else f"{iterations * seconds / HOUR:,.4g} h"
    price = "" if dollars_each is None else f"${iterations * dollars_each:,.4g}"
    return " for ".join(each for each in (hours, price) if each)


def nodes_in_words(point: FrontPoint, types: Sequence[NodeType]) -> str:
    """``2 × a100, 1 × v100``."""
    return ", ".join(f"{count} × {each.name}" for each, count in zip(types, point.nodes, strict=True) if count)


def dollars(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"


# Front picture -------------------------------------------------------------------------------------------------------


def plot_front(front: Sequence[FrontPoint], types: Sequence[NodeType], chosen: FrontPoint, path: Path) -> None:
    """Write a picture, with the line beyond which no plan can be, by the lower bounds."""
    from matplotlib.figure import Figure

    cost = [1000 * point.dollars for point in front]
    seconds = [point.seconds for point in front]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(cost[::-1], seconds[::-1], "-o", drawstyle="steps-post", color=BLUE, label="plans that were found")
    axes.plot(
        *zip(*proved_edge(front), strict=True),
        ":",
        drawstyle="steps-pre",
        color="#888888",
        label="no plan is better in both than this",
    )
    best = 1000 * chosen.dollars, chosen.seconds
    axes.plot(*([each] for each in best), "o", color=ORANGE, markersize=10, label="chosen")
    for point, x, y in zip(front, cost, seconds, strict=True):
        axes.annotate(
            nodes_in_words(point, types),
            (x, y),
            (-7, -8),
            textcoords="offset points",
            fontsize=7,
            horizontalalignment="right",
        )
    axes.set_xlabel("dollars per 1,000 iterations")
    axes.set_ylabel("seconds per iteration")
    axes.margins(x=0.15)
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def proved_edge(front: Sequence[FrontPoint]) -> list[tuple[float, float]]:
    """The corners of the edge below which no plan can be: dollars per 1,000 iterations, ascending, and seconds.

    By its gap, each point excludes all plans that are better in both than a corner.
    """
    corners: list[tuple[float, float]] = []
    for point in front:
        dollars = 1000 * point.dollars / (1 + point.gap)
        corners.append((dollars, point.seconds / (1 + point.gap)))
    corners.sort(reverse=True)
    # Where plans are excluded up to some dollars, they are also excluded for less.
    heights = itertools.accumulate((seconds for _, seconds in corners), max)
    return [(dollars, height) for (dollars, _), height in zip(corners, heights, strict=True)][::-1]
