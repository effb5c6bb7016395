"""Improve a split under the event simulation, which the closed form only approximates.

With few micro-batches it matters where in the pipeline the longest stage is: what the closed form adds for the stages
behind it (``pipeline``, Note: closed form) is partly hidden behind its warm-up. The closed form sees no difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .pipeline import Pipeline, Split, evaluate
from .simulation import Transfers, simulate

__all__ = ["refine"]

BETTER = 1e-9


def refine(
    pipeline: Pipeline, split: Split, transfers: Transfers = "blocking", *, reorder: bool = True, simulations: int = 500
) -> Split:
    """A split that simulates no slower than ``split`` and fits in memory if ``split`` does.

    Local search, first improvement: one block goes to a neighbour; and with ``reorder`` two stages trade places, with
    their blocks or without, or the whole order is turned round. It ends where none of these helps, or after so many
    simulations. Pays with few micro-batches: on random pipelines of 2 to 4 stages see ``benchmarks/splits.py``.

    Raises:
        ValueError: an unknown way of transfers.
    """
    best, seconds = split, simulate(pipeline, split, transfers).seconds
    must_fit = evaluate(pipeline, split).fits
    left = simulations - 1
    seen = {_shape(pipeline, split)}
    improved = True
    while improved:
        improved = False
        for other in _neighbours(best, reorder):
            shape = _shape(pipeline, other)
            if shape in seen:
                continue
            seen.add(shape)
            cost = evaluate(pipeline, other)
            work = zip(cost.forward_seconds, cost.backward_seconds, strict=True)
            # A stage alone takes so long, whatever the others do.
            if pipeline.micro_batches * max(map(sum, work)) >= seconds or (must_fit and not cost.fits):
                continue
            if left == 0:
                return best
            left -= 1
            found = simulate(pipeline, other, transfers).seconds
            if found < seconds * (1 - BETTER):
                best, seconds, improved = other, found, True
                break
    return best


def _shape(pipeline: Pipeline, split: Split) -> tuple[object, ...]:
    """Equal for splits that differ by an exchange of interchangeable slots, if channels are alike."""
    slots = tuple((id(pipeline.slots[slot].costs), pipeline.slots[slot].memory_bytes) for slot in split.order)
    hops = tuple(pipeline.channels[a][b] for a, b in itertools.pairwise(split.order))
    return slots, hops, split.bounds


def _neighbours(split: Split, reorder: bool) -> Iterator[Split]:
    order, parts = split.order, split.blocks_per_stage
    stages = range(len(order))
    if reorder and len(order) > 1:
        yield _made(order[::-1], parts[::-1])
    for a, b in itertools.permutations(stages, 2):
        if abs(a - b) == 1 and parts[a] > 1:
            moved = list(parts)
            moved[a] -= 1
            moved[b] += 1
            yield _made(order, tuple(moved))
    if reorder:
        for a, b in itertools.combinations(stages, 2):
            swapped, lengths = list(order), list(parts)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            yield _made(tuple(swapped), parts)
            lengths[a], lengths[b] = lengths[b], lengths[a]
            yield _made(tuple(swapped), tuple(lengths))


def _made(order: tuple[int, ...], parts: tuple[int, ...]) -> Split:
    return Split(order, (0, *itertools.accumulate(parts)))
