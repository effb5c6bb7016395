"""Atomic file writes: others see the old file or the complete new one, never a part of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Give the path of a draft beside ``path``; when the block ends without an error, the draft replaces ``path``.

    If the block raises, ``path`` stays as it was and the draft is removed.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
