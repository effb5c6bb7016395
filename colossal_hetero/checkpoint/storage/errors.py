"""What goes wrong with checkpoints."""

from __future__ import annotations

__all__ = ["CheckpointError", "DamagedCopy"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message says which, why, and what can be done."""


class DamagedCopy(Exception):
    """One copy of a file is missing, too short, or its check sums differ; another copy may be whole."""
