"""Waiting for nodes when no plan fits the members that are there.

The members stay in their world, and keep what they hold. When a process waits to join, or a member leaves, all of them
form the next world and plan again.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch.distributed as dist

from ....elastic.members import Members

__all__ = ["TooFewNodes", "WaitForNodes"]

SECONDS_PER_LOOK = 0.1
"""Between two looks whether somebody has come."""


class TooFewNodes(Exception):
    """No plan fits the members that are there, and nobody came within the limit."""


class WaitForNodes:
    """How long this member has been waiting for nodes.

    Args:
        members: of the job.
        limit_seconds: longest wait, from the first plan that was not possible to one that is.
    """

    def __init__(self, members: Members, limit_seconds: float) -> None:
        self._members, self._limit = members, limit_seconds
        self._since: float | None = None

    def end(self) -> None:
        """There is a plan."""
        self._since = None

    def wait(self, problem: str) -> None:
        """Wait until a process waits to join, or a member leaves. All ranks call it.

        Args:
            problem: why there is no plan.

        Raises:
            TooFewNodes: on all ranks, after the limit.
            RuntimeError: a member is lost.
        """
        if self._since is None:
            self._since = time.monotonic()
        waited = time.monotonic() - self._since
        size = dist.get_world_size()
        there = f"{size} member{'s' if size > 1 else ''}"
        if dist.get_rank() == 0:
            left = max(self._limit - waited, 0.0)
            words = f"there is no plan for {there}; waiting up to {left:.0f} s for more nodes: {problem}"
            print(f"colossal_hetero: {words}", file=sys.stderr, flush=True)
        while True:
            words_of_all: list[Any] = [None] * size
            comes = dist.get_rank() == 0 and self._members.is_somebody_waiting()
            waited = time.monotonic() - self._since
            dist.all_gather_object(words_of_all, (comes, self._members.is_leaving(), waited))
            if any(comes or leaves for comes, leaves, _ in words_of_all):
                return
            if max(waited for *_, waited in words_of_all) > self._limit:
                raise TooFewNodes(
                    f"{there}, and no more came within {self._limit:g} s: {problem}. Start more nodes, and then the "
                    "job again from its latest checkpoint"
                )
            time.sleep(SECONDS_PER_LOOK)
