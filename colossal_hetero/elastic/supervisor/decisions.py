"""What the supervisor of a node decides: which workers start again, when all end, and the exit status. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum, auto

__all__ = ["Action", "NodeProgress", "after_exit", "describe_status", "exit_status", "shell_status"]


class Action(Enum):
    """What to do after a worker has ended."""

    NOTHING = auto()
    RESTART = auto()
    """Start this worker again."""
    END_ALL = auto()
    """Ask the other workers of the node to end."""


@dataclass(frozen=True)
class NodeProgress:
    """How far the workers of one node are; statuses are those of ``subprocess``: ``-n`` for signal ``n``."""

    max_restarts: int
    """How often each worker is started again."""
    restarts: tuple[int, ...]
    """By local rank: how often it was started again."""
    statuses: tuple[int | None, ...]
    """By local rank: the status with which it ended for good, or None while it runs."""
    is_ending: bool = False
    """Whether all workers were asked to end, so that none is started again."""
    first_failure: int | None = None
    """The status of the first worker that ended for good with an error."""

    @classmethod
    def start(cls, workers: int, max_restarts: int) -> NodeProgress:
        """All of ``workers`` run for the first time."""
        return cls(max_restarts, (0,) * workers, (None,) * workers)

    @property
    def is_over(self) -> bool:
        """Whether no worker runs."""
        return None not in self.statuses


def after_exit(progress: NodeProgress, local_rank: int, status: int) -> tuple[NodeProgress, Action]:
    """The progress after the worker ``local_rank`` has ended with ``status``, and what to do about it."""
    if status != 0 and not progress.is_ending and progress.restarts[local_rank] < progress.max_restarts:
        restarts = list(progress.restarts)
        restarts[local_rank] += 1
        return replace(progress, restarts=tuple(restarts)), Action.RESTART
    statuses = list(progress.statuses)
    statuses[local_rank] = status
    progress = replace(progress, statuses=tuple(statuses))
    if status == 0:
        return progress, Action.NOTHING
    if progress.first_failure is None:
        progress = replace(progress, first_failure=status)
    if progress.is_ending:
        return progress, Action.NOTHING
    return replace(progress, is_ending=True), Action.END_ALL


def exit_status(progress: NodeProgress) -> int:
    """Exit status of the supervisor: 0 if all workers ended with 0, else that of the first failure, as in a shell."""
    return shell_status(progress.first_failure or 0)


def shell_status(status: int) -> int:
    """The exit status that a shell shows: ``128 + n`` for a process that was ended by signal ``n``."""
    return 128 - status if status < 0 else status


def describe_status(status: int) -> str:
    """``exit status 3`` or ``signal 9 (SIGKILL)``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal
        return f"signal {-status}"
