"""Colossal-AI's checkpoints in elastic training: ``Booster`` keeps one object, and each world has groups of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colossalai.checkpoint_io import CheckpointIO

__all__ = ["PresentCheckpointIO"]


class PresentCheckpointIO:
    """Does what the ``CheckpointIO`` of the present world does.

    Args:
        make: makes it for the world that there is. All ranks call methods at once.
    """

    def __init__(self, make: Callable[[], CheckpointIO]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)
