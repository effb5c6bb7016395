"""Draw an allocation: the throughput of each kind of device, and the timeline of each device during a global batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ...common.text import BLUE, ORANGE, RED, check_matplotlib, check_name, save_figure, spans
from ..batches.allocation import Allocation
from ..batches.comparison import BatchComparison
from ..batches.time_curve import Curve
from .batch_table import DeviceLine, device_lines

__all__ = ["Interval", "plot_report", "timelines"]

MAX_STEPS = 200
MAX_ROWS = 40
KINDS = {"busy": "computing", "communication": "communication", "idle": "waiting"}
COLORS = {"busy": BLUE, "communication": ORANGE, "idle": "#FFFFFF"}
MARKERS = "os^Dv<>P"


class Interval(NamedTuple):
    """One activity of a device, in seconds from the start of the global batch."""

    kind: Literal["busy", "communication", "idle"]
    start: float
    end: float


def timelines(curves: Sequence[Curve], allocation: Allocation, max_steps: int = MAX_STEPS) -> list[list[Interval]]:
    """Intervals of each rank in one global batch, or in its first ``max_steps`` micro-steps; by rank, then by time."""
    steps = [
        [float(curve.seconds[size]) for size in share.sizes[:max_steps]]
        for curve, share in zip(curves, allocation.shares, strict=True)
    ]
    active = [rank for rank, seconds in enumerate(steps) if seconds]
    cut = any(share.steps > max_steps for share in allocation.shares)
    if allocation.stage < 2:
        return _one_synchronization(steps, active, allocation, cut)
    count = len(steps[active[0]])
    each = allocation.communication_seconds / allocation.shares[active[0]].steps
    found: list[list[Interval]] = [[] for _ in steps]
    start = 0.0
    for step in range(count):
        computed = start + max(steps[rank][step] for rank in active)
        for rank in active:
            end = start + steps[rank][step]
            found[rank] += _intervals(
                ("busy", start, end), ("idle", end, computed), ("communication", computed, computed + each)
            )
        start = computed + each
    return found


def _one_synchronization(
    steps: list[list[float]], active: list[int], allocation: Allocation, cut: bool
) -> list[list[Interval]]:
    found: list[list[Interval]] = [[] for _ in steps]
    computed = allocation.wall_seconds - allocation.communication_seconds
    # If ranks have more micro-steps than are drawn, the picture ends with the earliest of their last drawn ones.
    end = min(
        (sum(steps[rank]) for rank in active if allocation.shares[rank].steps > len(steps[rank])), default=computed
    )
    for rank in active:
        start = 0.0
        for seconds in steps[rank]:
            found[rank] += _intervals(("busy", min(start, end), min(start + seconds, end)))
            start += seconds
        if start < end:
            found[rank] += _intervals(("idle", start, end))
        if not cut:
            found[rank] += _intervals(("communication", computed, allocation.wall_seconds))
    return found


def _intervals(*parts: tuple[Literal["busy", "communication", "idle"], float, float]) -> list[Interval]:
    return [Interval(*part) for part in parts if part[2] > part[1]]


def plot_report(report: BatchComparison, path: Path | str) -> None:
    path = check_name(path)
    check_matplotlib()
    from matplotlib.figure import Figure

    lines = device_lines(report.profile, report.chosen)
    shown = lines[:MAX_ROWS]
    figure = Figure(figsize=(11, min(6.0 + 0.4 * len(shown), 24)), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[4.0, 1.2 + 0.4 * len(shown)])
    _draw_curves(upper, report)
    _draw_timeline(lower, report, shown, len(lines))
    handles, labels = lower.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    save_figure(figure, path)


def _draw_curves(axis: Any, report: BatchComparison) -> None:
    from matplotlib import colormaps

    profile = report.profile
    colors = colormaps["viridis"](np.linspace(0.0, 0.85, len(profile.kinds)))
    for index, kind in enumerate(profile.kinds):
        ranks = [rank for rank, each in enumerate(profile.ranks) if each == index]
        if not ranks:
            continue
        curve, style = report.curves[ranks[0]], {"color": colors[index], "marker": MARKERS[index % len(MARKERS)]}
        batches = np.arange(1, curve.max_batch + 1)
        axis.plot(batches, batches / curve.seconds[1:], color=colors[index], linewidth=1.5)
        inside = [point for point in kind.points if point.batch <= curve.max_batch]
        outside = [point for point in kind.points if point.batch > curve.max_batch]
        name = f"{kind.device}, {'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"
        axis.plot(
            [p.batch for p in inside], [p.batch / p.seconds for p in inside], linestyle="none", label=name, **style
        )
        if outside:
            speeds = [p.batch / p.seconds for p in outside]
            axis.plot([p.batch for p in outside], speeds, linestyle="none", fillstyle="none", **style)
        used = sorted({report.chosen.shares[rank].micro_batch for rank in ranks} - {0})
        axis.plot(
            used,
            [batch / curve.seconds[batch] for batch in used],
            "o",
            markersize=13,
            fillstyle="none",
            color=RED,
            linestyle="none",
        )
    axis.plot([], [], "o", markersize=11, fillstyle="none", color=RED, linestyle="none", label="chosen micro-batch")
    axis.set_xlabel("micro-batch [samples]")
    axis.set_ylabel("throughput [samples/s]")
    longest = max(curve.max_batch for curve in report.curves)
    axis.set_xlim(0, 1.25 * longest + 0.5)
    axis.set_ylim(0, 1.12 * max(curve.peak_speed for curve in report.curves))
    axis.set_title(
        "Throughput: measured (points; open points exceed the memory limit) and fitted (lines)", loc="left", fontsize=11
    )
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    _plain_axes(axis, "y")


def _draw_timeline(axis: Any, report: BatchComparison, lines: Sequence[DeviceLine], count: int) -> None:
    chosen = report.chosen
    intervals = timelines(report.curves, chosen)
    scale, unit = (1.0, "s") if chosen.wall_seconds >= 1 else (1e3, "ms")
    for kind, name in KINDS.items():
        label: str | None = name
        for row, line in enumerate(lines):
            bars = [
                (each.start * scale, (each.end - each.start) * scale)
                for each in intervals[line.ranks[0]]
                if each.kind == kind
            ]
            if bars:
                axis.broken_barh(bars, (row - 0.36, 0.72), label=label, **_style(kind))
                label = None
    names = [
        f"{report.profile.kinds[line.kind].device}, {spans(line.ranks)}{' (dropped)' if line.dropped else ''}"
        for line in lines
    ]
    axis.set_yticks(range(len(lines)), names, fontsize=9)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(left=0)
    axis.set_xlabel(f"time [{unit}]")
    steps = max(share.steps for share in chosen.shares)
    extent = (
        f"first {MAX_STEPS} of {steps:,} micro-steps"
        if steps > MAX_STEPS
        else f"{chosen.wall_seconds * scale:.4g} {unit}"
    )
    rows = "" if count == len(lines) else f", {len(lines)} of {count} groups of ranks"
    axis.set_title(
        f"A global batch of {chosen.global_batch_size:,}, stage {chosen.stage}, method {chosen.method}: {extent}{rows}",
        loc="left",
        fontsize=11,
    )
    _plain_axes(axis, "x")


def _plain_axes(axis: Any, grid: str) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)


def _style(kind: str) -> dict[str, Any]:
    if kind == "idle":
        return {"facecolor": COLORS[kind], "edgecolor": RED, "hatch": "/////", "linewidth": 0.0}
    return {"facecolor": COLORS[kind], "edgecolor": "#FFFFFF", "linewidth": 0.3}
