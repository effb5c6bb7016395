"""Which rank holds which units of a block, and what moves if others are to hold them. Pure.

Ordinarily every rank of a tensor-parallel group holds equally many units, its own. A *holding* lists the units that a
rank holds in the order in which they lie in its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..column_migration import MovedRange
from ..dropout.unit_dropout import UnitRange

__all__ = ["Holding", "Piece", "holdings", "ordinary_holdings", "pieces_of", "unit_count"]

Holding = tuple[UnitRange, ...]


class Piece(NamedTuple):
    """Units that are adjacent both where they are and where they go."""

    source: int
    """The rank that holds them so far."""
    first: int
    """Their place among the units that this rank holds so far."""
    length: int


def unit_count(holding: Holding) -> int:
    """The number of units in a holding."""
    return sum(stop - start for _, start, stop in holding)


def holdings(units: int, ranks: int, moves: Sequence[MovedRange]) -> tuple[Holding, ...]:
    """What each rank holds after ``moves``, if each of them held its own ``units`` before.

    Args:
        units: units that each rank owns.
        ranks: number of ranks.
        moves: a sender gives away its last units, without gaps.
    """
    given = [sum(move.stop - move.start for move in moves if move.sender == rank) for rank in range(ranks)]
    return tuple(
        (
            UnitRange(rank, 0, units - given[rank]),
            *(UnitRange(move.sender, move.start, move.stop) for move in moves if move.receiver == rank),
        )
        for rank in range(ranks)
    )


def ordinary_holdings(units: int, ranks: int) -> tuple[Holding, ...]:
    """What each rank holds if nothing was given away."""
    return holdings(units, ranks, ())


def pieces_of(after: Holding, before: Sequence[Holding]) -> list[Piece]:
    """Where the units of the holding ``after`` are so far, in its order; ``before`` is by rank."""
    pieces: list[Piece] = []
    for owner, start, stop in after:
        while start < stop:
            piece = _find(owner, start, stop, before)
            pieces.append(piece)
            start += piece.length
    return pieces


def _find(owner: int, start: int, stop: int, before: Sequence[Holding]) -> Piece:
    """The longest piece that begins with the owner's unit number ``start``."""
    for rank, holding in enumerate(before):
        place = 0
        for units in holding:
            if units.owner == owner and units.start <= start < units.stop:
                return Piece(rank, place + start - units.start, min(stop, units.stop) - start)
            place += units.stop - units.start
    raise AssertionError(f"no rank holds unit {start} of rank {owner}")
