"""Good orders of slots, without a proof that they are the best, for pipelines with too many orders to try them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..cluster.topology import Channel
from .pipeline import Pipeline, Split, evaluate

__all__ = ["by_speed", "exchanged", "like_kinds", "near_each_other"]

PASSES = 4
"""Maximum number of passes over all pairs of slots in :func:`exchanged`."""


def like_kinds(pipeline: Pipeline) -> Pipeline:
    """The pipeline with the same channel between all slots of two kinds, which is the fastest channel between them.

    So slots of one kind are interchangeable, and there are few different orders.
    """
    kinds = [slot.kind for slot in pipeline.slots]
    fastest: dict[object, Channel] = {}
    pairs = [(a, b) for a in range(len(kinds)) for b in range(len(kinds)) if a != b]
    for a, b in pairs:
        channel, key = pipeline.channels[a][b], (kinds[a], kinds[b])
        if key not in fastest or channel.bytes_per_second > fastest[key].bytes_per_second:
            fastest[key] = channel
    rows = [
        tuple(fastest[kinds[a], kinds[b]] if a != b else channel for b, channel in enumerate(pipeline.channels[a]))
        for a in range(len(kinds))
    ]
    return replace(pipeline, channels=tuple(rows))


def near_each_other(pipeline: Pipeline, order: Sequence[int]) -> tuple[int, ...]:
    """An order with the same kind of slot at each stage as ``order`` and with short hops.

    Each stage gets the remaining slot of its kind that the stage before reaches fastest; of several such slots, and for
    the first stage, the one with the lowest number.
    """
    seconds = _typical_seconds(pipeline)
    kinds = [slot.kind for slot in pipeline.slots]
    left = list(range(len(kinds)))
    chosen: list[int] = []
    for slot in order:
        alike = [other for other in left if kinds[other] == kinds[slot]]
        best = min(alike, key=lambda other: (seconds[chosen[-1], other] if chosen else 0.0, other))
        left.remove(best)
        chosen.append(best)
    return tuple(chosen)


def by_speed(pipeline: Pipeline) -> Iterator[tuple[int, ...]]:
    """Three orders: as given, slowest slots first, and fastest slots first. Equally fast slots keep their order."""
    totals = [slot.costs.cumulative for slot in pipeline.slots]
    work = np.array([float(total.forward_seconds[-1] + total.backward_seconds[-1]) for total in totals])
    yield tuple(range(len(work)))
    yield tuple(int(slot) for slot in np.argsort(-work, kind="stable"))
    yield tuple(int(slot) for slot in np.argsort(work, kind="stable"))


def exchanged(pipeline: Pipeline, split: Split) -> Split:
    """The split with slots of the same kind exchanged wherever this makes it faster; the bounds remain the same.

    It ends if a pass over all pairs of stages improves nothing, or after ``PASSES`` passes.
    """
    kinds = [slot.kind for slot in pipeline.slots]
    seconds = evaluate(pipeline, split).seconds
    for _ in range(PASSES):
        before = seconds
        for a, b in itertools.combinations(range(len(kinds)), 2):
            order = list(split.order)
            if kinds[order[a]] != kinds[order[b]]:
                continue
            order[a], order[b] = order[b], order[a]
            other = Split(tuple(order), split.bounds)
            if (found := evaluate(pipeline, other).seconds) < seconds:
                split, seconds = other, found
        if seconds >= before:
            break
    return split


def _typical_seconds(pipeline: Pipeline) -> dict[tuple[int, int], float]:
    """Time of a transfer of the largest output from slot to slot, in seconds."""
    return {
        (a, b): channel.seconds(float(pipeline.slots[a].costs.output_bytes.max()))
        for a, row in enumerate(pipeline.channels)
        for b, channel in enumerate(row)
        if a != b
    }
