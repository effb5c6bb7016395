"""The figures that matplotlib saves in a test."""

import pytest
from matplotlib.figure import Figure


def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """A list to which each figure that is saved from now on is appended. They are saved as usual."""
    figures: list[Figure] = []
    save = Figure.savefig

    def remember(self: Figure, *args: object, **options: object) -> None:
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", remember)
    return figures
