"""Atomic file writes: readers see the old file or the complete new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """The path of a temporary file beside ``path``. When the block ends, the temporary file replaces ``path``.

    If the block raises an error, ``path`` stays as it was and the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
