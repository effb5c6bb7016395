"""Better slots for pipelines: a neighborhood search from a draft, by exchanges of two slots and moves of one slot.

Rules that look at kinds, memory and nodes one after the other miss good plans, by up to a half in random clusters of 16
devices. Pipelines that are cut alike stay so: their slots are exchanged. Others may also differ in their numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..cost.draft import Draft
from ..cost.placed_pipelines import PlacedPipelines, Rows
from ..cost.placement import Place
from ..cost.ranked_plan import ranking_seconds
from ..stages.fixed_order import all_bounds
from .pipeline_bounds import PipelineBounds
from .starts import starting_rows

LEAST_GAIN = 1e-9
"""Relative gain of a change, above rounding."""


class Neighborhood:
    """Neighbors of drafts of one pool."""

    def __init__(
        self,
        placed: PlacedPipelines,
        bounds: PipelineBounds,
        stages: Sequence[int] | None,
        *,
        all_slots: bool,
        others: Callable[[int], Neighborhood],
    ) -> None:
        """``others`` gives the neighborhood of the same slots for so many pipelines in ZeRO stage 1."""
        self._others = others
        self.builder, self.pool = builder, pool = placed.builder, placed.pool
        self._bounds = bounds
        self._stages = None if stages is None else frozenset(stages)
        self._all_slots = all_slots
        self._least_pipelines = 1 if pool.pipelines is None else 2
        self._placed = placed
        self._power: list[float] = (1.0 / bounds.work_seconds).tolist()
        self._type = {place: (place[0], builder.node(pool, place)) for place in pool.places}
        """Kind and node of each slot: slots of one type are interchangeable."""
        self._options: dict[tuple[int, ...], list[tuple[float, float]]] = {}

    def starts(self, pipelines: int, stages: int) -> list[Draft]:
        """The three fastest of some ways to give out the slots to equal pipelines, as far as they fit in memory."""
        found: list[Draft] = []
        seen = set()
        for rows in starting_rows(self.builder.topology, self.pool, pipelines, stages):
            look = self._placed.look(rows)
            if look not in seen:
                seen.add(look)
                draft = self._placed.best(rows, found[2].seconds if len(found) > 2 else float("inf"))
                found = sorted([*found, *([draft] if draft else [])], key=lambda each: each.seconds)[:3]
        return found

    def improved(self, draft: Draft, most: int, *, equal: bool) -> Draft:
        """``draft``, or a faster one after at most ``most`` neighbors of each kind: of equal pipelines, or of any."""
        if not equal:
            # First the same slots, with cuts and micro-batches of each pipeline.
            loose = self._better(draft, tuple(map(tuple, draft.rows)), True) or draft
            moved = self._climbed(loose, most, Neighborhood._moved, Neighborhood._better)
            return self._climbed(moved, most, Neighborhood._reordered, Neighborhood._better)
        best = self._climbed(draft, most, Neighborhood._exchanged, Neighborhood._better_equal)
        if best is not draft and self._cuts_stay(best):
            again = self.builder.build_placed(best.pool, best.rows, symmetric=True)
            best = again if isinstance(again, Draft) and again.seconds < best.seconds else best
        return best

    def perturbed(self, draft: Draft, most: int, starts: int, near: float) -> Draft:
        """``draft``, or a faster one that is reached from one of the best slower drafts with another number of slots or
        pipelines, each ``near`` times as slow at most."""
        shape = len(draft.rows), sum(map(len, draft.rows))
        seen, found = {self._placed.look(tuple(map(tuple, draft.rows)))}, []
        for rows, in_order in itertools.islice(self._moved(draft, near), most):
            if (len(rows), sum(map(len, rows))) != shape and (look := self._placed.look(rows)) not in seen:
                seen.add(look)
                slower = self._of(len(rows))._better(draft, rows, in_order, near)
                found += [slower] if slower is not None else []
        best = draft
        for start in sorted(found, key=lambda each: each.ranking_seconds)[:starts]:
            climbed = self._of(len(start.rows))._climbed(start, most, Neighborhood._moved, Neighborhood._better)
            best = min(best, climbed, key=lambda each: each.ranking_seconds)
        return best

    def _climbed(
        self,
        draft: Draft,
        most: int,
        neighbors: Callable[[Neighborhood, Draft], Iterator[tuple[Rows, bool]]],
        better: Callable[[Neighborhood, Draft, Rows, bool], Draft | None],
    ) -> Draft:
        """The last of drafts of which each is the first better one among ``most`` neighbors of the one before."""
        seen: set[object] = set()
        found: Draft | None = draft
        while found is not None:
            draft, found, tried = found, None, 0
            for rows, in_order in neighbors(self._of(len(draft.rows)), draft):
                look = self._placed.look(rows)
                if look in seen:
                    continue
                if tried >= most:
                    break
                seen.add(look)
                tried += 1
                found = better(self._of(len(rows)), draft, rows, in_order)
                if found is not None:
                    break
        return draft

    def _of(self, pipelines: int) -> Neighborhood:
        return self if self.pool.allows(pipelines) else self._others(pipelines)

    # Equal pipelines ------------------------------------------------------------------------------------------------

    def _cuts_stay(self, draft: Draft) -> bool:
        """True if there are too many cuts to try them all; exchanges keep them then."""
        bounds = draft.bounds[0]
        return not self.builder.chooses_cuts or all_bounds(bounds[-1], len(bounds) - 1) is None

    def _better_equal(self, draft: Draft, rows: Rows, in_order: bool) -> Draft | None:
        below = draft.seconds * (1 - LEAST_GAIN)
        if not self._cuts_stay(draft):
            return self._placed.best(rows, below)
        if in_order:
            pipelines_below = below - self._placed.sums(len(rows))
            found = self.builder.build_placed(self.pool, rows, symmetric=True, in_order=True, below=pipelines_below)
        else:
            found = self.builder.build_cut(self.pool, rows, draft.bounds, draft.micro_batches, below)
        return found if isinstance(found, Draft) and found.seconds < below else None

    def _exchanged(self, draft: Draft) -> Iterator[tuple[Rows, bool]]:
        """Rows with other orders of the stages in all pipelines, and then after each exchange of two slots, those of
        the slowest pipeline first. True for orders: blocks go with their stages."""
        for order in _orders(len(draft.rows[0])):
            yield tuple(tuple([row[at] for at in order]) for row in draft.rows), True
        order = sorted(range(len(draft.costs)), key=lambda number: -draft.costs[number].seconds)
        rows = [tuple(draft.rows[number]) for number in order]
        free = self._free([place for row in rows for place in row])
        # Of pipelines that are alike, two are enough: one of them, and one whose slots it gets.
        alike: Counter[object] = Counter()
        used: list[Place] = []
        for row in rows:
            look = self._placed.look((row,))
            alike[look] += 1
            if alike[look] <= 2:
                used += row
        for one, other in itertools.chain(itertools.combinations(used, 2), itertools.product(used, free)):
            if self._type[one] != self._type[other]:
                yield _swapped(rows, one, other), False

    def _free(self, used: Sequence[Place]) -> list[Place]:
        """One slot of each type that is not used."""
        free: dict[object, Place] = {}
        for place in sorted(self._type.keys() - set(used)):
            free.setdefault(self._type[place], place)
        return list(free.values())

    # Pipelines that may differ --------------------------------------------------------------------------------------

    def _better(self, draft: Draft, rows: Rows, in_order: bool, factor: float = 1.0) -> Draft | None:
        ranking, may_be_equal = draft.ranking_seconds * factor, len(set(map(len, rows))) == 1
        below = ranking / ranking_seconds(1.0, equal=may_be_equal, plain=self.pool.pipelines is None)
        below -= self._placed.sums(len(rows))
        if not self._may_take_less(rows, below):
            return None
        found = self.builder.build_placed(self.pool, rows, in_order=in_order, below=below)
        return found if isinstance(found, Draft) and found.ranking_seconds < ranking * (1 - LEAST_GAIN) else None

    def _moved(self, draft: Draft, factor: float = 1.0) -> Iterator[tuple[Rows, bool]]:
        """Rows after each change that is allowed and may be faster."""
        ranking = draft.ranking_seconds * factor
        for rows in self._changed(draft):
            lengths = [len(row) for row in rows]
            if len(rows) < self._least_pipelines or max(lengths) > self._bounds.blocks:
                continue
            if self._all_slots and sum(lengths) < len(self._type):
                continue
            if sum(lengths) > self.pool.total_micro_batches:
                continue
            if self._stages is not None and not self._stages.issuperset(lengths):
                continue
            power = sum([self._power[kind] for row in rows for kind, _ in row])
            if self.pool.total_micro_batches / power < ranking:
                yield tuple(sorted(tuple(sorted(row)) for row in rows)), False

    def _reordered(self, draft: Draft) -> Iterator[tuple[Rows, bool]]:
        """Rows with other orders of the stages of one pipeline, the slowest first; one of those that are alike."""
        rows = tuple(map(tuple, draft.rows))
        order = sorted(range(len(rows)), key=lambda number: -draft.costs[number].seconds)
        for at in _first_of_each([self._placed.look((rows[number],)) for number in order]):
            row = rows[order[at]]
            for places in _orders(len(row)):
                changed = tuple([row[place] for place in places])
                yield (*rows[: order[at]], changed, *rows[order[at] + 1 :]), True

    def _changed(self, draft: Draft) -> Iterator[Rows]:
        """Rows after each change, the slowest pipeline first; one of those that differ only by slots of one type."""
        order = sorted(range(len(draft.costs)), key=lambda number: -draft.costs[number].seconds)
        rows = tuple(tuple(draft.rows[number]) for number in order)
        free = self._free([place for row in rows for place in row])
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
        for taken in free:
            yield (*rows, (taken,))
            for at in _first_of_each(alike):
                yield (*rows[:at], (*rows[at], taken), *rows[at + 1 :])
        for one, other in self._pairs(rows, alike, free):
            yield _swapped(rows, one, other)
        pairs = list(itertools.combinations(range(len(rows)), 2))
        for pair in _first_of_each([tuple(sorted((alike[first], alike[second]))) for first, second in pairs]):
            first, second = pairs[pair]
            kept = [row for number, row in enumerate(rows) if number not in (first, second)]
            yield (*kept, (*rows[first], *rows[second]))
        for at, row in enumerate(rows):
            if len(row) > 2:
                yield (*rows[:at], *rows[at + 1 :], row[::2], row[1::2])

    def _pairs(self, rows: Rows, alike: Sequence[object], free: Sequence[Place]) -> Iterator[tuple[Place, Place]]:
        """Pairs of slots of different types: of two pipelines, then one of a pipeline and one that is free."""
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

    def _may_take_less(self, rows: Rows, seconds: float) -> bool:
        """True if pipelines of these slots may run all micro-batches in so many seconds."""
        run = 0
        for kinds, pipelines in Counter(tuple(sorted([kind for kind, _ in row])) for row in rows).items():
            most = max(
                (int((seconds - first) / further * (1 + LEAST_GAIN) + LEAST_GAIN) + 1 if first <= seconds else 0)
                for first, further in self._options_of(kinds)
            )
            if not most:
                return False
            run += pipelines * most
        return run >= self.pool.total_micro_batches

    def _options_of(self, kinds: tuple[int, ...]) -> Sequence[tuple[float, float]]:
        """:meth:`.PipelineBounds.options` of these kinds; also computes those that differ by a slot, needed next."""
        if kinds not in self._options:
            number = len(self.pool.kinds)
            counts, unit = np.bincount(kinds, minlength=number), np.eye(number + 1, number, dtype=np.int64)
            near = (counts + unit[:, None] - unit[None, :]).reshape(-1, number)
            near = near[(near >= 0).all(axis=1) & (near.sum(axis=1) >= 1) & (near.sum(axis=1) <= self._bounds.blocks)]
            first, further = self._bounds.options(near)
            for row, each in enumerate(near.tolist()):
                named = tuple(itertools.chain.from_iterable([kind] * count for kind, count in enumerate(each)))
                self._options[named] = list(zip(first[:, row].tolist(), further[:, row].tolist(), strict=True))
        return self._options[kinds]


def _swapped(rows: Sequence[Sequence[Place]], one: Place, other: Place) -> Rows:
    swap = {one: other, other: one}
    return tuple(tuple(swap.get(place, place) for place in row) for row in rows)


def _orders(stages: int) -> Iterator[list[int]]:
    """Orders of stages near the present one: some neighbors in the opposite order, two exchanged, or one moved."""
    present = list(range(stages))
    for one, other in itertools.combinations(present, 2):
        yield [*present[:one], *reversed(present[one : other + 1]), *present[other + 1 :]]
        if one < other - 2:
            exchanged = list(present)
            exchanged[one], exchanged[other] = other, one
            yield exchanged
    for one, other in itertools.permutations(present, 2):
        moved = [*present[:one], *present[one + 1 :]]
        moved.insert(other, one)
        if abs(one - other) > 1:
            yield moved


def _first_of_each(values: Sequence[object]) -> list[int]:
    first: dict[object, int] = {}
    for number, value in enumerate(values):
        first.setdefault(value, number)
    return list(first.values())
