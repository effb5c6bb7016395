"""The first world of a job waits for the members that are expected, so that they need not join one after the other."""

from __future__ import annotations

import sys
import time

from .new_kinds import Board

__all__ = ["a_world_has_formed", "wait_for_the_first_world"]

SECONDS_PER_LOOK = 0.1
STARTED, FORMED = "started", "in a world"
"""Numbers of processes that have come before the first world, and that have been in one."""


def a_world_has_formed(board: Board) -> None:
    """Processes that come from now on do not wait for others."""
    board.count(FORMED, 1)


def wait_for_the_first_world(board: Board, expected: int, limit_seconds: float) -> None:
    """Wait until ``expected`` processes are there, a world has formed, or the limit is over.

    The first process says how many are there.
    """
    if limit_seconds <= 0 or board.count(FORMED, 0):
        return
    number, deadline, shown = board.count(STARTED, 1), time.monotonic() + limit_seconds, 0
    while True:
        there = board.count(STARTED, 0)
        if number == 1 and there != shown:
            shown = there
            left = max(deadline - time.monotonic(), 0.0)
            waits = f"; waiting up to {left:.0f} s for the others" if there < expected else ""
            words = f"colossal_hetero: {there} of {expected} members are there{waits}"
            print(words, file=sys.stderr, flush=True)
        if there >= expected or time.monotonic() > deadline or board.count(FORMED, 0):
            return
        time.sleep(SECONDS_PER_LOOK)
