"""Compositions of a pipeline: all of them while they are few, a bounded number of them for any number of speeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from colossal_hetero.planner.cost.tp_groups import MAX_COMPOSITIONS, compositions


@pytest.mark.parametrize(("available", "stages"), [((3, 2, 1), 4), ((5,), 9), ((1, 1, 1, 1), 2), ((0, 2), 2)])
def test_few_compositions_are_all_listed(available: Sequence[int], stages: int) -> None:
    rows = compositions([float(len(available) - kind) for kind in range(len(available))], available, stages)
    every = itertools.product(*(range(count + 1) for count in available))
    assert sorted(map(tuple, rows.tolist())) == sorted(row for row in every if 1 <= sum(row) <= stages)


@pytest.mark.parametrize(
    ("kinds", "each", "stages"), [(17, 1, 17), (18, 1, 18), (25, 1, 24), (60, 3, 96), (300, 1, 24), (4, 500, 96)]
)
def test_for_many_speeds_a_bounded_number_is_listed(kinds: int, each: int, stages: int) -> None:
    available = [each] * kinds
    rows = compositions(np.geomspace(4.0, 1.0, kinds).tolist(), available, stages)
    assert 0 < len(rows) <= MAX_COMPOSITIONS
    assert len({row.tobytes() for row in np.ascontiguousarray(rows)}) == len(rows)
    assert (rows <= available).all() and (rows >= 0).all()
    sums = rows.sum(axis=1)
    assert sums.min() == 1 and sums.max() == min(stages, each * kinds)


def test_only_similar_speeds_count_as_one() -> None:
    """20 devices of about one speed, two that are much slower, and two that are much faster."""
    seconds = [40.0, 30.0, *np.linspace(1.1, 1.0, 20).tolist(), 0.2, 0.1]
    rows = compositions(seconds, [1] * 24, 24)
    others = rows[:, [0, 1, 22, 23]]
    assert len(np.unique(others, axis=0)) == 2**4
    for outliers in itertools.product((0, 1), repeat=4):
        similar = rows[(others == outliers).all(axis=1)][:, 2:22]
        assert set(similar.sum(axis=1).tolist()) >= {1, 2, 20}
