"""What a run needs from the members of its job, however they find each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Members"]


class Members(Protocol):
    """The members of a job; ``elastic/membership`` has those that survive each other."""

    @property
    def board(self) -> Any:
        """Where all processes of the job publish texts; None if each of them is in one world only."""

    def form(self) -> Sequence[str]:
        """Form a world; returns the node of each member, by rank."""

    def seal(self) -> None:
        """All groups of this world exist."""

    def fail(self, reason: str) -> None:
        """Tell the others that this world is broken."""

    def is_broken(self) -> bool:
        """Whether a member of this world is known to be lost."""

    def leave(self) -> None:
        """Drop all groups of this world."""

    def is_somebody_waiting(self) -> bool:
        """Whether a process waits to join."""

    def depart(self) -> None:
        """Leave the job for good."""

    def end_job(self) -> None:
        """The job has ended: processes that come later end at once."""

    def is_leaving(self) -> bool:
        """Whether this member was told that it will be taken away."""
