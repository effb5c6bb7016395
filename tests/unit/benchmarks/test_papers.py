"""The page of the papers' figures, and figures that are computed at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers import adapt, autohet, holmes, page, poplar, semi
from benchmarks.papers.page import Curves, Figure, Inputs

NO_INPUTS = Inputs("", Path("."))


def test_a_figure_replaces_its_section_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "papers.md")
    monkeypatch.setattr(page, "PICTURES", tmp_path / "papers")
    (tmp_path / "papers.md").write_text("# Papers\n", encoding="utf-8")
    for number, name in ((1, "semi a"), (2, "semi b"), (3, "semi a")):
        curves = [Curves("x", "y", {"here": ([1, 2], [3, number])})] if name == "semi a" else []
        page.show(name, Figure(f"Title {name}", ("χ [s]", "paper"), [(number, 0.5)], f"Why {number}.", curves))
    text = (tmp_path / "papers.md").read_text(encoding="utf-8")
    assert "Why 1." not in text and text.index("Why 3.") < text.index("Why 2.")
    assert "| χ [s] | paper |" in text and "| 3     | 0.50  |" in text
    assert [each.name for each in (tmp_path / "papers").iterdir()] == ["semi-a.png"]


def test_fitted_networks_give_the_fitted_cells_of_holmes() -> None:
    efficiency, fitted = holmes.fit()
    for name in ("InfiniBand", "RoCE", "Ethernet"):
        model, batch = holmes.GROUPS[1]
        here = holmes.batch_of(model, batch, holmes.topology([name], 4, fitted), efficiency)
        assert here == pytest.approx(holmes.PAPER[name, 1][0], rel=1e-3)


def test_every_part_of_autohet_makes_it_faster() -> None:
    figure = autohet.fig9(NO_INPUTS)
    gains = [float(row[2]) for row in figure.rows]
    assert gains == sorted(gains) and gains[0] == 1.0 < gains[-1]


def test_plans_of_semi_prune_what_eq_1_says() -> None:
    """With χ = 4 and products only: γ = (1 − 1/χ) of the minimum, and less of the mean of eight ranks."""
    slowdowns = [4.0, *[1.0] * 7]
    assert semi.decided("zero-pridiff-e", slowdowns).resize[0] == 0.5
    assert semi.decided("zero-pridiff-r", slowdowns).resize[0] == pytest.approx((4 - 11 / 8) / 4)
    assert not any(semi.decided("auto", slowdowns).resize)


def test_all_papers_have_figures() -> None:
    for module in (adapt, autohet, holmes, poplar, semi):
        assert module.FIGURES and all(map(callable, module.FIGURES.values()))
