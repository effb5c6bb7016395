"""The linear program of slots and pipelines, compared with SciPy's solver."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from colossal_hetero.planner.solver.iteration_bound import pack

pytestmark = pytest.mark.unit


def test_prices_prove_the_largest_sum() -> None:
    """Random programs one after the other, each begun with the basis of the one before."""
    random = np.random.default_rng(0)
    for _ in range(30):
        kinds, columns = int(random.integers(1, 6)), int(random.integers(1, 300))
        counts = random.integers(0, 9, (columns, kinds)).astype(float)
        basis: tuple[int, ...] = ()
        for _ in range(5):
            values = random.integers(0, 40, columns) * (random.random(columns) < 0.8).astype(float)
            limits = np.append(random.integers(1, 100, kinds), random.integers(1, 30)).astype(float)
            solved = linprog(-values, A_ub=np.vstack([counts.T, np.ones(columns)]), b_ub=limits)
            assert solved.status == 0
            most = -solved.fun
            more = pack(counts, values, limits, most * (1 + 1e-7) + 1e-7, basis)
            assert more.is_too_little
            assert (more.prices >= 0).all()
            worth = float((values - counts @ more.prices).max())
            assert more.prices @ limits[:-1] + limits[-1] * max(worth, 0.0) <= most * (1 + 1e-7) + 1e-7
            reached = pack(counts, values, limits, most * (1 - 1e-7), more.basis)
            assert not reached.is_too_little
            basis = reached.basis


def test_columns_that_are_alike_and_worth_nothing() -> None:
    counts = np.ones((50, 2))
    alike = pack(counts, np.full(50, 3.0), np.array([4.0, 4.0, 4.0]), 12.001, ())
    assert alike.is_too_little
    assert not pack(counts, np.full(50, 3.0), np.array([4.0, 4.0, 4.0]), 12.0, alike.basis).is_too_little
    assert pack(counts, np.zeros(50), np.array([4.0, 4.0, 4.0]), 1.0, alike.basis).is_too_little
