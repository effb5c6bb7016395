"""Which rank holds which units, against lists of single units."""

from __future__ import annotations

from random import Random

from colossal_hetero.balance.divide import divide_counts
from colossal_hetero.layers.unit_mover import Holding, holdings, pieces_of, unit_count

UNITS = 7


def random_holdings(random: Random, ranks: int) -> tuple[Holding, ...]:
    counts = [UNITS] * ranks
    for _ in range(random.randrange(2 * UNITS)):
        giver, taker = random.sample(range(ranks), 2)
        if counts[giver] > 1:
            counts[giver] -= 1
            counts[taker] += 1
    return holdings(UNITS, ranks, divide_counts(UNITS, counts).moves)


def singles(holding: Holding) -> list[tuple[int, int]]:
    return [(owner, unit) for owner, start, stop in holding for unit in range(start, stop)]


def test_every_unit_is_held_once_and_each_rank_holds_as_many_as_the_plan_says() -> None:
    random = Random(0)
    for _ in range(200):
        ranks = random.choice((2, 3, 4, 5))
        held = random_holdings(random, ranks)
        found = [each for holding in held for each in singles(holding)]
        assert sorted(found) == [(rank, unit) for rank in range(ranks) for unit in range(UNITS)]
        assert [unit_count(holding) for holding in held] == [len(singles(holding)) for holding in held]


def test_pieces_lead_from_any_division_to_any_other() -> None:
    random = Random(1)
    moved = 0
    for _ in range(200):
        ranks = random.choice((2, 3, 4, 5))
        before, after = random_holdings(random, ranks), random_holdings(random, ranks)
        memory = [singles(holding) for holding in before]
        for rank, holding in enumerate(after):
            pieces = pieces_of(holding, before)
            found = [unit for source, first, length in pieces for unit in memory[source][first : first + length]]
            assert found == singles(holding)
            assert all(piece.length > 0 for piece in pieces)
            moved += sum(piece.source != rank for piece in pieces)
    assert moved > 100
