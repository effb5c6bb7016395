"""Better slots for pipelines that are not alike, found by moving one slot, or exchanging two, at a time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..bounds.pipeline_bounds import PipelineBounds
from ..candidates.draft import Draft, DraftBuilder
from ..candidates.placed_pipelines import PlacedPipelines, Rows
from ..plans.ranked_plan import ranking_seconds
from ..slots.placement import Place, SlotPool

__all__ = ["UnequalMoves"]

LEAST_GAIN = 1e-9
"""Share of the time by which a change must be faster, so that rounding is not taken for a gain."""
ROUNDING = 1e-9


class UnequalMoves:
    """The slots of one pool, and what is better for its pipelines."""

    def __init__(
        self, builder: DraftBuilder, pool: SlotPool, bounds: PipelineBounds, sums: Callable[[int], float]
    ) -> None:
        """What is moved.

        Args:
            builder: Builds the candidates.
            pool: The slots there are.
            bounds: Lower bounds on the times of pipelines of the pool.
            sums: Seconds in which so many pipelines sum their gradients at least.
        """
        self.builder = builder
        self.pool = pool
        self._placed = PlacedPipelines(builder, pool)
        self._bounds, self._sums = bounds, sums
        self._power: list[float] = (1.0 / bounds.work_seconds).tolist()
        self._blocks = bounds.blocks
        places = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
        self._where = {place: builder.where(pool, place) for place in places}
        self._type = {place: (place[0], where) for place, where in self._where.items()}
        """Kind and node: slots of one type are interchangeable."""
        self._options: dict[tuple[int, ...], list[tuple[float, float]]] = {}

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
            fastest = best.ranking_seconds
            for rows in self._neighbors(best):
                if not self._allowed(rows, stages, all_slots) or self._min_seconds(rows) >= fastest:
                    continue
                rows = tuple(sorted(tuple(sorted(row)) for row in rows))
                look = self._placed.look(rows)
                if look in seen:
                    continue
                seen.add(look)
                left -= 1
                if self._may_take_less(rows, fastest):
                    changed = self.builder.build_placed(self.pool, rows)
                    if isinstance(changed, Draft) and changed.ranking_seconds < fastest * (1 - LEAST_GAIN):
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
        power = self._power
        return self.pool.total_micro_batches / sum([power[kind] for row in rows for kind, _ in row])

    def _may_take_less(self, rows: Rows, ranking: float) -> bool:
        """Whether pipelines of these slots may be ranked before plans with so many :attr:`.Draft.ranking_seconds`."""
        may_be_equal = len(set(map(len, rows))) == 1
        seconds = ranking / ranking_seconds(1.0, equal=may_be_equal) - self._sums(len(rows))
        run = 0
        for kinds, pipelines in Counter(tuple(sorted([kind for kind, _ in row])) for row in rows).items():
            most = max(
                (int((seconds - first) / further * (1 + ROUNDING) + ROUNDING) + 1 if first <= seconds else 0)
                for first, further in self._options_of(kinds)
            )
            if not most:
                return False
            run += pipelines * most
        return run >= self.pool.total_micro_batches

    def _options_of(self, kinds: tuple[int, ...]) -> Sequence[tuple[float, float]]:
        """:meth:`.PipelineBounds.options` of a pipeline of slots of these kinds.

        Those of pipelines that differ by one slot are looked up next, and many take hardly longer than one.
        """
        if kinds not in self._options:
            number = len(self.pool.kinds)
            counts, unit = np.bincount(kinds, minlength=number), np.eye(number + 1, number, dtype=np.int64)
            near = (counts + unit[:, None] - unit[None, :]).reshape(-1, number)
            near = near[(near >= 0).all(axis=1) & (near.sum(axis=1) >= 1) & (near.sum(axis=1) <= self._blocks)]
            first, further = self._bounds.options(near)
            for row, each in enumerate(near.tolist()):
                named = tuple(itertools.chain.from_iterable([kind] * count for kind, count in enumerate(each)))
                self._options[named] = list(zip(first[:, row].tolist(), further[:, row].tolist(), strict=True))
        return self._options[kinds]

    def _neighbors(self, draft: Draft) -> Iterator[Rows]:
        """The slots after each change: a slot is moved, exchanged, left out or taken in; a pipeline is cut or joined.

        What concerns the slowest pipeline comes first. Of changes that differ only by slots of one type, there is one.
        """
        order = sorted(range(len(draft.costs)), key=lambda number: -draft.costs[number].seconds)
        rows = tuple(tuple(draft.rows[number]) for number in order)
        used = {place for row in rows for place in row}
        free: dict[object, Place] = {}
        for place in sorted(self._where.keys() - used):
            free.setdefault(self._type[place], place)
        alike = [tuple(sorted([self._type[place] for place in row])) for row in rows]
        for source in _first_of_each(alike):
            row, others = rows[source], [*rows[:source], *rows[source + 1 :]]
            targets = _first_of_each([*alike[:source], *alike[source + 1 :]])
            for moved in {self._type[place]: place for place in row}.values():
                rest = tuple(place for place in row if place != moved)
                left = [rest] if rest else []
                yield (*others, *left)
                if rest:
                    yield (*others, rest, (moved,))
                for at in targets:
                    yield (*others[:at], (*others[at], moved), *others[at + 1 :], *left)
        for taken in free.values():
            yield (*rows, (taken,))
            for at in _first_of_each(alike):
                yield (*rows[:at], (*rows[at], taken), *rows[at + 1 :])
        for one, other in self._exchanges(rows, alike, list(free.values())):
            swap = {one: other, other: one}
            yield tuple(tuple(swap.get(place, place) for place in row) for row in rows)
        pairs = list(itertools.combinations(range(len(rows)), 2))
        for pair in _first_of_each([tuple(sorted((alike[first], alike[second]))) for first, second in pairs]):
            first, second = pairs[pair]
            kept = [row for number, row in enumerate(rows) if number not in (first, second)]
            yield (*kept, (*rows[first], *rows[second]))
        for at, row in enumerate(rows):
            if len(row) > 2:
                yield (*rows[:at], *rows[at + 1 :], row[::2], row[1::2])

    def _exchanges(self, rows: Rows, alike: Sequence[object], free: Sequence[Place]) -> Iterator[tuple[Place, Place]]:
        """Pairs of slots of different types: of two pipelines, then one of a pipeline and one that is free.

        Args:
            rows: The slots of each pipeline.
            alike: By pipeline; equal where the slots are of equal types.
            free: Slots that are in no pipeline.
        """
        seen = set()
        for (first, row), (second, further) in itertools.combinations(enumerate(rows), 2):
            for one, other in itertools.product(row, further):
                key = alike[first], self._type[one], alike[second], self._type[other]
                if self._type[one] != self._type[other] and key not in seen:
                    seen.add(key)
                    yield one, other
        for at in _first_of_each(alike):
            for one in {self._type[place]: place for place in rows[at]}.values():
                yield from ((one, other) for other in free if self._type[one] != self._type[other])


def _first_of_each(values: Sequence[object]) -> list[int]:
    """Where each value comes up first."""
    first: dict[object, int] = {}
    for number, value in enumerate(values):
        first.setdefault(value, number)
    return list(first.values())
