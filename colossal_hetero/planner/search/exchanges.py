"""Better slots for pipelines that are cut alike: several ways to give out the slots, then exchanges of two slots.

In a cluster whose nodes differ, many small decisions matter together: which of two equal devices has the faster
network, which slow device a pipeline can bear, which stages share a network card. Rules that look at kinds, memory and
nodes one after the other miss good plans there, by up to a half in random clusters of 16 devices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from ..stages.all_cuts import all_bounds
from .draft import Draft, DraftBuilder
from .placed_pipelines import PlacedPipelines, Rows
from .placement import Place, SlotPool

__all__ = ["Exchanges"]

LEAST_GAIN = 1e-9
"""Share of the time by which an exchange must be faster, so that rounding is not taken for a gain."""


class Exchanges:
    """The slots of one pool, and what is better for its pipelines."""

    def __init__(self, builder: DraftBuilder, pool: SlotPool) -> None:
        self.builder = builder
        self.pool = pool
        self.placed = PlacedPipelines(builder, pool)
        places = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
        self._node_of = {place: builder.node(pool, place) for place in places}

    def start(self, pipelines: int, stages: int) -> Draft | None:
        """The fastest of a few ways to give out the slots; None if none fits in memory.

        The slots are sorted: those with the fastest network first, or the fastest, or those in the largest nodes. Then
        either one pipeline after the other gets its slots, or one stage of all pipelines after the other.
        """
        best = None
        for slots in self._sorted():
            used = slots[: pipelines * stages]
            together = tuple(tuple(sorted(used[first * stages : (first + 1) * stages])) for first in range(pipelines))
            apart = tuple(tuple(used[first::pipelines]) for first in range(pipelines))
            for rows in (together, apart):
                found = self.placed.best(rows, best.seconds if best else float("inf"))
                best = found or best
        return best

    def improved(self, draft: Draft, most: int) -> Draft:
        """``draft``, or a faster one with other slots or other cuts.

        Args:
            draft: Of pipelines that are cut alike.
            most: Exchanges that are tried at most.
        """
        best, left = draft, most
        seen: set[object] = set()
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

    def _with_best_cuts(self, draft: Draft, rows: Rows) -> Draft | None:
        return self.placed.best(rows, draft.seconds * (1 - LEAST_GAIN))

    def _with_same_cuts(self, draft: Draft, rows: Rows) -> Draft | None:
        found = self.builder.build_cut(self.pool, rows, [cut.bounds for cut in draft.splits], draft.micro_batches)
        return found if isinstance(found, Draft) and found.seconds < draft.seconds * (1 - LEAST_GAIN) else None

    def _sorted(self) -> Iterator[list[Place]]:
        """The slots by different properties, the best ones first. Slots of a node stay together where they are equal."""
        node_of, slots_on = self._node_of, Counter(self._node_of.values())
        nodes = self.builder.topology.nodes
        network = {node: max((nic.bytes_per_second for nic in nodes[node].nics), default=0.0) for node in slots_on}

        def work(place: Place) -> float:
            return self.pool.kinds[place[0]].model_seconds

        yield sorted(node_of, key=lambda place: (-network[node_of[place]], node_of[place], work(place)))
        yield sorted(node_of, key=lambda place: (work(place), -network[node_of[place]], node_of[place]))
        yield sorted(node_of, key=lambda place: (-slots_on[node_of[place]], node_of[place], work(place)))

    def _neighbors(self, draft: Draft) -> Iterator[Rows]:
        """The slots after each exchange of two slots, those of the slowest pipeline first."""
        slowest = max(range(len(draft.costs)), key=lambda number: draft.costs[number].seconds)
        rows = draft.rows
        used = [place for row in (rows[slowest], *rows[:slowest], *rows[slowest + 1 :]) for place in row]
        free: dict[object, Place] = {}
        for place in sorted(self._node_of.keys() - set(used)):
            free.setdefault(self._type(place), place)
        pairs = itertools.chain(itertools.combinations(used, 2), itertools.product(used, free.values()))
        for one, other in pairs:
            if self._type(one) != self._type(other):
                swap = {one: other, other: one}
                yield tuple(tuple(swap.get(place, place) for place in row) for row in rows)

    def _type(self, place: Place) -> tuple[int, int]:
        """Kind and node: slots of one type are interchangeable."""
        return place[0], self._node_of[place]
