"""Better slots for pipelines that are not alike, found by moving one slot, or exchanging two, at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..bounds.pipeline_bounds import PipelineBounds
from ..candidates.draft import Draft, DraftBuilder, Where
from ..candidates.placed_pipelines import PlacedPipelines, Rows
from ..slots.placement import Place, SlotPool

__all__ = ["UnequalMoves"]

LEAST_GAIN = 1e-9
"""Share of the time by which a change must be faster, so that rounding is not taken for a gain."""


class UnequalMoves:
    """The slots of one pool, and what is better for its pipelines."""

    def __init__(self, builder: DraftBuilder, pool: SlotPool, bounds: PipelineBounds) -> None:
        self.builder = builder
        self.pool = pool
        self._placed = PlacedPipelines(builder, pool)
        self._work = bounds.work_seconds
        self._blocks = bounds.blocks
        places = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
        self._where = {place: builder.where(pool, place) for place in places}

    def improved(self, draft: Draft, most: int, stages: frozenset[int] | None, all_slots: bool) -> Draft:
        """``draft``, or a faster one with other slots.

        Args:
            draft: Of any pipelines of the pool.
            most: Changes that are tried at most.
            stages: Numbers of stages that are allowed; None for all.
            all_slots: Whether every slot stays in use.
        """
        best, left = draft, most
        seen: set[object] = set()
        found = True
        while found and left > 0:
            found = False
            for rows in self._neighbors(best):
                if not self._allowed(rows, stages, all_slots) or self._min_seconds(rows) >= best.ranking_seconds:
                    continue
                rows = tuple(sorted(tuple(sorted(row)) for row in rows))
                look = self._placed.look(rows)
                if look in seen:
                    continue
                seen.add(look)
                left -= 1
                changed = self.builder.build_placed(self.pool, rows)
                if isinstance(changed, Draft) and changed.ranking_seconds < best.ranking_seconds * (1 - LEAST_GAIN):
                    best, found = changed, True
                if found or left <= 0:
                    break
        return best

    def _allowed(self, rows: Rows, stages: frozenset[int] | None, all_slots: bool) -> bool:
        lengths = [len(row) for row in rows]
        if not lengths or not self.pool.allows(len(rows)) or (all_slots and sum(lengths) < len(self._where)):
            return False
        if max(lengths) > self._blocks or (stages is not None and not stages.issuperset(lengths)):
            return False
        return sum(self.builder.min_micro_batches(lengths)) <= self.pool.total_micro_batches

    def _min_seconds(self, rows: Rows) -> float:
        """A lower bound, reached if all pipelines end at the same moment."""
        power = sum(1 / float(self._work[kind]) for row in rows for kind, _ in row)
        return self.pool.total_micro_batches / power

    def _neighbors(self, draft: Draft) -> Iterator[Rows]:
        """The slots after each change: a slot is moved, exchanged, left out or taken in; a pipeline is cut or joined.

        What concerns the slowest pipeline comes first.
        """
        order = sorted(range(len(draft.costs)), key=lambda number: -draft.costs[number].seconds)
        rows = [tuple(draft.rows[number]) for number in order]
        used = {place for row in rows for place in row}
        free: dict[object, Place] = {}
        for place in sorted(self._where.keys() - used):
            free.setdefault(self._type(place), place)
        for source, row in enumerate(rows):
            others = [*rows[:source], *rows[source + 1 :]]
            for moved in {self._type(place): place for place in row}.values():
                rest = tuple(place for place in row if place != moved)
                left = [rest] if rest else []
                yield (*others, *left)
                if rest:
                    yield (*others, rest, (moved,))
                for at, to in enumerate(others):
                    yield (*others[:at], (*to, moved), *others[at + 1 :], *left)
        for taken in free.values():
            yield (*rows, (taken,))
            for at, to in enumerate(rows):
                yield (*rows[:at], (*to, taken), *rows[at + 1 :])
        in_use = [place for row in rows for place in row]
        pairs = itertools.chain(itertools.combinations(in_use, 2), itertools.product(in_use, free.values()))
        for one, other in pairs:
            if self._type(one) != self._type(other):
                swap = {one: other, other: one}
                yield tuple(tuple(swap.get(place, place) for place in row) for row in rows)
        for first, second in itertools.combinations(range(len(rows)), 2):
            kept = [row for number, row in enumerate(rows) if number not in (first, second)]
            yield (*kept, (*rows[first], *rows[second]))
        for at, row in enumerate(rows):
            if len(row) > 2:
                yield (*rows[:at], *rows[at + 1 :], row[::2], row[1::2])

    def _type(self, place: Place) -> tuple[int, Where]:
        """Kind and node: slots of one type are interchangeable."""
        return place[0], self._where[place]
