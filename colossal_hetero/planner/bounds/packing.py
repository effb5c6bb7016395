"""How many micro-batches the slots suffice for: a linear program with few rows and thousands of columns.

    max Σ v·x   with   Σ n[k]·x ≤ N[k] for each kind k,   Σ x ≤ D,   x ≥ 0

The revised simplex method solves it: a basis has one column per row, and a step needs the products of all columns with
the prices of the rows. The planner solves hundreds of such programs that differ in v and D alone, so the last basis of
one is nearly the best one of the next. A general solver takes many times as long, because it reads thousands of columns
for each program. A bound does not depend on whether the solution is the best one: any prices prove one
(``pipeline_types.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Basis", "Packed", "pack"]

Floats = NDArray[np.float64]

MAX_STEPS = 200
"""Steps per program. Columns that are alike can make the method go around in a circle."""
TOLERANCE = 1e-9
"""Relative to the largest v or limit."""

Basis = tuple[int, ...]
"""The number of a column for each row; −1 − r is the slack of row r."""


class Packed(NamedTuple):
    """What is known about a program."""

    is_too_little: bool
    """Whether the prices prove that no solution reaches what is needed."""
    prices: Floats
    """Of the kinds, not negative, ``[kinds]``."""
    basis: Basis
    """To begin with in another program."""


def pack(counts: Floats, values: Floats, limits: Floats, needed: float, first: Basis) -> Packed:
    """Prices that prove that less than ``needed`` can be reached; other ones if that much is reached, or not proved.

    Args:
        counts: n, ``[columns, kinds]``.
        values: v, not negative, ``[columns]``.
        limits: N and D, ``[kinds + 1]``.
        needed: The sum that is asked about.
        first: Basis to begin with; that of slacks if it does not fit into the limits.
    """
    rows = len(limits)
    slacks = [-1 - row for row in range(rows)]
    basis = list(first)
    matrix = np.column_stack([_column(counts, rows, each) for each in basis]) if basis else np.eye(rows)
    inside = np.linalg.solve(matrix, limits)
    if not basis or inside.min() < -TOLERANCE * limits.max():
        basis, matrix, inside = slacks, np.eye(rows), limits
    least = TOLERANCE * max(float(values.max(initial=0.0)), 1.0)
    for _ in range(MAX_STEPS):
        gained = np.array([values[each] if each >= 0 else 0.0 for each in basis])
        found = np.linalg.solve(matrix.T, gained)
        prices = np.maximum(found[:-1], 0.0)
        cheapest = int(found.argmin())
        if found[cheapest] < -least:
            enters = -1 - cheapest
        else:
            worth = values - counts @ prices
            enters = int(worth.argmax())
            if prices @ limits[:-1] + limits[-1] * max(float(worth[enters]), 0.0) < needed:
                return Packed(True, prices, tuple(basis))
            if gained @ inside >= needed or worth[enters] - found[-1] <= least:
                break
        change = np.linalg.solve(matrix, _column(counts, rows, enters))
        steps = np.full(rows, np.inf)
        np.divide(np.maximum(inside, 0.0), change, out=steps, where=change > TOLERANCE)
        leaves = int(steps.argmin())
        matrix[:, leaves], basis[leaves] = _column(counts, rows, enters), enters
        inside = np.linalg.solve(matrix, limits)
    return Packed(False, prices, tuple(basis))


def _column(counts: Floats, rows: int, number: int) -> Floats:
    """A column of the program, ``[rows]``."""
    return np.append(counts[number], 1.0) if number >= 0 else np.eye(rows)[-1 - number]
