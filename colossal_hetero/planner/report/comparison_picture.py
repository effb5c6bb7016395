"""Draw the parts of an iteration of several plans beside each other."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from ...io.pictures import BLUE, GRAY, LIGHT_BLUE, ORANGE, save_figure
from ..evaluation.differences import time_parts
from ..evaluation.evaluate import EvaluatedPlan
from .plan_table import layout

__all__ = ["plot_comparison"]


def plot_comparison(plans: Sequence[tuple[str, EvaluatedPlan]], path: Path) -> None:
    """Write a picture with a bar for each plan: its parts by the closed form, and a mark for the simulated time.

    Args:
        plans: Each with its name.
        path: The file; its ending says the format.
    """
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
