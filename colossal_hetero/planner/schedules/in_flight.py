"""How many micro-batches' activations a stage holds at the same time, counted from its list of passes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .pass_order import PassOrder

__all__ = ["most_in_flight"]


@lru_cache(maxsize=64)
def most_in_flight(order: PassOrder) -> tuple[NDArray[np.int64], ...]:
    """By stage: the numbers of micro-batches that it holds of each chunk at its fullest moments, ``[moments, chunks]``.

    A stage holds the activations of a chunk from the forward pass to the end of the backward pass; if the gradients of
    the weights have passes of their own, to the end of these. Which moment needs the most memory depends on the sizes
    of the chunks, so all moments are returned that hold more of some chunk than every other moment with as many of the
    rest.
    """
    released = "weight" if order.splits_backward else "backward"
    peaks = []
    for passes in order.passes:
        held = [0] * order.chunks
        moments: set[tuple[int, ...]] = set()
        for each in passes:
            if each.kind == "forward":
                held[each.chunk] += 1
                moments.add(tuple(held))
            elif each.kind == released:
                held[each.chunk] -= 1
        rows = np.array(sorted(moments), dtype=np.int64)
        covered = (rows[:, None, :] <= rows[None, :, :]).all(axis=2)
        # Every moment covers itself.
        peaks.append(rows[covered.sum(axis=1) == 1])
    return tuple(peaks)
