"""All plans of a few slots, of which a search that tries promising plans often misses the best one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..cost.draft import Draft
from ..cost.placed_pipelines import PlacedPipelines, Rows
from ..cost.placement import Place, SlotPool
from ..cost.runnable import enough_micro_batches
from .pipeline_bounds import PipelineBounds

MAX_EQUAL, MAX_UNEQUAL = 5, 4
"""Most slots for which all plans are tried: 5 slots form equal pipelines in up to 411 ways, and others in 1,031."""


def are_few(pool: SlotPool, *, equal: bool) -> bool:
    return pool.slots <= (MAX_EQUAL if equal else MAX_UNEQUAL)


class FewSlots:
    """All plans of a pool: those that are cut alike, or those that may differ."""

    def __init__(
        self,
        placed: PlacedPipelines,
        bounds: PipelineBounds,
        stages: Sequence[int] | None,
        *,
        equal: bool,
        devices: int = 0,
    ) -> None:
        self.placed, self.pool = placed, placed.pool
        self.bounds = bounds
        self.stages = stages
        self.equal = equal
        self.devices = devices
        self._bound_of: dict[object, float] = {}

    def better_than(self, seconds: float) -> list[Draft]:
        """Drafts that are each faster than ``seconds`` and than those before, so the last one is the best of all."""
        found = []
        arrangements = sorted(
            ((self._lower_bound(rows), number, rows) for number, rows in enumerate(self._distinct())),
            key=lambda each: each[:2],
        )
        for bound, _, rows in arrangements:
            if bound >= seconds * (1 - 1e-12):
                break
            draft = self.placed.best(rows, seconds) if self.equal else self.placed.best_unequal(rows, seconds)
            if draft is not None and draft.seconds < seconds:
                found.append(draft)
                seconds = draft.seconds
        return found

    def _distinct(self) -> Iterator[Rows]:
        """Arrangements, without those that differ only by slots of a kind in a node, or by nodes that are alike."""
        slots = [(kind, slot) for kind, each in enumerate(self.pool.kinds) for slot in range(len(each.slots))]
        seen: set[object] = set()
        for rows in _arrangements(slots):
            if not self._allowed(rows):
                continue
            look = self.placed.look(rows)
            if look not in seen:
                seen.add(look)
                yield rows

    def _allowed(self, rows: Rows) -> bool:
        total, lengths = self.pool.total_micro_batches, {len(row) for row in rows}
        if not self.pool.allows(len(rows)):
            return False
        if sum(map(len, rows)) * self.pool.tensor_parallel < self.devices:
            return False
        if max(lengths) > self.bounds.blocks or len(rows) > total:
            return False
        if self.stages is not None and not lengths <= set(self.stages):
            return False
        if not self.equal:
            return sum(map(len, rows)) <= total
        if len(lengths) > 1 or total % len(rows):
            return False
        return enough_micro_batches(len(rows[0]), total // len(rows))

    def _lower_bound(self, rows: Rows) -> float:
        counts = np.array([np.bincount([kind for kind, _ in row], minlength=len(self.pool.kinds)) for row in rows])
        if self.equal:
            return max(self._pipeline_bound(row, self.pool.total_micro_batches // len(rows)) for row in counts)
        shortest = max(self._pipeline_bound(row, number) for row, number in zip(counts, map(len, rows), strict=True))
        if shortest == np.inf:
            return np.inf
        power = float((counts / self.bounds.work_seconds).sum())
        return max(shortest, self.pool.total_micro_batches / power * (1 - 1e-9))

    def _pipeline_bound(self, counts: NDArray[np.int64], micro_batches: int) -> float:
        key = counts.tobytes(), micro_batches
        if key not in self._bound_of:
            self._bound_of[key] = float(self.bounds.seconds(counts[None], np.array([micro_batches]))[0])
        return self._bound_of[key]


def _arrangements(slots: Sequence[Place], above: tuple[Place, ...] = ()) -> Iterator[Rows]:
    """Pipelines of some of the slots in every order, each of them in ascending order after ``above``."""
    for length in range(1, len(slots) + 1):
        for row in itertools.permutations(slots, length):
            if row <= above:
                continue
            yield (row,)
            left = [slot for slot in slots if slot not in row]
            yield from ((row, *others) for others in _arrangements(left, row))
