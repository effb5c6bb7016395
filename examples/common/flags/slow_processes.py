"""``--straggler`` and ``--straggler-means`` of the ZeRO and the pipeline example: which ranks are slow, and how."""

from __future__ import annotations

import argparse
import math

from colossal_hetero.common.text import parse_rank_factors

from .parser import UsageError

__all__ = ["add_straggler_flags", "check_stragglers", "slowdowns"]

MEANS = ("auto", "quota", "repeat")
DEFAULT = "1:4"


def add_straggler_flags(group: argparse._ArgumentGroup) -> None:
    """Add the two flags."""
    group.add_argument(
        "--straggler",
        metavar="RANK:FACTOR[,…]|none",
        help=f"make ranks slower by a whole number of times (default {DEFAULT}; none: no rank)",
    )
    group.add_argument(
        "--straggler-means",
        choices=MEANS,
        default="auto",
        help="quota: the kernel holds the rank to 1 / FACTOR of a core (Linux, root); repeat: the rank does every pass "
        "FACTOR times; auto: quota where that is possible, else repeat (default auto)",
    )


def slowdowns(straggler: str | None, world_size: int) -> dict[int, int]:
    """How many times as long each slow rank's work takes, by rank.

    Args:
        straggler: as on the command line; None means the default if there is more than one rank, else no slow rank.
        world_size: number of ranks.
    """
    text = straggler if straggler is not None else (DEFAULT if world_size > 1 else "none")
    factors = {} if text == "none" else parse_rank_factors(text)
    return {rank: int(factor) for rank, factor in factors.items() if factor != 1}


def check_stragglers(straggler: str | None, world_size: int) -> None:
    """Raise ``UsageError`` if ``--straggler`` names a rank that does not exist, or a factor that is not possible."""
    if straggler in (None, "none"):
        return
    shown = f"--straggler {straggler}"
    try:
        factors = parse_rank_factors(straggler)
    except ValueError as error:
        raise UsageError(f"{shown}: {error}") from None
    for rank, factor in factors.items():
        if not 0 <= rank < world_size:
            raise UsageError(f"{shown}: there is no rank {rank}; there are {world_size} ranks, 0 to {world_size - 1}")
        if not (math.isfinite(factor) and factor >= 1 and factor == int(factor)):
            raise UsageError(f"{shown}: rank {rank} can be slowed a whole number of times, 1 or more, not {factor:g}")
