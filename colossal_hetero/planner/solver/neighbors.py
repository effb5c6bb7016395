"""Better slots for pipelines: a neighborhood search from a draft, by exchanges of two slots and moves of one slot.

Rules that look at kinds, memory and nodes one after the other miss good plans, by up to a half in random clusters of 16
devices. Pipelines that are cut alike stay so: their slots are exchanged. Others may also differ in their numbers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..cost.draft import Draft
from ..cost.placed_pipelines import PlacedPipelines, Rows
from ..cost.placement import Place
from ..cost.ranked_plan import ROUNDING, ranking_seconds
from ..stages.fixed_order import all_bounds
from .pipeline_bounds import PipelineBounds
from .starts import SMALL, starting_rows

_Neighbors = Callable[..., Iterator[tuple[Rows, bool]]]
"""Rows near a draft, and True for those whose stages keep their order."""


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
        self._placed = placed
        self._power: list[float] = (1.0 / bounds.work_seconds).tolist()
        self._type = {place: (place[0], builder.node(pool, place)) for place in pool.places}
        """Kind and node of each slot: slots of one type are interchangeable."""
        self._ends: dict[object, Draft] = {}  # where a climb ends, by the neighbors and the slots that it went on from

    def starts(self, pipelines: int, stages: int, most: int = 3, below: float = math.inf) -> list[Draft]:
        """The fastest of some ways to give out the slots to equal pipelines, ``most`` of those ``below`` a time."""
        found: list[Draft] = []
        seen = set()
        for rows in starting_rows(self.builder.topology, self.pool, pipelines, stages):
            look = self._placed.look(rows)
            if look not in seen:
                seen.add(look)
                draft = self._placed.best(rows, found[-1].seconds if len(found) == most else below)
                found = sorted([*found, *([draft] if draft else [])], key=lambda each: each.seconds)[:most]
        return found

    def improved(self, draft: Draft, most: int, *, equal: bool) -> Draft:
        """``draft``, or a faster one after at most ``most`` neighbors of each kind: of equal pipelines, or of any."""
        if not equal:
            # First the same slots, with cuts and micro-batches of each pipeline.
            loose = self._better(draft, tuple(map(tuple, draft.rows)), True) or draft
            moved = self._climbed(loose, most, Neighborhood._moved)
            return self._climbed(moved, most, Neighborhood._reordered)
        return self._climbed(draft, most, Neighborhood._exchanged)

    def perturbed(self, draft: Draft, most: int, starts: int, near: float, *, equal: bool) -> Draft:
        """``draft``, or a faster one that is reached from one of its best slower neighbors, each at most ``near`` times
        as slow: of equal pipelines, or of any."""
        neighbors = Neighborhood._exchanged if equal else Neighborhood._moved
        slower = self._better_ones(draft, most, neighbors, {self._placed.look(tuple(map(tuple, draft.rows)))}, near)
        ends = [
            self._of(len(start.rows)).improved(start, most, equal=equal)
            for start in sorted(slower, key=lambda each: each.ranking_seconds)[:starts]
        ]
        ends.append(draft if equal else self._evened(draft, most, near))
        return min(ends, key=lambda each: each.ranking_seconds)

    def _evened(self, draft: Draft, most: int, near: float) -> Draft:
        """``draft``, or a faster one that is reached over neighbors, each at most ``near`` times as slow, that would be
        faster if micro-batches could be divided (docs/how-the-planner-works.md, perturbation)."""
        best, seen = draft, set[object]()
        found: Draft | None = draft
        while found is not None:
            draft, best = found, min(best, found, key=lambda each: each.ranking_seconds)
            slower, below = self._better_ones(draft, most, Neighborhood._moved, seen, near), draft.even_seconds
            found = next((each for each in slower if each.even_seconds < below * (1 - ROUNDING)), None)
        ends = [self._of(len(each.rows)).improved(each, most, equal=False) for each in (best, draft)]
        return min(ends, key=lambda each: each.ranking_seconds)

    def _climbed(self, draft: Draft, most: int, neighbors: _Neighbors) -> Draft:
        """The last of drafts of which each is the first better one among ``most`` neighbors of the one before. Ends
        where an earlier one went on from the same slots."""
        seen: set[object] = set()
        passed: list[object] = []
        found: Draft | None = draft
        while found is not None:
            draft = found
            at = neighbors, self._placed.look(tuple(map(tuple, draft.rows)))
            if at in self._ends:
                draft = min(draft, self._ends[at], key=lambda each: each.ranking_seconds)
                break
            passed.append(at)
            found = next(self._better_ones(draft, most, neighbors, seen), None)
        self._ends |= dict.fromkeys(passed, draft)
        return draft

    def _better_ones(
        self, draft: Draft, most: int, neighbors: _Neighbors, seen: set[object], factor: float = 1.0
    ) -> Iterator[Draft]:
        """Those of ``most`` neighbors that were not ``seen`` that take less than ``factor`` times as long."""
        for rows, in_order in neighbors(self._of(len(draft.rows)), draft, factor):
            look, near = self._placed.look(rows), self._of(len(rows))
            if look in seen:
                continue
            if not most:
                break
            most -= 1
            seen.add(look)
            better = near._better_equal if neighbors is Neighborhood._exchanged else near._better
            found = better(draft, rows, in_order, factor)
            if found is not None:
                yield found

    def _of(self, pipelines: int) -> Neighborhood:
        return self if self.pool.allows(pipelines) else self._others(pipelines)

    # Equal pipelines ------------------------------------------------------------------------------------------------

    def _better_equal(self, draft: Draft, rows: Rows, in_order: bool, factor: float = 1.0) -> Draft | None:
        below, bounds, stages = draft.seconds * factor * (1 - ROUNDING), draft.bounds[0], len(rows[0])
        chooses = self.builder.chooses_cuts
        # With too many cuts to try them all, neighbors keep the present one, except for orders of a few stages.
        few = not chooses or math.comb(stages, 2) <= SMALL
        if (in_order and few) or (chooses and all_bounds(bounds[-1], stages) is not None):
            return self._placed.best(rows, below)
        if in_order:
            blocks = np.diff(bounds).tolist()
            held = {place: number for row in draft.rows for place, number in zip(row, blocks, strict=True)}
            bounds = (0, *itertools.accumulate(held[place] for place in rows[0]))
        cuts, sums = [bounds] * len(rows), self._placed.sums(len(rows))
        found = self.builder.build_cut(self.pool, rows, cuts, draft.micro_batches, below, sums=sums, must_fit=False)
        if not isinstance(found, Draft) or not found.seconds < below:
            return None
        again = self._placed.best(rows, found.seconds)
        return again or (found if all(cost.fits for cost in found.costs) else None)

    def _exchanged(self, draft: Draft, _: float) -> Iterator[tuple[Rows, bool]]:
        """Rows with another order of the stages in all pipelines; after an exchange of slots of two nodes; and after an
        exchange of two slots, those of the slowest pipeline first. True for orders: blocks go with their stages."""
        rows = _slowest_first(draft)
        for order in _orders(len(rows[0])):
            yield tuple(tuple(row[at] for at in order) for row in rows), True
        for swap in itertools.chain(self._swaps_of_nodes(rows), self._swaps(rows)):
            yield _swapped(rows, swap), False

    def _swaps(self, rows: Rows) -> Iterator[dict[Place, Place]]:
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
                yield {one: other, other: one}

    def _swaps_of_nodes(self, rows: Rows) -> Iterator[dict[Place, Place]]:
        """Two or more slots of a node in a stage, and slots of another node in another stage or free: one by one, they
        do not leave the sum of gradients of the stage, which is as slow as the slowest node."""
        slots: dict[tuple[int, int], list[Place]] = {}
        for row in rows:
            for stage, place in enumerate(row):
                slots.setdefault((stage, self._type[place][1]), []).append(place)
        for place in sorted(self._type.keys() - set(itertools.chain.from_iterable(rows))):
            slots.setdefault((-1, self._type[place][1]), []).append(place)
        for ((stage, node), ones), ((further, other), others) in itertools.combinations(slots.items(), 2):
            if stage != further and node != other and min(len(ones), len(others)) > 1:
                pairs = list(zip(ones, others, strict=False))
                yield dict([*pairs, *(pair[::-1] for pair in pairs)])

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
        sums = self._placed.sums(len(rows))
        kinds = Counter(tuple(sorted([kind for kind, _ in row])) for row in rows)
        if not self._bounds.may_run(kinds, self.pool.total_micro_batches, below - sums):
            return None
        found = self.builder.build_placed(self.pool, rows, in_order=in_order, below=below, sums=sums)
        return found if isinstance(found, Draft) and found.ranking_seconds < ranking * (1 - ROUNDING) else None

    def _moved(self, draft: Draft, factor: float) -> Iterator[tuple[Rows, bool]]:
        """Rows after each change that is allowed and may be faster."""
        ranking = draft.ranking_seconds * factor
        for rows in self._changed(draft):
            lengths = [len(row) for row in rows]
            if len(rows) < (1 if self.pool.pipelines is None else 2) or max(lengths) > self._bounds.blocks:
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

    def _reordered(self, draft: Draft, _: float) -> Iterator[tuple[Rows, bool]]:
        """Rows with other orders of the stages of one pipeline, the slowest first; one of those that are alike."""
        rows = _slowest_first(draft)
        for at in _first_of_each([self._placed.look((row,)) for row in rows]):
            for places in _orders(len(rows[at])):
                yield (*rows[:at], tuple([rows[at][place] for place in places]), *rows[at + 1 :]), True

    def _changed(self, draft: Draft) -> Iterator[Rows]:
        """Rows after each change, the slowest pipeline first; one of those that differ only by slots of one type."""
        rows = _slowest_first(draft)
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
            yield _swapped(rows, {one: other, other: one})
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


def _slowest_first(draft: Draft) -> Rows:
    order = sorted(range(len(draft.costs)), key=lambda number: -draft.costs[number].seconds)
    return tuple(tuple(draft.rows[number]) for number in order)


def _swapped(rows: Rows, swap: Mapping[Place, Place]) -> Rows:
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
