"""How many units of each kind every rank computes: the exact optimum, if it gains more than measurement noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from .plan import Counts
from .whole_units import Line, UnitKind, fastest_counts, moved_units, slowest_seconds

__all__ = ["MIN_GAIN", "KindProblem", "decide_counts", "iteration_seconds"]

MIN_GAIN = 0.005
"""The minimum gain for which a division is changed, as a share of the time of the blocks."""


@dataclass(frozen=True)
class KindProblem:
    """The blocks of one kind: how fast each rank is, and what sending costs."""

    kind: UnitKind
    lines: Sequence[Line]
    """By rank, in seconds of an iteration."""
    seconds_per_unit: float = 0.0
    """What each moved unit adds to an iteration (Φ1)."""

    def seconds(self, counts: Sequence[int]) -> float:
        """Seconds of the kind's blocks in an iteration, if each rank computes so many units."""
        sending = self.seconds_per_unit * moved_units(self.kind, counts)
        return slowest_seconds(self.lines, counts) + sending


def iteration_seconds(problems: Sequence[KindProblem], counts: Counts, fixed_seconds: float = 0.0) -> float:
    """Seconds of all blocks in an iteration; ``fixed_seconds`` is what moving anything at all adds.

    Ranks wait for each other at the end of each block, so it is a sum over blocks of the time of the slowest rank.
    """
    moves = any(moved_units(problem.kind, of_kind) for problem, of_kind in zip(problems, counts, strict=True))
    blocks = fsum(problem.seconds(of_kind) for problem, of_kind in zip(problems, counts, strict=True))
    return blocks + (fixed_seconds if moves else 0.0)


def decide_counts(
    problems: Sequence[KindProblem], current: Counts, uncertainty: float, fixed_seconds: float = 0.0
) -> tuple[Counts, str]:
    """The counts from now on, and why.

    They stay ``current`` unless others save more than ``uncertainty``, a share of the time of the blocks below which a
    difference may be chance. Moving nothing is preferred to a division that saves less than half of that over it.

    Args:
        problems: one for each kind of blocks.
        current: the present units by kind and rank.
        uncertainty: in 0 to 1.
        fixed_seconds: what moving anything at all adds to an iteration.
    """
    nothing = tuple((problem.kind.units,) * len(problem.lines) for problem in problems)
    wanted = tuple(fastest_counts(problem.kind, problem.lines, problem.seconds_per_unit) for problem in problems)
    now, best, without = (iteration_seconds(problems, counts, fixed_seconds) for counts in (current, wanted, nothing))
    required = max(uncertainty, MIN_GAIN)
    if without - best <= required / 2 * without:
        wanted, best = nothing, without
    compared = f"{best:.3g} s in blocks with, {without:.3g} s without"
    if now - best <= required * now:
        if current == nothing:
            return nothing, f"balancing would gain too little: {compared}"
        return current, f"migration pays: {compared}"
    if wanted == nothing:
        return nothing, f"migration cannot pay: {compared}"
    return wanted, f"migration pays: {compared}"
