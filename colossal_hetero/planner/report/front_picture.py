"""Draw the plans that are worth their price: time of an iteration over its cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from ...io.pictures import BLUE, ORANGE, save_figure
from ..prices.node_choice import NodeType
from ..prices.pareto_front import FrontPoint
from .front_table import nodes_in_words

__all__ = ["plot_front", "proved_edge"]


def plot_front(front: Sequence[FrontPoint], types: Sequence[NodeType], chosen: FrontPoint, path: Path) -> None:
    """Write a picture, with the line beyond which no plan can be, by the lower bounds.

    Args:
        front: see :func:`.pareto_front.pareto_front`.
        types: of nodes in the cluster.
        chosen: one of the points.
        path: the file; its ending says the format.
    """
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

    By its gap, each point excludes all plans that are better in both than a corner. Between two corners the edge has
    the height of the one on the right.
    """
    corners: list[tuple[float, float]] = []
    for point in front:
        dollars = 1000 * point.dollars / (1 + point.gap)
        corners.append((dollars, point.seconds / (1 + point.gap)))
    corners.sort(reverse=True)
    # Where plans are excluded up to some dollars, they are also excluded for less.
    heights = itertools.accumulate((seconds for _, seconds in corners), max)
    return [(dollars, height) for (dollars, _), height in zip(corners, heights, strict=True)][::-1]
