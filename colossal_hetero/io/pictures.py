"""What all pictures share: matplotlib loaded late, and a file that is there as a whole or not at all.

matplotlib is an extra (``pip install 'colossal-hetero[plot]'``), loaded when something is drawn.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from .atomic import replacing

__all__ = ["BLUE", "FORMATS", "GRAY", "LIGHT_BLUE", "ORANGE", "RED", "check_matplotlib", "check_name", "save_figure"]

FORMATS = ("png", "pdf", "svg")
"""Kinds of pictures, by the ending of the file's name."""

BLUE, LIGHT_BLUE, GRAY, ORANGE, RED = "#0072B2", "#8CCBF0", "#D9D9D9", "#E69F00", "#D55E00"
"""After Okabe and Ito, told apart with every kind of color vision."""


def check_matplotlib() -> None:
    """Find out before there is something to draw whether it can be drawn.

    Raises:
        ImportError: matplotlib is not there; the message says how to get it.
    """
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"pictures need matplotlib, which cannot be imported ({error}); pip install 'colossal-hetero[plot]'"
        ) from None


def check_name(path: Path | str) -> Path:
    """The path of a picture.

    Raises:
        ValueError: the name does not end in one of :data:`FORMATS`.
    """
    path = Path(path)
    if path.suffix[1:].lower() not in FORMATS:
        raise ValueError(f"cannot tell the kind of picture from {path}; end the name in .{', .'.join(FORMATS)}")
    return path


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure in the format that the name says; a picture that is there stays until it is done."""
    with replacing(path) as draft:
        figure.savefig(draft, format=path.suffix[1:].lower(), dpi=150)
