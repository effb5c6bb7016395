"""Better slots for pipelines that are cut alike, found by exchanging two slots at a time.

In a cluster whose nodes differ, many small decisions matter together: which of two equal devices has the faster
network, which slow device a pipeline can bear, which stages share a network card. Rules that look at kinds, memory and
nodes one after the other miss good plans there, by up to a half in random clusters of 16 devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from ..candidates.draft import Draft, DraftBuilder, Where
from ..candidates.placed_pipelines import PlacedPipelines, Rows
from ..candidates.starting_rows import starting_rows
from ..slots.placement import Place, SlotPool
from ..stages.all_cuts import all_bounds

__all__ = ["Exchanges"]

LEAST_GAIN = 1e-9
"""Share of the time by which an exchange must be faster, so that rounding is not taken for a gain."""
RANDOM_EXCHANGES = 3
"""Random exchanges before a restart."""


class Exchanges:
    """The slots of one pool, and what is better for its pipelines."""

    def __init__(self, builder: DraftBuilder, pool: SlotPool) -> None:
        self.builder = builder
        self.pool = pool
        self.placed = PlacedPipelines(builder, pool)
        places = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
        self._where = {place: builder.where(pool, place) for place in places}

    def start(self, pipelines: int, stages: int) -> Draft | None:
        """The fastest of some ways to give out the slots; None if none fits in memory."""
        best, seen = None, set()
        for rows in starting_rows(self.builder.topology, self.pool, pipelines, stages):
            look = self.placed.look(rows)
            if look not in seen:
                seen.add(look)
                best = self.placed.best(rows, best.seconds if best else float("inf")) or best
        return best

    def improved(self, draft: Draft, most: int, seen: set[object] | None = None) -> Draft:
        """``draft``, or a faster one with other slots or other cuts.

        Args:
            draft: Of pipelines that are cut alike.
            most: Exchanges that are tried at most.
            seen: Results of exchanges that are not tried; those that are tried are added.
        """
        best, left = draft, most
        seen = set() if seen is None else seen
        # If there are too many cuts to try them all, the cuts stay the same during exchanges.
        bounds = draft.splits[0].bounds
        fixed = not self.builder.chooses_cuts or all_bounds(bounds[-1], len(bounds) - 1) is None
        found = True
        while found and left > 0:
            found = False
            for rows in self._neighbors(best):
                look = self.placed.look(rows)
                if look in seen:
                    continue
                seen.add(look)
                left -= 1
                better = self._with_same_cuts(best, rows) if fixed else self._with_best_cuts(best, rows)
                if better is not None:
                    best, found = better, True
                if found or left <= 0:
                    break
        if fixed and best is not draft:
            again = self.builder.build_placed(best.pool, best.rows, symmetric=True)
            best = again if isinstance(again, Draft) and again.seconds < best.seconds else best
        return best

    def restarted(self, draft: Draft, times: int, most: int) -> Draft:
        """``draft``, or the best of what :meth:`improved` finds after a few random exchanges, so many ``times``.

        No single exchange makes a result of :meth:`improved` faster, but several together can.
        """
        best, slots, random = draft, sorted(self._where), Random(0)
        seen: set[object] = set()
        for _ in range(times):
            rows = [list(row) for row in best.rows]
            for _ in range(RANDOM_EXCHANGES):
                one, other = random.choice(random.choice(rows)), random.choice(slots)
                swap = {one: other, other: one}
                rows = [[swap.get(place, place) for place in row] for row in rows]
            changed = self.placed.best(tuple(map(tuple, rows)), float("inf"))
            if changed is not None:
                best = min(best, self.improved(changed, most, seen), key=lambda each: each.seconds)
        return best

    def _with_best_cuts(self, draft: Draft, rows: Rows) -> Draft | None:
        return self.placed.best(rows, draft.seconds * (1 - LEAST_GAIN))

    def _with_same_cuts(self, draft: Draft, rows: Rows) -> Draft | None:
        below = draft.seconds * (1 - LEAST_GAIN)
        bounds = [cut.bounds for cut in draft.splits]
        found = self.builder.build_cut(self.pool, rows, bounds, draft.micro_batches, below)
        return found if isinstance(found, Draft) and found.seconds < below else None

    def _neighbors(self, draft: Draft) -> Iterator[Rows]:
        """The slots after each exchange of two slots, those of the slowest pipeline first."""
        slowest = max(range(len(draft.costs)), key=lambda number: draft.costs[number].seconds)
        rows = draft.rows
        used = [place for row in (rows[slowest], *rows[:slowest], *rows[slowest + 1 :]) for place in row]
        free: dict[object, Place] = {}
        for place in sorted(self._where.keys() - set(used)):
            free.setdefault(self._type(place), place)
        pairs = itertools.chain(itertools.combinations(used, 2), itertools.product(used, free.values()))
        for one, other in pairs:
            if self._type(one) != self._type(other):
                swap = {one: other, other: one}
                yield tuple(tuple(swap.get(place, place) for place in row) for row in rows)

    def _type(self, place: Place) -> tuple[int, Where]:
        """Kind and node: slots of one type are interchangeable."""
        return place[0], self._where[place]
