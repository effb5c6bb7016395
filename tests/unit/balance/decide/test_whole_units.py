"""The fastest division of whole units, compared with an exhaustive search."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance.ratios import (
    Line,
    UnitKind,
    divisible_seconds,
    fastest_counts,
    moved_units,
    slowest_seconds,
)


def lines_of(slopes: list[float], full: int, fixed: float = 0.0, above: float = 1.0) -> list[Line]:
    """A line for each rank that takes ``fixed`` and ``slope`` per unit; units of other ranks take ``above`` as long."""
    return [Line(full, fixed + slope * full, slope, above * slope, full) for slope in slopes]


def divisions(kind: UnitKind, ranks: int) -> list[tuple[int, ...]]:
    """All possible divisions."""
    most = kind.units + kind.max_taken
    steps = [count for count in range(1, most + 1) if (count - kind.units) % kind.grain == 0]
    return [counts for counts in product(steps, repeat=ranks) if sum(counts) == ranks * kind.units]


@st.composite
def problems(draw: st.DrawFn) -> tuple[UnitKind, list[Line], float]:
    ranks = draw(st.integers(2, 4))
    units = draw(st.integers(1, 8 if ranks < 4 else 5))
    grain = draw(st.integers(1, min(3, units)))
    kind = UnitKind(units, grain, draw(st.integers(0, units * (ranks - 1))))
    slopes = [draw(st.floats(0.5, 8.0)) for _ in range(ranks)]
    lines = lines_of(slopes, units, draw(st.floats(0, 3)), draw(st.floats(1.0, 1.5)))
    return kind, lines, draw(st.sampled_from([0.0, 0.05, 0.5, 5.0]))


@given(problems())
def test_no_division_is_faster(problem: tuple[UnitKind, list[Line], float]) -> None:
    kind, lines, per_unit = problem

    def seconds(counts: tuple[int, ...]) -> float:
        return slowest_seconds(lines, counts) + per_unit * moved_units(kind, counts)

    every = divisions(kind, len(lines))
    found = fastest_counts(kind, lines, per_unit)
    assert found in every
    assert seconds(found) == pytest.approx(min(map(seconds, every)))
    # Of equally fast divisions it is one that moves the least.
    equal = [counts for counts in every if seconds(counts) <= seconds(found) * (1 + 1e-12)]
    assert moved_units(kind, found) <= min(moved_units(kind, counts) for counts in equal) + kind.grain * (per_unit > 0)


@given(problems())
def test_finer_units_come_close_to_the_time_of_divisible_ones(problem: tuple[UnitKind, list[Line], float]) -> None:
    kind, lines, _ = problem
    finer, ranks = 1000, len(lines)
    fine = UnitKind(kind.units * finer, 1, kind.units * finer * (ranks - 1))
    shares = [
        Line(line.units * finer, line.seconds, line.slope / finer, line.slope_above / finer, line.full * finer)
        for line in lines
    ]
    bound = divisible_seconds(lines)
    assert bound == pytest.approx(slowest_seconds(shares, fastest_counts(fine, shares)), rel=5e-3)
    assert bound <= slowest_seconds(lines, fastest_counts(kind, lines)) * (1 + 1e-9)


@pytest.mark.parametrize(
    "units, slowdown, ranks", [(4, 1.2, 8), (2, 1.3, 8), (2, 1.05, 8), (4, 1.05, 2), (1, 8.0, 8), (8, 1.1, 4)]
)
def test_a_mild_straggler_keeps_its_heads_if_a_receiver_would_be_slower(
    units: int, slowdown: float, ranks: int
) -> None:
    kind = UnitKind(units, 1, units * (ranks - 1))
    lines = lines_of([slowdown, *(1.0,) * (ranks - 1)], units)
    counts = fastest_counts(kind, lines)
    assert slowest_seconds(lines, counts) <= slowdown * units
    assert counts == (units,) * ranks


def test_a_straggler_with_many_units_meets_the_bound() -> None:
    for ranks, slowdown in ((2, 8.0), (2, 1.5), (8, 8.0), (8, 1.05)):
        kind = UnitKind(840, 1, 840 * (ranks - 1))
        lines = lines_of([slowdown, *(1.0,) * (ranks - 1)], 840)
        bound = ranks / (ranks - 1 + 1 / slowdown) * 840
        assert slowest_seconds(lines, fastest_counts(kind, lines)) == pytest.approx(bound, rel=0.005)


def test_a_line_bends_at_the_full_share() -> None:
    line = Line(units=6.0, seconds=13.0, slope=2.0, slope_above=3.0, full=8.0)
    assert [line(count) for count in (4, 6, 8, 10)] == [9.0, 13.0, 17.0, 23.0]
    received = Line(units=10.0, seconds=23.0, slope=2.0, slope_above=3.0, full=8.0)
    assert [received(count) for count in (4, 6, 8, 10)] == [9.0, 13.0, 17.0, 23.0]
