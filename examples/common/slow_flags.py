"""``--slow`` and ``--slow-by``: who is made slow, by how much, and by what."""

from __future__ import annotations

import argparse
import math

from usage import UsageError

from colossal_hetero.testing.stragglers import parse_slowdowns

__all__ = ["add_slow_flags", "check_slow", "slowdowns"]

MEANS = ("auto", "quota", "repeat")
BY_DEFAULT = "1:4"


def add_slow_flags(group: argparse._ArgumentGroup) -> None:
    """The two flags."""
    group.add_argument(
        "--slow",
        metavar="RANK:FACTOR[,…]|none",
        help=f"make ranks slower by a whole number of times (default {BY_DEFAULT}; none: nobody)",
    )
    group.add_argument(
        "--slow-by",
        choices=MEANS,
        default="auto",
        help="quota lets the kernel hold the rank to 1 / FACTOR of a core (Linux, root); repeat does every pass again "
        "and again; auto: quota where that is possible, else repeat (default auto)",
    )


def slowdowns(slow: str | None, world_size: int) -> dict[int, int]:
    """How many times as long each rank's work is to take; ranks that are left alone are not in it.

    Args:
        slow: as on the command line; None is the default on more than one rank, nobody on one.
        world_size: ranks.
    """
    text = slow if slow is not None else (BY_DEFAULT if world_size > 1 else "none")
    slow_ranks = {} if text == "none" else parse_slowdowns(text)
    return {rank: int(slowdown) for rank, slowdown in slow_ranks.items() if slowdown != 1}


def check_slow(slow: str | None, world_size: int) -> None:
    """Raise ``UsageError`` if ``--slow`` names ranks that there are not, or slowdowns that cannot be."""
    if slow in (None, "none"):
        return
    shown = f"--slow {slow}"
    try:
        slow_ranks = parse_slowdowns(slow)
    except ValueError as error:
        raise UsageError(f"{shown}: {str(error).removeprefix('straggler ')}") from None
    for rank, factor in slow_ranks.items():
        if not 0 <= rank < world_size:
            raise UsageError(f"{shown}: there is no rank {rank}; there are {world_size} ranks, 0 to {world_size - 1}")
        if not (math.isfinite(factor) and factor >= 1 and factor == int(factor)):
            raise UsageError(f"{shown}: rank {rank} can be slowed a whole number of times, 1 or more, not {factor:g}")
