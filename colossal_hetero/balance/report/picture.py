"""Draw an iteration before and after balancing: a bar of time per rank.

matplotlib is an optional dependency (``pip install 'colossal-hetero[plot]'``), which is imported on drawing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...io.pictures import BLUE, FORMATS, GRAY, LIGHT_BLUE, ORANGE, RED, check_matplotlib, check_name, save_figure
from ..measure.timeline_sampler import Kind
from .timeline import KIND_NAMES, IterationTimeline

__all__ = ["FORMATS", "check_matplotlib", "plot_timelines"]

COLORS: dict[Kind, str] = {
    "matmul": BLUE,
    "block": LIGHT_BLUE,
    "other": GRAY,
    "communication": ORANGE,
    "waiting": "#FFFFFF",
}
"""The colors of the kinds, which also differ in lightness."""

WAITING_EDGE = RED
"""The color of the hatching of waiting, the time that balancing reduces."""


def plot_timelines(before: IterationTimeline, after: IterationTimeline | None, path: Path | str) -> None:
    """Draw the iterations, with a bar per rank, above each other on the same time axis into the file ``path``.

    The file is replaced atomically. If ``after`` is None, only ``before`` is drawn.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the name does not end in one of :data:`FORMATS`.
    """
    path = check_name(path)
    check_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = [("Latest", before)] if after is None else [("Before balancing", before), ("After", after)]
    height = 0.25 + 0.4 * len(before.ranks)
    figure = Figure(figsize=(11, min(0.9 + len(panels) * (0.7 + height), 60)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, timeline) in zip(axes, panels, strict=True):
        _draw(axis, timeline)
        axis.set_title(
            f"{title}: iteration {timeline.iteration}, {timeline.seconds * 1e3:.0f} ms", loc="left", fontsize=11
        )
    axes[-1].set_xlabel("time in the iteration [ms]")
    axes[-1].set_xlim(0, max(timeline.seconds for _, timeline in panels) * 1e3 or 1.0)
    used = {kind for _, timeline in panels for segments in timeline.ranks for kind, _, _ in segments}
    handles = [Patch(label=name, **_style(kind)) for kind, name in KIND_NAMES.items() if kind in used]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    save_figure(figure, path)


def _draw(axis: Any, timeline: IterationTimeline) -> None:
    for rank, segments in enumerate(timeline.ranks):
        for kind in KIND_NAMES:
            bars = [(start * 1e3, (end - start) * 1e3) for part, start, end in segments if part == kind]
            if bars:
                axis.broken_barh(bars, (rank - 0.36, 0.72), **_style(kind))
    axis.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))])
    axis.set_ylim(len(timeline.ranks) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)


def _style(kind: Kind) -> dict[str, Any]:
    if kind == "waiting":
        return {"facecolor": COLORS[kind], "edgecolor": WAITING_EDGE, "hatch": "/////", "linewidth": 0.0}
    return {"facecolor": COLORS[kind], "linewidth": 0.0}
