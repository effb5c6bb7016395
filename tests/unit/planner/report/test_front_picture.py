"""The picture of plans that are worth their price."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from colossal_hetero.planner.report.plan_picture import plot_front, proved_edge
from colossal_hetero.planner.solver.pareto_front import FrontPoint


def point(dollars: float, seconds: float, gap: float) -> FrontPoint:
    """A point with this cost of 1,000 iterations."""
    plan: Any = SimpleNamespace(iteration_seconds=seconds)
    cost: Any = SimpleNamespace(dollars_per_iteration=dollars / 1000)
    return FrontPoint(plan, cost, (1,), gap)


def height(edge: list[tuple[float, float]], dollars: float) -> float:
    """Of the edge that is drawn: that of the next corner on the right."""
    return next((seconds for corner, seconds in edge if dollars < corner), 0.0)


def test_nothing_is_drawn_as_excluded_that_is_not() -> None:
    draw = random.Random(0)
    for _ in range(200):
        front = [point(draw.uniform(1, 9), draw.uniform(1, 9), draw.choice((0.0, 0.1, 1.0))) for _ in range(4)]
        edge = proved_edge(front)
        assert edge == sorted(edge)
        for _ in range(50):
            dollars, seconds = draw.uniform(0, 10), draw.uniform(0, 10)
            excluded = any(
                dollars * (1 + each.gap) < 1000 * each.cost.dollars_per_iteration
                and seconds * (1 + each.gap) < each.plan.iteration_seconds
                for each in front
            )
            assert excluded == (seconds < height(edge, dollars))


def test_plans_are_drawn_as_in_the_table(tmp_path: Path, monkeypatch: Any) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("colossal_hetero.planner.report.plan_picture.save_figure", lambda each, _: drawn.append(each))
    front = [point(70, 4, 0.2), point(60, 8, 0.1)]
    types: Any = [SimpleNamespace(name="a100")]
    plot_front(front, types, front[0], tmp_path / "front.png")
    found, proved, chosen = drawn[0].axes[0].lines
    assert [list(each) for each in found.get_data()] == [[60, 70], [8, 4]]
    assert [list(each) for each in chosen.get_data()] == [[70], [4]]
    assert list(proved.get_xdata()) == [60 / 1.1, 70 / 1.2]
