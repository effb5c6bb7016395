"""What a rank holds between two worlds."""

from __future__ import annotations

from dataclasses import dataclass

from ...checkpoint.format.pieces import TensorPiece
from ...checkpoint.format.run_state import RunState

__all__ = ["Held"]


@dataclass(frozen=True)
class Held:
    """Parameters, the optimizer's state, and the state of the run."""

    pieces: list[TensorPiece]
    kinds: dict[str, str]
    """See :func:`.optimizer_memory.state_entries`."""
    state: RunState | None
