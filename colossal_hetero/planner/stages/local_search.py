"""Local search for a split that is faster in the event simulation, which the closed form only approximates.

With few micro-batches, the place of the longest stage in the pipeline matters: part of the work of the stages behind it
happens during warm-up and cool-down, at the same time as its own work (``pipeline.py``, Note: closed form). In the
closed form the place makes no difference.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from .adapt_search import adapt
from .event_simulation import Transfers, simulate
from .exact import exact
from .pipeline import Pipeline, Split, evaluate
from .rules import autohet, holmes, uniform

__all__ = ["refine", "simulated"]

ADAPT_NODES = 500
"""Nodes that the method ``adapt`` visits for a split to compare with."""
MIN_IMPROVEMENT = 1e-9
"""Relative improvement in time from which a split counts as faster."""


def refine(
    pipeline: Pipeline, split: Split, transfers: Transfers = "blocking", *, reorder: bool = True, simulations: int = 500
) -> Split:
    """A split that is not slower than ``split`` in the event simulation, and that fits in memory if ``split`` does.

    This is a local search that takes the first improvement. In one step, one or two blocks move from one stage to
    another, or (with ``reorder``) two stages exchange their slots, with or without their numbers of blocks. The search
    ends if no step improves the split, or after ``simulations`` simulations. The result is not always the best split.
    The search helps most with few micro-batches; ``benchmarks/planner/splits.py`` shows how much.

    Args:
        pipeline: The pipeline to divide.
        split: The split to start from.
        transfers: Model of the transfers in the event simulation.
        reorder: Whether the order of the slots may change. The search then also starts from the reversed split.
        simulations: Maximum number of simulations.

    Raises:
        ValueError: ``transfers`` is unknown.
    """
    search = _LocalSearch(pipeline, split, transfers, reorder, simulations, must_fit=evaluate(pipeline, split).fits)
    search.climb(split)
    if reorder:
        search.climb(_split_of(split.order[::-1], split.blocks_per_stage[::-1]))
    return search.best


def simulated(pipeline: Pipeline, order: Sequence[int] | None) -> Split | None:
    """The best split by the closed form, improved by :func:`refine`; None if none fits in memory.

    It is not slower in the event simulation than the splits of the other methods that fit in memory (``adapt`` after
    ``ADAPT_NODES`` nodes).
    """
    found = exact(pipeline, order)
    if found is None:
        return None
    best = refine(pipeline, found, reorder=order is None)
    others = [uniform(pipeline, order), holmes(pipeline, order), autohet(pipeline, order)]
    with contextlib.suppress(ValueError):
        others.append(adapt(pipeline, order, ADAPT_NODES))
    fitting = [other for other in others if other is not None and evaluate(pipeline, other).fits]
    if fitting:
        other = min(fitting, key=lambda split: simulate(pipeline, split).seconds)
        if simulate(pipeline, other).seconds < simulate(pipeline, best).seconds:
            best = refine(pipeline, other, reorder=order is None)
    return best


class _LocalSearch:
    """State of a search: the best split so far, the splits that were tried, and the number of simulations left."""

    def __init__(
        self, pipeline: Pipeline, split: Split, transfers: Transfers, reorder: bool, simulations: int, must_fit: bool
    ) -> None:
        self.pipeline = pipeline
        self.transfers = transfers
        self.reorder = reorder
        self.simulations_left = simulations
        self.must_fit = must_fit
        self.best = split
        self.best_seconds = np.inf
        self.tried: set[tuple[object, ...]] = set()

    def climb(self, split: Split) -> None:
        """Go from ``split`` to faster neighbors until there is none."""
        current = self._seconds(split, np.inf)
        improved = current < np.inf
        while improved:
            if current < self.best_seconds * (1 - MIN_IMPROVEMENT):
                self.best, self.best_seconds = split, current
            improved = False
            for neighbor in _neighbors(split, self.reorder):
                found = self._seconds(neighbor, current)
                if found < current * (1 - MIN_IMPROVEMENT):
                    split, current, improved = neighbor, found, True
                    break

    def _seconds(self, split: Split, limit: float) -> float:
        """Simulated time of an iteration. Infinite if the split was tried before, does not fit in memory or certainly
        takes ``limit`` or longer, or if no simulations are left.
        """
        key = _key(self.pipeline, split)
        if key in self.tried or self.simulations_left == 0:
            return np.inf
        self.tried.add(key)
        cost = evaluate(self.pipeline, split)
        work = zip(cost.forward_seconds, cost.backward_seconds, cost.schedule_seconds, strict=True)
        # No iteration is shorter than the work of one stage.
        if self.pipeline.micro_batches * max(map(sum, work)) >= limit or (self.must_fit and not cost.fits):
            return np.inf
        self.simulations_left -= 1
        return simulate(self.pipeline, split, self.transfers).seconds


def _key(pipeline: Pipeline, split: Split) -> tuple[object, ...]:
    """A key that is equal for splits that differ only by interchangeable slots with equal channels."""
    slots = tuple(pipeline.slots[slot].kind for slot in split.order)
    hops = tuple(pipeline.channels[a][b] for a, b in itertools.pairwise(split.order))
    return slots, hops, split.bounds


def _neighbors(split: Split, reorder: bool) -> Iterator[Split]:
    """Splits that are one step away from ``split``: first moves between adjacent stages, then exchanges, then other
    moves.
    """
    order, parts = split.order, split.blocks_per_stage
    stages = range(len(order))
    for a, b in itertools.permutations(stages, 2):
        if abs(a - b) == 1:
            yield from _moved(order, parts, a, b)
    if reorder:
        for a, b in itertools.combinations(stages, 2):
            swapped, lengths = list(order), list(parts)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            yield _split_of(tuple(swapped), parts)
            lengths[a], lengths[b] = lengths[b], lengths[a]
            yield _split_of(tuple(swapped), tuple(lengths))
    for a, b in itertools.permutations(stages, 2):
        if abs(a - b) > 1:
            yield from _moved(order, parts, a, b)


def _moved(order: tuple[int, ...], parts: tuple[int, ...], a: int, b: int) -> Iterator[Split]:
    """Splits in which one or two blocks have moved from stage a to stage b."""
    for amount in (1, 2):
        if parts[a] > amount:
            moved = list(parts)
            moved[a] -= amount
            moved[b] += amount
            yield _split_of(order, tuple(moved))


def _split_of(order: tuple[int, ...], parts: tuple[int, ...]) -> Split:
    """The split with these slots and these numbers of blocks per stage."""
    return Split(order, (0, *itertools.accumulate(parts)))
