"""Pictures of plans: a timeline of each stage during one iteration, times of several plans, and a front of prices."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...common.text import BLUE, GRAY, LIGHT_BLUE, ORANGE, count, save_figure, spans, times
from ..cost.evaluate import EvaluatedPlan, time_parts
from ..cost.layout_line import device_in_words
from ..cost.simulate import Event, PlanSimulation
from .plan_table import alike_replicas, layout, nodes_in_words, short_ranks

if TYPE_CHECKING:
    from ..solver.pareto_front import FrontPoint, NodeType

MAX_LANES = 48
SHOWN_STEPS = 8
"""Micro-batches in steady state that are drawn at the beginning of a long iteration; half as many at its end."""
MAX_NUMBERS = 1500
GREEN, PURPLE = "#009E73", "#CC79A7"
"""From the palette of Okabe and Ito, like the other colors."""
CHUNK_HATCHES = ("", "///", "\\\\\\", "xxx")
"""By the number of a chunk in its stage; further chunks begin again."""
KINDS = {
    "forward": ("forward", BLUE, "#FFFFFF"),
    "backward": ("backward", LIGHT_BLUE, "#000000"),
    "weight": ("gradients of weights", PURPLE, "#FFFFFF"),
    "transfer": ("transfer", ORANGE, "#000000"),
    "update": ("optimizer step", GRAY, "#000000"),
    "synchronization": ("gradient synchronization", GREEN, "#FFFFFF"),
}
"""By kind of bar: its name in the legend, its color, and the color of the number in it."""

PASSES = ("forward", "backward", "weight")


class Lane(NamedTuple):
    """A row of the picture: one stage, drawn once for all replicas that are alike."""

    replicas: tuple[int, ...]
    stage: int
    name: str
    bars: tuple[Event, ...]
    place: float
    """Vertical place; there is a gap between replicas."""


def lanes(simulation: PlanSimulation) -> list[Lane]:
    plan, end = simulation.plan, simulation.seconds
    found: list[Lane] = []
    for gaps, replicas in enumerate(alike_replicas(plan)):
        for index, stage in enumerate(plan.replicas[replicas[0]].stages):
            bars = list(simulation.timelines[replicas[0]].events[index])
            if plan.synchronization_seconds > 0:
                # The optimizer step uses the sums of gradients. The simulation of a pipeline knows only its end.
                update = end - stage.update_seconds
                bars = [bar for bar in bars if bar.kind != "update"]
                bars.append(Event("synchronization", 0, update - plan.synchronization_seconds, update))
                bars += [Event("update", 0, update, end)] if update < end else []
            ranges = [f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in stage.block_ranges]
            layers = f"layer{'' if ' + '.join(ranges).isdigit() else 's'} {' + '.join(ranges)}"
            ranks = sorted(rank for number in replicas for rank in plan.replicas[number].stages[index].ranks)
            device = device_in_words(stage.device, stage.recompute)
            name = f"{device}, {'rank' if len(ranks) == 1 else 'ranks'} {short_ranks(ranks)}\n{layers}"
            found.append(Lane(replicas, index, name, tuple(bars), len(found) + 0.6 * gaps))
    return found


def windows(simulation: PlanSimulation) -> list[tuple[float, float]]:
    """The drawn seconds of an iteration: the whole one, or its beginning and its end."""
    plan, end = simulation.plan, simulation.seconds
    longest = max(range(len(plan.replicas)), key=lambda number: simulation.timelines[number].seconds)
    stages = plan.replicas[longest].stages
    step = max(stage.micro_batch_seconds for stage in stages)
    pass_seconds = sum(stage.micro_batch_seconds for stage in stages)
    fill, drain = pass_seconds + SHOWN_STEPS * step, pass_seconds + SHOWN_STEPS / 2 * step
    drain += max(stage.update_seconds for stage in stages) + plan.synchronization_seconds
    return [(0.0, end)] if fill + drain > 0.8 * end else [(0.0, fill), (end - drain, end)]


def plot_plan(made: PlanSimulation, path: Path) -> None:
    """Draw one simulated iteration as a timeline for each stage, replicas that are alike once.

    Bars are forward and backward passes with the number of their micro-batch, transfers, optimizer steps and gradient
    synchronization; white is waiting. Further chunks of a stage are hatched.
    """
    from matplotlib.figure import Figure

    all_lanes = lanes(made)
    shown, parts = all_lanes[:MAX_LANES], windows(made)
    figure = Figure(figsize=(14, 1.7 + (0.34 if len(shown) > 16 else 0.46) * max(len(shown), 2)), layout="constrained")
    axes = figure.subplots(
        1, len(parts), sharey=True, width_ratios=[stop - start for start, stop in parts], squeeze=False
    )[0]
    unit, _ = times([made.seconds])
    scale = {"s": 1.0, "ms": 1e3, "µs": 1e6}[unit]
    for axis, (start, stop) in zip(axes, parts, strict=True):
        _draw(axis, shown, (start, stop), scale)
    _label(axes[0], made, shown)
    for axis in axes[1:]:
        axis.spines["left"].set_visible(False)
        axis.tick_params(axis="y", labelleft=False)
    axes[0].set_xlabel(f"time [{unit}]", fontsize=9)
    figure.suptitle(_title(made, len(shown), len(all_lanes)), x=0.01, ha="left", fontsize=11)
    _legend(figure, shown)
    _number(figure, axes, shown, parts, scale)
    save_figure(figure, path)


def _draw(axis: Any, shown: Sequence[Lane], window: tuple[float, float], scale: float) -> None:
    start, stop = window
    for lane in shown:
        chunks = sorted({bar.chunk for bar in lane.bars})
        for (kind, (_, color, _)), chunk in itertools.product(KINDS.items(), chunks):
            intervals = [
                (bar.start * scale, (bar.stop - bar.start) * scale)
                for bar in lane.bars
                if bar.kind == kind and bar.chunk == chunk and bar.stop > start and bar.start < stop
            ]
            # White edges separate micro-batches; short bars have none, because an edge would hide them.
            width = 0.4 if kind in PASSES else 0.0
            hatch = CHUNK_HATCHES[chunk % len(CHUNK_HATCHES)]
            axis.broken_barh(
                intervals, (lane.place - 0.4, 0.8), facecolor=color, edgecolor="#FFFFFF", linewidth=width, hatch=hatch
            )
    axis.set_xlim(start * scale, stop * scale)
    axis.set_ylim(shown[-1].place + 0.6, -0.9)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)


def _label(axis: Any, made: PlanSimulation, shown: Sequence[Lane]) -> None:
    names = [lane.name if len(shown) <= 16 else lane.name.replace("\n", ", ") for lane in shown]
    axis.set_yticks([lane.place for lane in shown], names, fontsize=8)
    for lane in shown if len(made.plan.replicas) > 1 else ():
        if lane.stage:
            continue
        number, micro_batches = len(lane.replicas), made.plan.replicas[lane.replicas[0]].micro_batches
        text = f"replica{'s' if number > 1 else ''} {spans(lane.replicas, 3)}{f' (×{number})' if number > 1 else ''}"
        axis.annotate(
            f"{text}: {count(micro_batches, 'micro-batch')}{' each' if number > 1 else ''}",
            (0, lane.place - 0.45),
            xycoords=("axes fraction", "data"),
            xytext=(4, 1),
            textcoords="offset points",
            va="bottom",
            fontsize=8,
            fontweight="bold",
        )


def _title(made: PlanSimulation, shown: int, stages: int) -> str:
    plan = made.plan
    unit, (simulated, closed) = times([made.seconds, plan.iteration_seconds])
    rows = "" if shown == stages else f"; {shown} of {stages} stages"
    slow = "".join(f", rank {rank} slowed {factor:g} ×" for rank, factor in sorted(made.slow.items()))
    by_formula = f", {closed} {unit} by the formula" if plan.schedule == "1f1b" else ""
    return (
        textwrap.fill(f"{plan.model}: {layout(plan)}", 150)
        + f"\niteration time: {simulated} {unit} by simulation{by_formula}{slow}{rows}"
    )


def _legend(figure: Any, shown: Sequence[Lane]) -> None:
    from matplotlib.patches import Patch

    used = {bar.kind for lane in shown for bar in lane.bars}
    handles = [Patch(facecolor=color, label=name) for kind, (name, color, _) in KINDS.items() if kind in used]
    chunks = 1 + max(bar.chunk for lane in shown for bar in lane.bars)
    for chunk, hatch in list(enumerate(CHUNK_HATCHES[:chunks]))[1:]:
        handles.append(Patch(facecolor=BLUE, edgecolor="#FFFFFF", hatch=hatch, label=f"chunk {chunk} of a stage"))
    handles.append(Patch(facecolor="#FFFFFF", edgecolor="#888888", label="waiting"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def _number(
    figure: Any, axes: Sequence[Any], shown: Sequence[Lane], parts: Sequence[tuple[float, float]], scale: float
) -> None:
    """Write the numbers of micro-batches into those bars that have room for them."""
    figure.draw_without_rendering()
    texts = []
    for axis, (start, stop) in zip(axes, parts, strict=True):
        points = axis.get_window_extent().width * 72 / figure.dpi / (stop - start)
        for place, bar in ((lane.place, bar) for lane in shown for bar in lane.bars if bar.kind in PASSES):
            text = str(bar.micro_batch)
            has_room = (bar.stop - bar.start) * points >= 5 * len(text) + 1
            if has_room and bar.start >= start and bar.stop <= stop:
                texts.append((axis, (bar.start + bar.stop) / 2 * scale, place, text, KINDS[bar.kind][2]))
    for axis, middle, place, text, color in texts[:MAX_NUMBERS]:
        axis.text(middle, place, text, ha="center", va="center_baseline", fontsize=7, color=color)


# Several plans -------------------------------------------------------------------------------------------------------


def plot_comparison(plans: Sequence[tuple[str, EvaluatedPlan]], path: Path) -> None:
    """Draw a bar for each plan: its parts by the formula, and a mark for the simulated time."""
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


def plot_front(front: Sequence[FrontPoint], types: Sequence[NodeType], chosen: FrontPoint, path: Path) -> None:
    """Draw a front of prices, with the line beyond which no plan can be, by the lower bounds."""
    from matplotlib.figure import Figure

    cost, seconds = [1000 * point.dollars for point in front], [point.seconds for point in front]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(cost[::-1], seconds[::-1], "-o", drawstyle="steps-post", color=BLUE, label="plans that were found")
    corners, heights = zip(*proved_edge(front), strict=True)
    no_plan = "no plan is better in both than this"
    axes.plot(corners, heights, ":", drawstyle="steps-pre", color="#888888", label=no_plan)
    axes.plot([1000 * chosen.dollars], [chosen.seconds], "o", color=ORANGE, markersize=10, label="chosen")
    for point, x, y in zip(front, cost, seconds, strict=True):
        name = nodes_in_words(point, types)
        axes.annotate(name, (x, y), (-7, -8), textcoords="offset points", fontsize=7, ha="right")
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
    corners = [(1000 * point.dollars / (1 + point.gap), point.seconds / (1 + point.gap)) for point in front]
    corners.sort(reverse=True)
    # Where plans are excluded up to some dollars, they are also excluded for less.
    heights = itertools.accumulate((seconds for _, seconds in corners), max)
    return [(dollars, height) for (dollars, _), height in zip(corners, heights, strict=True)][::-1]
