"""Fewer kinds of slots, of which no plan is slower, where there are too many to try all compositions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..slots.tp_groups import SlotKind, number_of_compositions
from .least_costs import least_costs

__all__ = ["few_kinds"]

MAX_TYPES = 12_000
"""Compositions of a pipeline."""


def few_kinds(kinds: Sequence[SlotKind]) -> tuple[SlotKind, ...]:
    """The kinds, merged until pipelines have at most :data:`MAX_TYPES` compositions, the most similar ones first.

    A merged kind has all slots of both, the times of the faster one for each block, and the larger memory. So a plan of
    the slots of ``kinds`` is not slower with the merged ones.
    """
    merged = list(kinds)
    blocks = len(merged[0].costs.forward_seconds)
    while len(merged) > 1:
        counts = [np.arange(min(len(kind.slots), blocks) + 1) for kind in merged]
        if number_of_compositions(counts, blocks) <= MAX_TYPES:
            break
        times = np.log(np.maximum([kind.model_seconds for kind in merged], 1e-300))
        first = int(np.argmin(np.abs(np.diff(times))))
        merged[first : first + 2] = [_merged(merged[first], merged[first + 1])]
    return tuple(merged)


def _merged(one: SlotKind, other: SlotKind) -> SlotKind:
    return replace(
        one,
        device=f"{one.device} or {other.device}",
        usable_bytes=max(one.usable_bytes, other.usable_bytes),
        costs=least_costs(one.costs, other.costs),
        recomputed=one.recomputed and other.recomputed and least_costs(one.recomputed, other.recomputed),
        slots=(*one.slots, *other.slots),
    )
