"""The picture of an iteration: what is in it, and how it gets into its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from colossal_hetero.balance.timeline import (
    KIND_NAMES,
    IterationTimeline,
    Segment,
    plot_timelines,
)
from tests.support.figures import saved_figures

SLOW = (Segment("matmul", 0.0, 0.2), Segment("communication", 0.2, 0.25))
FAST = (Segment("matmul", 0.0, 0.05), Segment("waiting", 0.05, 0.2), Segment("communication", 0.2, 0.25))
BEFORE = IterationTimeline(4, (FAST, SLOW))
AFTER = IterationTimeline(16, (SLOW[:1], SLOW[:1]))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    return saved_figures(monkeypatch)


@pytest.mark.parametrize("ending", ["png", "pdf", "svg", "PNG"])
def test_a_picture_is_written_whole_and_nothing_else(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"timeline.{ending}"
    path.write_text("an older picture")
    plot_timelines(BEFORE, AFTER, str(path))
    assert list(tmp_path.iterdir()) == [path]
    start = path.read_bytes()[:200].lstrip()
    assert start.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[ending.lower()])
    if ending == "png":
        with Image.open(path) as image:
            image.load()
            assert image.width > 1000


def test_both_iterations_are_on_one_axis_with_a_row_per_rank_and_a_legend(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_timelines(BEFORE, AFTER, tmp_path / "timeline.png")
    (figure,) = drawn
    upper, lower = figure.axes
    assert upper.get_title(loc="left") == "Before balancing: iteration 4, 250 ms"
    assert lower.get_title(loc="left") == "After: iteration 16, 200 ms"
    assert upper.get_xlim() == lower.get_xlim() == (0, pytest.approx(250))
    for axis in (upper, lower):
        assert [label.get_text() for label in axis.get_yticklabels()] == ["rank 0", "rank 1"]
        assert axis.get_ylim()[0] > axis.get_ylim()[1]  # rank 0 on top
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == [KIND_NAMES[kind] for kind in ("matmul", "communication", "waiting")]
    # Rank 0 waits from 50 to 200 ms.
    (waiting,) = (bars for bars in upper.collections if bars.get_hatch())
    (bar,) = waiting.get_paths()
    assert bar.get_extents().bounds == pytest.approx((50, -0.36, 150, 0.72))


def test_an_iteration_without_a_plan_stands_alone(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_timelines(BEFORE, None, tmp_path / "timeline.png")
    (axis,) = drawn[0].axes
    assert axis.get_title(loc="left") == "Latest: iteration 4, 250 ms"
