"""The picture of a plan: a timeline of each stage during one iteration."""

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...common.text import BLUE, GRAY, LIGHT_BLUE, ORANGE, count, save_figure, spans, times
from ..cost.layout_line import device_in_words
from ..cost.simulate import Event, PlanSimulation
from .plan_table import alike_replicas, layout, short_ranks

MAX_LANES = 48
SHOWN_STEPS = 8
"""Micro-batches in steady state that are drawn at the beginning of a long iteration; half as many at its end."""
MAX_NUMBERS = 1500
GREEN, PURPLE = "#009E73", "#CC79A7"
"""From the palette of Okabe and Ito, like the other colors."""
CHUNK_HATCHES = ("", "///", "\\\\\\", "xxx")  # by the number of a chunk in its stage; further chunks begin again
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
