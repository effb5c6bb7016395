"""The picture of a plan: a timeline of each stage during one iteration."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...common.text import (
    BLUE,
    GRAY,
    LIGHT_BLUE,
    ORANGE,
    check_matplotlib,
    check_name,
    count,
    save_figure,
    spans,
    times,
)
from ..cost.layout_line import device_in_words
from ..cost.plan import Plan
from ..cost.simulate import PlanSimulation, simulate_plan
from .plan_table import layout, replica_groups, short_ranks

__all__ = ["Lane", "StageBar", "lanes", "plot_plan", "windows"]

MAX_LANES = 48
SHOWN_STEPS = 8
"""Micro-batches in steady state that are drawn at the beginning of a long iteration; half as many at its end."""
MAX_NUMBERS = 1500
GREEN, PURPLE = "#009E73", "#CC79A7"
"""From the palette of Okabe and Ito, like the other colors."""
CHUNK_HATCHES = ("", "///", "\\\\\\", "xxx")
"""By the number of a chunk in its stage; further chunks begin again."""
CHUNK_NAMES = ("first", "second", "third", "fourth")
KINDS = {
    "forward": ("forward", BLUE, "#FFFFFF"),
    "backward": ("backward", LIGHT_BLUE, "#000000"),
    "weight": ("gradients of weights", PURPLE, "#FFFFFF"),
    "transfer": ("transfer", ORANGE, "#000000"),
    "update": ("optimizer step", GRAY, "#000000"),
    "synchronization": ("gradient synchronization", GREEN, "#FFFFFF"),
}
"""By kind of bar: its name in the legend, its color, and the color of the number in it."""

BarKind = Literal["forward", "backward", "weight", "transfer", "update", "synchronization"]

PASSES: tuple[BarKind, ...] = ("forward", "backward", "weight")


class StageBar(NamedTuple):
    """One activity of one stage. Times are in seconds from the start of the iteration."""

    kind: BarKind
    micro_batch: int
    """Number of the micro-batch, from 0; 0 for update and synchronization."""
    start: float
    stop: float
    chunk: int = 0


@dataclass(frozen=True)
class Lane:
    """A row of the picture: one stage, drawn once for all replicas that are alike."""

    replicas: tuple[int, ...]
    stage: int
    name: str
    bars: tuple[StageBar, ...]


def lanes(simulation: PlanSimulation) -> list[Lane]:
    plan, end = simulation.plan, simulation.seconds
    rows = []
    for group in replica_groups(plan):
        events = simulation.timelines[group.numbers[0]].events
        for index, stage in enumerate(group.first.stages):
            bars = [StageBar(*event) for event in events[index]]
            if plan.synchronization_seconds > 0:
                # The optimizer step uses the sums of gradients. The simulation of a pipeline knows only its end.
                update = stage.update_seconds
                bars = [bar for bar in bars if bar.kind != "update"]
                bars.append(StageBar("synchronization", 0, end - update - plan.synchronization_seconds, end - update))
                bars += [StageBar("update", 0, end - update, end)] if update > 0 else []
            ranges = [f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in stage.block_ranges]
            one = len(ranges) == 1 and ranges[0].isdigit()
            layers = f"layer{'' if one else 's'} {' + '.join(ranges)}"
            stage_ranks = sorted(rank for replica in group.replicas for rank in replica.stages[index].ranks)
            ranks = f"{'rank' if len(stage_ranks) == 1 else 'ranks'} {short_ranks(stage_ranks)}"
            rows.append(
                Lane(
                    group.numbers,
                    index,
                    f"{device_in_words(stage.device, stage.recompute)}, {ranks}\n{layers}",
                    tuple(bars),
                )
            )
    return rows


def windows(simulation: PlanSimulation) -> list[tuple[float, float]]:
    """The drawn seconds of an iteration: the whole one, or its beginning and its end."""
    plan, end = simulation.plan, simulation.seconds
    longest = max(range(len(plan.replicas)), key=lambda number: simulation.timelines[number].seconds)
    stages = plan.replicas[longest].stages
    step = max(stage.micro_batch_seconds for stage in stages)
    pass_seconds = sum(stage.micro_batch_seconds for stage in stages)
    fill, drain = pass_seconds + SHOWN_STEPS * step, pass_seconds + SHOWN_STEPS / 2 * step
    drain += max(stage.update_seconds for stage in stages) + plan.synchronization_seconds
    if fill + drain > 0.8 * end:
        return [(0.0, end)]
    return [(0.0, fill), (end - drain, end)]


def plot_plan(
    plan: Plan,
    path: Path | str,
    *,
    slow: Mapping[int, float] | None = None,
    simulation: PlanSimulation | None = None,
) -> None:
    """Draw one iteration as a timeline for each stage, replicas that are alike once.

    Bars are forward and backward passes with the number of their micro-batch, transfers, optimizer steps and gradient
    synchronization; white is waiting. Further chunks of a stage are hatched.
    """
    path = check_name(path)
    check_matplotlib()
    from matplotlib.figure import Figure

    made = simulation or simulate_plan(plan, slow)
    all_lanes = lanes(made)
    shown, parts = all_lanes[:MAX_LANES], windows(made)
    height = 0.34 if len(shown) > 16 else 0.46
    figure = Figure(figsize=(14, 1.7 + height * max(len(shown), 2)), layout="constrained")
    axes = figure.subplots(
        1, len(parts), sharey=True, width_ratios=[stop - start for start, stop in parts], squeeze=False
    )[0]
    unit, _ = times([made.seconds])
    scale = {"s": 1.0, "ms": 1e3, "µs": 1e6}[unit]
    places = _places(shown)
    for axis, (start, stop) in zip(axes, parts, strict=True):
        _draw(axis, shown, places, (start, stop), scale)
    _label(axes[0], made, shown, places)
    _break(axes)
    axes[0].set_xlabel(f"time [{unit}]", fontsize=9)
    figure.suptitle(_title(made, len(shown), len(all_lanes)), x=0.01, ha="left", fontsize=11)
    _legend(figure, shown)
    _number(figure, axes, shown, places, parts, scale)
    save_figure(figure, path)


def _places(shown: Sequence[Lane]) -> list[float]:
    places: list[float] = []
    for index, lane in enumerate(shown):
        gap = 0.6 if index and shown[index - 1].replicas != lane.replicas else 0.0
        places.append((places[-1] + 1.0 if places else 0.0) + gap)
    return places


def _draw(axis: Any, shown: Sequence[Lane], places: Sequence[float], window: tuple[float, float], scale: float) -> None:
    start, stop = window
    for lane, place in zip(shown, places, strict=True):
        chunks = sorted({bar.chunk for bar in lane.bars})
        for (kind, (_, color, _)), chunk in itertools.product(KINDS.items(), chunks):
            intervals = [
                (bar.start * scale, (bar.stop - bar.start) * scale)
                for bar in lane.bars
                if bar.kind == kind and bar.chunk == chunk and bar.stop > start and bar.start < stop
            ]
            if intervals:
                # White edges separate micro-batches; short bars have none, because an edge would hide them.
                width = 0.4 if kind in PASSES else 0.0
                hatch = CHUNK_HATCHES[chunk % len(CHUNK_HATCHES)]
                axis.broken_barh(
                    intervals, (place - 0.4, 0.8), facecolor=color, edgecolor="#FFFFFF", linewidth=width, hatch=hatch
                )
    axis.set_xlim(start * scale, stop * scale)
    axis.set_ylim(places[-1] + 0.6, -0.9 if len({lane.replicas for lane in shown}) > 1 else -0.8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)


def _label(axis: Any, made: PlanSimulation, shown: Sequence[Lane], places: Sequence[float]) -> None:
    names = [lane.name if len(shown) <= 16 else lane.name.replace("\n", ", ") for lane in shown]
    axis.set_yticks(places, names, fontsize=8)
    axis.tick_params(axis="y", length=0)
    if len(made.plan.replicas) == 1:
        return
    for index, (lane, place) in enumerate(zip(shown, places, strict=True)):
        if index and shown[index - 1].replicas == lane.replicas:
            continue
        number, micro_batches = len(lane.replicas), made.plan.replicas[lane.replicas[0]].micro_batches
        text = f"replica{'s' if number > 1 else ''} {spans(lane.replicas, 3)}{f' (×{number})' if number > 1 else ''}"
        axis.annotate(
            f"{text}: {count(micro_batches, 'micro-batch')}{' each' if number > 1 else ''}",
            (0, place - 0.45),
            xycoords=("axes fraction", "data"),
            xytext=(4, 1),
            textcoords="offset points",
            va="bottom",
            fontsize=8,
            fontweight="bold",
        )


def _break(axes: Sequence[Any]) -> None:
    for left, right in itertools.pairwise(axes):
        right.spines["left"].set_visible(False)
        right.tick_params(axis="y", length=0, labelleft=False)
        mark = {
            "marker": [(-1, -2), (1, 2)],
            "markersize": 9,
            "linestyle": "none",
            "color": "#000000",
            "clip_on": False,
        }
        left.plot([1], [0], transform=left.transAxes, **mark)
        right.plot([0], [0], transform=right.transAxes, **mark)


def _title(made: PlanSimulation, shown: int, stages: int) -> str:
    plan = made.plan
    unit, (simulated, closed) = times([made.seconds, plan.iteration_seconds])
    rows = "" if shown == stages else f"; {shown} of {stages} stages"
    slow = "".join(f", rank {rank} slowed {factor:g} ×" for rank, factor in sorted(made.slow.items()))
    by_formula = f", {closed} {unit} by the closed form" if plan.schedule == "1f1b" else ""
    return (
        textwrap.fill(f"{plan.model}: {layout(plan)}", 150)
        + f"\niteration time: {simulated} {unit} by simulation{by_formula}{slow}{rows}"
    )


def _legend(figure: Any, shown: Sequence[Lane]) -> None:
    from matplotlib.patches import Patch

    used = {bar.kind for lane in shown for bar in lane.bars}
    handles = [Patch(facecolor=color, label=name) for kind, (name, color, _) in KINDS.items() if kind in used]
    for chunk in range(1, min(1 + max(bar.chunk for lane in shown for bar in lane.bars), len(CHUNK_HATCHES))):
        label = f"{CHUNK_NAMES[chunk]} chunk of a stage"
        handles.append(Patch(facecolor=BLUE, edgecolor="#FFFFFF", hatch=CHUNK_HATCHES[chunk], label=label))
    handles.append(Patch(facecolor="#FFFFFF", edgecolor="#888888", label="waiting"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def _number(
    figure: Any,
    axes: Sequence[Any],
    shown: Sequence[Lane],
    places: Sequence[float],
    parts: Sequence[tuple[float, float]],
    scale: float,
) -> None:
    figure.draw_without_rendering()
    numbers = 0
    for axis, (start, stop) in zip(axes, parts, strict=True):
        points = axis.get_window_extent().width * 72 / figure.dpi / (stop - start)
        for lane, place in zip(shown, places, strict=True):
            for bar in lane.bars:
                text = str(bar.micro_batch)
                inside = bar.start >= start and bar.stop <= stop
                room = (bar.stop - bar.start) * points
                if bar.kind not in PASSES or not inside or room < 5 * len(text) + 1:
                    continue
                if numbers >= MAX_NUMBERS:
                    return
                numbers += 1
                middle = (bar.start + bar.stop) / 2 * scale
                color = KINDS[bar.kind][2]
                axis.text(middle, place, text, ha="center", va="center_baseline", fontsize=7, color=color)
