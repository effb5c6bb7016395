"""The plans that are worth their price, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ...io.text import times
from ..prices.node_choice import NodeType
from ..prices.pareto_front import FrontPoint
from ..prices.plan_cost import HOUR
from .plan_table import layout

__all__ = ["dollars", "nodes_in_words", "render_front", "totals", "training_in_words"]


def render_front(
    front: Sequence[FrontPoint], types: Sequence[NodeType], chosen: FrontPoint, samples: int | None = None
) -> Table:
    """A row for each point, the fastest first; the chosen one is bold.

    Args:
        front: see :func:`.pareto_front.pareto_front`.
        types: of nodes in the cluster.
        chosen: one of the points.
        samples: of the whole training, for its time and cost.
    """
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
    """Hours and dollars of a training of so many samples."""
    iterations = samples / point.plan.global_batch
    return iterations * point.seconds / HOUR, iterations * point.dollars


def training_in_words(seconds: float | None, dollars_each: float | None, *, iterations: float) -> str:
    """What a training of so many iterations takes, from seconds and dollars of one, where they are given."""
    hours = "" if seconds is None else f"{iterations * seconds / HOUR:,.4g} h"
    price = "" if dollars_each is None else f"${iterations * dollars_each:,.4g}"
    return " for ".join(each for each in (hours, price) if each)


def nodes_in_words(point: FrontPoint, types: Sequence[NodeType]) -> str:
    """``2 × a100, 1 × v100``."""
    return ", ".join(f"{count} × {each.name}" for each, count in zip(types, point.nodes, strict=True) if count)


def dollars(amount: float) -> str:
    """With two decimals, or three digits if it is less than a dollar."""
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"
