"""Compositions of a pipeline."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from colossal_hetero.planner.cost.tp_groups import MAX_COMPOSITIONS, compositions


@pytest.mark.parametrize(("kinds", "each", "stages"), [(3, 2, 4), (18, 1, 18), (25, 1, 24), (60, 3, 96), (4, 500, 96)])
def test_for_many_speeds_a_bounded_number_is_listed(kinds: int, each: int, stages: int) -> None:
    available = [each] * kinds
    rows = compositions(np.geomspace(4.0, 1.0, kinds).tolist(), available, stages)
    assert 0 < len(rows) <= MAX_COMPOSITIONS
    assert len({row.tobytes() for row in np.ascontiguousarray(rows)}) == len(rows)
    assert (rows <= available).all() and (rows >= 0).all()
    if len(rows) < 100:
        assert len(rows) == sum(1 <= sum(row) <= stages for row in itertools.product(range(each + 1), repeat=kinds))
    sums = rows.sum(axis=1)
    assert sums.min() == 1 and sums.max() == min(stages, each * kinds)
