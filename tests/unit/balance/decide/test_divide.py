"""From shares to ranges of units: sums, coverage, grains, the paper's numbering, and traffic."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import BalancePlan, Move, divide
from colossal_hetero.balance.divide import BlockShape, block_ports, busiest_port, effective_grain
from colossal_hetero.balance.plan import Volume
from tests.support.random_examples import examples


@st.composite
def plans(draw: st.DrawFn) -> BalancePlan:
    ranks = draw(st.integers(1, 8))
    gives = [draw(st.booleans()) for _ in range(ranks)]
    gives[draw(st.integers(0, ranks - 1))] = False
    resize = [draw(st.one_of(st.just(0.0), st.floats(0, 0.95))) for _ in range(ranks)]
    migrate = [draw(st.floats(0, 1)) * (1 - r) if give else 0.0 for r, give in zip(resize, gives, strict=True)]
    weights = [0.0 if give else draw(st.one_of(st.just(0.0), st.floats(0.1, 1))) for give in gives]
    if not any(weights):
        weights[gives.index(False)] = 1.0
    total = math.fsum(weights)
    return BalancePlan(tuple(resize), tuple(migrate), tuple(math.fsum(migrate) * weight / total for weight in weights))


units_counts = st.one_of(st.integers(1, 100), st.integers(1, 5000), st.sampled_from([64, 768, 1024, 4096]))
grains = st.sampled_from([1, 2, 16, 64, 100])


@examples(ordinary=80, thorough=500)
@given(units_counts, plans(), grains)
def test_every_unit_is_somewhere_once(units: int, plan: BalancePlan, grain: int) -> None:
    division = divide(units, plan, grain)
    ranks = range(len(plan.resize))
    assert sum(division.given(rank) for rank in ranks) == sum(division.taken(rank) for rank in ranks)
    for rank in ranks:
        assert division.kept(rank) >= 1 and division.pruned[rank] >= 0
        assert division.kept(rank) == units or division.kept(rank) % effective_grain(units, grain) == 0
        assert division.kept(rank) + division.pruned[rank] + division.given(rank) == units
        assert division.given(rank) == 0 or division.taken(rank) == 0
        if plan.migrate[rank] == 0:
            assert division.given(rank) == 0
        if plan.receive[rank] == 0:
            assert division.taken(rank) == 0
        if plan.resize[rank] == 0:
            assert division.pruned[rank] == 0
        own = [move for move in division.moves if move.sender == rank]
        covered = [unit for move in own for unit in range(move.start, move.stop)]
        assert covered == list(range(units - division.given(rank), units))
    assert sum(division.kept(rank) + division.taken(rank) for rank in ranks) == len(ranks) * units - sum(
        division.pruned
    )
    pairs = Counter((move.sender, move.receiver) for move in division.moves)
    assert all(count == 1 for count in pairs.values())
    assert all(move.units > 0 for move in division.moves)


@given(units_counts, plans(), grains)
def test_shares_are_met_to_a_grain(units: int, plan: BalancePlan, grain: int) -> None:
    division = divide(units, plan, grain)
    step = effective_grain(units, grain)
    total = sum(division.given(rank) for rank in range(len(plan.resize)))
    for rank in range(len(plan.resize)):
        if (plan.resize[rank] + plan.migrate[rank]) * units < units - 2 * step:
            assert abs(division.pruned[rank] - plan.resize[rank] * units) <= step
            assert abs(division.given(rank) - plan.migrate[rank] * units) <= 1.5 * step
        if total:
            assert abs(division.taken(rank) - total * plan.receive[rank] / math.fsum(plan.receive)) <= 2 * step


def test_grains() -> None:
    assert [effective_grain(units, 64) for units in (1, 12, 63, 64, 512, 768, 1024, 2048, 10**6)] == [
        *(1, 1, 1, 2, 16, 16, 32, 64, 64)
    ]
    assert effective_grain(4096, 1) == 1 and effective_grain(4096, 100) == 64


def one_straggler(ranks: int, slow: int, share: float) -> BalancePlan:
    return BalancePlan(
        resize=(0.0,) * ranks,
        migrate=tuple(share if rank == slow else 0.0 for rank in range(ranks)),
        receive=tuple(0.0 if rank == slow else share / (ranks - 1) for rank in range(ranks)),
    )


@given(st.integers(2, 8), st.integers(0, 7), st.integers(1, 90))
def test_one_straggler_gives_ranges_as_in_the_paper(ranks: int, slow: int, given_units: int) -> None:
    """``P_r = P[m(r′ − 1) : m r′]`` with ``r′ = (r + e − s) mod e``, remainders to the first receivers."""
    slow %= ranks
    division = divide(100, one_straggler(ranks, slow, given_units / 100), grain=1)
    assert division.given(slow) == given_units
    each, rest = divmod(given_units, ranks - 1)
    expected, start = [], 100 - given_units
    for number in range(1, ranks):
        count = each + (number <= rest)
        if count:
            expected.append(Move(slow, (slow + number) % ranks, start, start + count))
        start += count
    assert list(division.moves) == expected


def test_few_units_are_given_where_that_is_faster() -> None:
    """Six heads: 2.1 of them would be exact. Giving a third one would make the receiver later than it relieves."""
    assert divide(6, one_straggler(2, 0, 0.35)).given(0) == 2
    assert divide(6, one_straggler(2, 0, 0.40)).given(0) == 3


def test_a_port_waits_for_its_first_weights_and_for_all_gradients() -> None:
    blocks = [BlockShape(elements_per_unit=10, layers=2)] * 3
    # Rank 0 gives 3 units to rank 1 and 1 to rank 2, but in the first block only the latter.
    moves = [(Move(0, 2, 7, 8),), *[(Move(0, 1, 4, 7), Move(0, 2, 7, 8))] * 2]
    ports = block_ports(blocks, moves, [0, 0, 1], ranks=4, bytes_per_element=2)
    assert [port.sent for port in ports] == [Volume(4, 180), Volume(4, 120), Volume(6, 60), Volume()]
    # The weights of the first two blocks are one bucket. Messages to several ranks start together.
    assert [port.waited for port in ports] == [
        Volume(1 + 6, (1 + 4) * 20 + (1 + 4 + 4) * 20),
        Volume(1 + 4, 3 * 20 + 2 * 3 * 20),
        Volume(1 + 6, 2 * 20 + 3 * 20),
        Volume(),
    ]
    assert busiest_port(ports) == Volume(7, 280)
    assert busiest_port(block_ports(blocks, [()] * 3, [0, 0, 0], 4, 2)) == Volume()
