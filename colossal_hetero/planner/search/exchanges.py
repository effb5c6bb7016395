"""Better slots for pipelines, found by exchanges of two slots: rules that look at kinds, memory and nodes one after the
other miss good plans, by up to a half in random clusters of 16 devices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random

import numpy as np

from ..cluster.topology import Topology
from ..cost.draft import Draft, DraftBuilder, Where
from ..cost.placed_pipelines import PlacedPipelines, Rows
from ..cost.placement import Place, SlotPool
from ..cost.ranked_plan import ranking_seconds
from ..stages.fixed_order import all_bounds
from .pipeline_bounds import PipelineBounds

__all__ = ["Exchanges", "UnequalMoves", "starting_rows"]


# Starting rows -------------------------------------------------------------------------------------------------------


def starting_rows(topology: Topology, pool: SlotPool, pipelines: int, stages: int) -> Iterator[Rows]:
    """Slots of each pipeline in the order of the stages, ``[pipelines][stages]``.

    Slots of all nodes, and of nodes with faster networks only, are sorted by speed, memory or nearness, and given out
    pipeline by pipeline or stage by stage, in this order and the opposite one within a pipeline.
    """
    number = pipelines * stages
    nodes = topology.nodes
    slots = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
    node_of = {(kind, slot): topology.devices[pool.kinds[kind].slots[slot][0]].node for kind, slot in slots}
    network = {node: max((nic.bytes_per_second for nic in nodes[node].nics), default=0.0) for node in node_of.values()}

    def work(place: Place) -> float:
        return pool.kinds[place[0]].model_seconds

    def in_groups(places: Sequence[Place], size: int) -> Iterator[list[Place]]:
        yield from _in_groups(places, size, work, lambda place: node_of[place])
        yield from _in_groups(places, size, work, lambda place: nodes[node_of[place]].nics)

    for least in sorted(set(network.values())):
        places = sorted(
            (place for place in slots if network[node_of[place]] >= least),
            key=lambda place: (work(place), node_of[place]),
        )
        if len(places) < number:
            break
        by_memory = sorted(places, key=lambda place: -pool.kinds[place[0]].memory_bytes)
        for order in (places, by_memory, *in_groups(places, stages)):
            yield from _both_ways([order[first * stages : (first + 1) * stages] for first in range(pipelines)])
        for order in (places, by_memory, *in_groups(places, pipelines)):
            yield from _both_ways([order[first:number:pipelines] for first in range(pipelines)])


def _both_ways(rows: Sequence[Sequence[Place]]) -> Iterator[Rows]:
    yield tuple(tuple(row) for row in rows)
    yield tuple(tuple(row[::-1]) for row in rows)


def _in_groups(
    places: Sequence[Place], size: int, work: Callable[[Place], float], near: Callable[[Place], object]
) -> Iterator[list[Place]]:
    """Places in groups of ``size`` with equal ``near``, a node in a wide sense, and then those left over.

    First come the fastest groups, or the fastest group of each node, or all groups of the largest node.
    """
    together: dict[object, list[Place]] = {}
    for place in places:
        together.setdefault(near(place), []).append(place)
    groups, rest = [], []
    largest_first = sorted(together.values(), key=lambda slots: (-len(slots), sum(map(work, slots))))
    for number, slots in enumerate(largest_first):
        for turn in range(len(slots) // size):
            group = slots[turn * size : (turn + 1) * size]
            groups.append((turn, sum(map(work, group)), number, group))
        rest += slots[len(slots) // size * size :]
    for ordered in (
        sorted(groups, key=lambda each: each[1:3]),
        sorted(groups, key=lambda each: each[:3]),
        sorted(groups, key=lambda each: (each[2], each[0])),
    ):
        yield [*(place for *_, group in ordered for place in group), *sorted(rest, key=work)]


LEAST_GAIN = 1e-9
"""Least relative gain of an exchange, above rounding."""
RANDOM_EXCHANGES = 3
"""Before a restart."""


class Exchanges:
    """Improvement of pipelines that are cut alike, of the slots of one pool."""

    def __init__(self, builder: DraftBuilder, pool: SlotPool) -> None:
        self.builder = builder
        self.pool = pool
        self.placed = PlacedPipelines(builder, pool)
        places = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
        self._where = {place: builder.where(pool, place) for place in places}

    def start(self, pipelines: int, stages: int) -> Draft | None:
        """Fastest of some ways to give out the slots; None if none fits in memory."""
        best, seen = None, set()
        for rows in starting_rows(self.builder.topology, self.pool, pipelines, stages):
            look = self.placed.look(rows)
            if look not in seen:
                seen.add(look)
                best = self.placed.best(rows, best.seconds if best else float("inf")) or best
        return best

    def improved(self, draft: Draft, most: int, seen: set[object] | None = None) -> Draft:
        """``draft``, or a faster one with other slots or other cuts."""
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
        """``draft``, or the best after random exchanges: several together can gain where one cannot."""
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
        """Rows after each exchange of two slots, those of the slowest pipeline first."""
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


# Unequal moves -------------------------------------------------------------------------------------------------------


ROUNDING = 1e-9


class UnequalMoves:
    """Improvement of pipelines that may differ, of the slots of one pool."""

    def __init__(
        self, builder: DraftBuilder, pool: SlotPool, bounds: PipelineBounds, sums: Callable[[int], float]
    ) -> None:
        self.builder = builder
        self.pool = pool
        self._placed = PlacedPipelines(builder, pool)
        self._bounds, self._sums = bounds, sums
        self._power: list[float] = (1.0 / bounds.work_seconds).tolist()
        self._blocks = bounds.blocks
        places = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
        self._where = {place: builder.where(pool, place) for place in places}
        self._type = {place: (place[0], where) for place, where in self._where.items()}
        self._options: dict[tuple[int, ...], list[tuple[float, float]]] = {}

    def improved(self, draft: Draft, most: int, stages: frozenset[int] | None, all_slots: bool) -> Draft:
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
        """Lower bound, reached if all pipelines end at the same moment."""
        power = self._power
        return self.pool.total_micro_batches / sum([power[kind] for row in rows for kind, _ in row])

    def _may_take_less(self, rows: Rows, ranking: float) -> bool:
        """True if pipelines of these slots may be ranked before plans with so many :attr:`.Draft.ranking_seconds`."""
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
        """:meth:`.PipelineBounds.options` of these kinds; also computes those that differ by a slot, needed next."""
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
        """Rows after each change, the slowest pipeline first; one of those that differ only by slots of one type."""
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


def _first_of_each(values: Sequence[object]) -> list[int]:
    first: dict[object, int] = {}
    for number, value in enumerate(values):
        first.setdefault(value, number)
    return list(first.values())
