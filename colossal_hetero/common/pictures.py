"""Shared by all pictures: colors, file formats, and matplotlib, which is imported when something is drawn.

matplotlib is an optional dependency: ``pip install 'colossal-hetero[plot]'``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from .atomic_files import replacing

__all__ = ["BLUE", "FORMATS", "GRAY", "LIGHT_BLUE", "ORANGE", "RED", "check_matplotlib", "check_name", "save_figure"]

FORMATS = ("png", "pdf", "svg")
"""Formats of pictures, by the ending of the file's name."""

BLUE, LIGHT_BLUE, GRAY, ORANGE, RED = "#0072B2", "#8CCBF0", "#D9D9D9", "#E69F00", "#D55E00"
"""Colors after Okabe and Ito, which can be told apart with every kind of color vision."""


def check_matplotlib() -> None:
    """Check, before the work starts, that its result can be drawn."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"pictures need matplotlib, which cannot be imported ({error}); pip install 'colossal-hetero[plot]'"
        ) from None


def check_name(path: Path | str) -> Path:
    """``path`` as a path."""
    path = Path(path)
    if path.suffix[1:].lower() not in FORMATS:
        raise ValueError(f"cannot tell the kind of picture from {path}; end the name in .{', .'.join(FORMATS)}")
    return path


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure atomically, in the format that the name of the file says."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)
