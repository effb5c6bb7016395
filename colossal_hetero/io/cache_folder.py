"""The folder in which measurements are kept for later runs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["default_folder"]


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/colossal_hetero``, or ``~/.cache/colossal_hetero``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "colossal_hetero"
