"""From a plan's shares to whole units: which ranges of a layer's units go from whom to whom.

A *unit* is what can be pruned or given away: a contraction column, a hidden neuron, a head. Every rank holds equally
many units of a layer or block. Units are dealt in *grains*, since matrix products like round sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .plan import BalancePlan

__all__ = ["Division", "Move", "divide", "effective_grain"]

GRAINS = 32
"""A rank's units make at least so many grains, so that rounding to a grain moves at most 3 % of its work."""


@dataclass(frozen=True)
class Move:
    """Units ``[start, stop)`` of the sender's own are computed by the receiver."""

    sender: int
    receiver: int
    start: int
    stop: int

    @property
    def units(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Division:
    """Who computes which units of one layer or block."""

    units: int
    """Units that each rank holds."""
    pruned: tuple[int, ...]
    """Units that each rank leaves out, of those that it does not give away."""
    moves: tuple[Move, ...]
    """What is given away, by sender and then ascending: together the last units of each sender, without a gap."""

    @cached_property
    def _given(self) -> tuple[int, ...]:
        return tuple(sum(move.units for move in self.moves if move.sender == rank) for rank in range(len(self.pruned)))

    @cached_property
    def _taken(self) -> tuple[int, ...]:
        return tuple(
            sum(move.units for move in self.moves if move.receiver == rank) for rank in range(len(self.pruned))
        )

    def given(self, rank: int) -> int:
        """Units that the rank gives away: its last ones."""
        return self._given[rank]

    def taken(self, rank: int) -> int:
        """Units of others that the rank computes."""
        return self._taken[rank]

    def kept(self, rank: int) -> int:
        """Units of its own that the rank computes, at least one."""
        return self.units - self._given[rank] - self.pruned[rank]

    @property
    def loads(self) -> tuple[float, ...]:
        """What each rank computes, 1.0 being its own units."""
        return tuple((self.kept(rank) + self.taken(rank)) / self.units for rank in range(len(self.pruned)))


def effective_grain(units: int, grain: int) -> int:
    """The largest power of two that is at most ``grain`` and of which ``units`` make at least 32; else 1."""
    return 1 << (max(min(grain, units // GRAINS), 1).bit_length() - 1)


def divide(units: int, plan: BalancePlan, grain: int = 64) -> Division:
    """The plan's shares of ``units`` units per rank in whole units.

    What a rank keeps is a multiple of the :func:`effective_grain`, at least one, unless it keeps everything. Pruning is
    rounded to the nearest grain. What is given away is rounded to where sender and receivers come out equally late:
    mostly up, since a unit takes the slow sender longer than it takes a receiver. Receivers take in proportion to the
    plan, whole grains by largest remainder; where units are no multiple of the grain, the odd rest goes along with one.
    Receivers are numbered as in SEMI, Sec. IV-B: ``r' = (r + e − s) mod e`` for receiver ``r`` and first sender ``s``,
    and ranges are dealt in that order, so that a pair exchanges at most one range.

    Raises:
        ValueError: ``units`` or ``grain`` is below one.
    """
    if units < 1 or grain < 1:
        raise ValueError(f"units={units} and grain={grain} must be at least 1")
    ranks = len(plan.resize)
    grain = effective_grain(units, grain)
    pruned = [_pruned_units(units, share, grain) for share in plan.resize]
    receivers = [rank for rank in range(ranks) if plan.receive[rank] > 0]
    given = [0] * ranks
    for rank in range(ranks):
        if plan.migrate[rank] > 0 and receivers:
            busy = math.fsum(plan.load(receiver) for receiver in receivers) / len(receivers)
            given[rank] = _given_units(units - pruned[rank], plan.migrate[rank] * units, grain, plan.load(rank), busy)
    first = next((rank for rank in range(ranks) if given[rank]), 0)
    renumbered = [(first + offset) % ranks for offset in range(ranks)]
    receivers = [rank for rank in renumbered if plan.receive[rank] > 0]
    taken = _apportion(sum(given), [plan.receive[rank] for rank in receivers], grain)
    moves = []
    left = dict(zip(receivers, taken, strict=True))
    for sender in renumbered:
        start = units - given[sender]
        for receiver in receivers:
            count = min(left[receiver], units - start)
            if count:
                moves.append(Move(sender, receiver, start, start + count))
                left[receiver] -= count
                start += count
    return Division(units, tuple(pruned), tuple(moves))


def _pruned_units(units: int, share: float, grain: int) -> int:
    if share == 0.0:
        return 0
    return units - min(max(grain * round((units - share * units) / grain), grain), units)


def _given_units(available: int, wanted: float, grain: int, load: float, receivers_load: float) -> int:
    """Units to give of ``available`` ones, where ``wanted`` would be exact, leaving a multiple of the grain, or all.

    Loads are as the plan has them: it makes all equally late, so a unit takes the sender longer by the inverse ratio.
    """
    keep = max(available - wanted, 0.0) / grain
    least = math.floor(keep + 1e-9)
    if (keep - least) * load > (1.0 - (keep - least)) * receivers_load:
        least += 1
    return available - min(max(least, 1) * grain, available)


def _apportion(total: int, weights: Sequence[float], grain: int) -> list[int]:
    """``total`` units in proportion to the weights: whole grains by largest remainder, ties to the first."""
    if not total:
        return [0] * len(weights)
    whole = math.fsum(weights)
    grains, odd = divmod(total, grain)
    exact = [grains * weight / whole for weight in weights]
    dealt = [math.floor(share + 1e-9) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-round(exact[i] - dealt[i], 9), i))
    for i in by_remainder[: grains - sum(dealt)]:
        dealt[i] += 1
    taken = [grain * count for count in dealt]
    if odd:
        taken[max(range(len(weights)), key=lambda i: (round(total * weights[i] / whole - taken[i], 9), -i))] += odd
    return taken
