"""Improve a split under the event simulation, which the closed form only approximates.

With few micro-batches it matters where in the pipeline the longest stage is: what the closed form adds for the stages
behind it (``pipeline``, Note: closed form) is partly hidden behind its warm-up. The closed form sees no difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from .event_simulation import Transfers, simulate
from .exact import exact
from .pipeline import Pipeline, Split, evaluate

__all__ = ["refine", "simulated"]

BETTER = 1e-9


def refine(
    pipeline: Pipeline, split: Split, transfers: Transfers = "blocking", *, reorder: bool = True, simulations: int = 500
) -> Split:
    """A split that simulates no slower than ``split`` and fits in memory if ``split`` does.

    Local search, first improvement, from ``split`` and, with ``reorder``, from its mirror image: a stage gives one or
    two blocks to another; and with ``reorder`` two stages trade places, with their blocks or without. It ends where
    none of these helps, or after so many simulations, and need not find the best there is. Pays with few micro-batches:
    ``benchmarks/planner/splits.py``.

    Raises:
        ValueError: an unknown way of transfers.
    """
    search = _LocalSearch(pipeline, split, transfers, reorder, simulations, must_fit=evaluate(pipeline, split).fits)
    search.climb(split)
    if reorder:
        search.climb(_made(split.order[::-1], split.blocks_per_stage[::-1]))
    return search.best


def simulated(pipeline: Pipeline, order: Sequence[int] | None) -> Split | None:
    """What :func:`refine` makes of the best split under the closed form; None if none fits in memory."""
    found = exact(pipeline, order)
    return None if found is None else refine(pipeline, found, reorder=order is None)


class _LocalSearch:
    def __init__(
        self, pipeline: Pipeline, split: Split, transfers: Transfers, reorder: bool, simulations: int, must_fit: bool
    ) -> None:
        self.pipeline = pipeline
        self.transfers = transfers
        self.reorder = reorder
        self.left = simulations
        self.must_fit = must_fit
        self.best = split
        self.best_seconds = np.inf
        self.seen: set[tuple[object, ...]] = set()

    def climb(self, split: Split) -> None:
        """From ``split`` to what has no better neighbor."""
        here = self._seconds(split, np.inf)
        improved = here < np.inf
        while improved:
            if here < self.best_seconds * (1 - BETTER):
                self.best, self.best_seconds = split, here
            improved = False
            for other in _neighbors(split, self.reorder):
                found = self._seconds(other, here)
                if found < here * (1 - BETTER):
                    split, here, improved = other, found, True
                    break

    def _seconds(self, split: Split, most: float) -> float:
        """Simulated; endless if it was tried before, does not fit, takes at least ``most``, or if enough was tried."""
        shape = _shape(self.pipeline, split)
        if shape in self.seen or self.left == 0:
            return np.inf
        self.seen.add(shape)
        cost = evaluate(self.pipeline, split)
        work = zip(cost.forward_seconds, cost.backward_seconds, strict=True)
        # A stage alone takes so long, whatever the others do.
        if self.pipeline.micro_batches * max(map(sum, work)) >= most or (self.must_fit and not cost.fits):
            return np.inf
        self.left -= 1
        return simulate(self.pipeline, split, self.transfers).seconds


def _shape(pipeline: Pipeline, split: Split) -> tuple[object, ...]:
    """Equal for splits that differ by an exchange of interchangeable slots, if channels are alike."""
    slots = tuple(pipeline.slots[slot].kind for slot in split.order)
    hops = tuple(pipeline.channels[a][b] for a, b in itertools.pairwise(split.order))
    return slots, hops, split.bounds


def _neighbors(split: Split, reorder: bool) -> Iterator[Split]:
    order, parts = split.order, split.blocks_per_stage
    stages = range(len(order))
    for a, b in itertools.permutations(stages, 2):
        if abs(a - b) == 1:
            yield from _moved(order, parts, a, b)
    if reorder:
        for a, b in itertools.combinations(stages, 2):
            swapped, lengths = list(order), list(parts)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            yield _made(tuple(swapped), parts)
            lengths[a], lengths[b] = lengths[b], lengths[a]
            yield _made(tuple(swapped), tuple(lengths))
    for a, b in itertools.permutations(stages, 2):
        if abs(a - b) > 1:
            yield from _moved(order, parts, a, b)


def _moved(order: tuple[int, ...], parts: tuple[int, ...], a: int, b: int) -> Iterator[Split]:
    """With one or two blocks less in stage a, and more in stage b."""
    for amount in (1, 2):
        if parts[a] > amount:
            moved = list(parts)
            moved[a] -= amount
            moved[b] += amount
            yield _made(order, tuple(moved))


def _made(order: tuple[int, ...], parts: tuple[int, ...]) -> Split:
    return Split(order, (0, *itertools.accumulate(parts)))
