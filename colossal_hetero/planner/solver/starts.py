"""Starts of the search: pipelines that are cut alike, as rows (degree, micro-batch, number, composition) with lower
bounds on their times; ways to give out slots to them; and slots of pipelines that differ."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Topology
from ..cost.placed_pipelines import Rows
from ..cost.placement import Place, SlotPool
from ..cost.runnable import enough_micro_batches
from ..cost.tp_groups import compositions, divisors
from .pipeline_bounds import PipelineBounds, named

MAX_ROWS = 16  # rows that are built for a set of kinds of devices, in the order of their bounds

SMALL = 16
"""Slots that are dealt out to every number of pipelines, and devices up to which all limits of the search hold."""

Groups = list[tuple[int, ...]]
"""Slots by kind of each pipeline, ``[pipelines][kinds]``."""


class EqualRows:
    """Rows of some pools. A row is a number; see :meth:`row`."""

    def __init__(
        self,
        pools: Sequence[SlotPool],
        bounds: Sequence[PipelineBounds],
        stages: Sequence[int] | None,
        *,
        below: float = np.inf,
    ) -> None:
        self.pools = pools
        self._bounds = bounds
        fastest = max(channel.bytes_per_second for pool in pools for channel in pool.links.channels)
        numbers, groups, sums, seconds = [], [], [], []
        self._counts: list[NDArray[np.int64]] = []
        self._start = []
        known: dict[object, NDArray[np.int64]] = {}
        total = 0
        for number, (pool, bound) in enumerate(zip(pools, bounds, strict=True)):
            available = tuple(len(kind.slots) for kind in pool.kinds)
            # The time of the model, nearly in proportion to the micro-batch, decides which kinds are similar.
            alike = (available, tuple(kind.device for kind in pool.kinds), tuple(kind.speed for kind in pool.kinds))
            if alike not in known:
                rows = compositions([kind.model_seconds for kind in pool.kinds], available, bound.blocks)
                known[alike] = rows if stages is None else rows[np.isin(rows.sum(axis=1), stages)]
            rows = known[alike]
            copies_by_kind = np.array(available) // np.maximum(rows, 1)
            max_copies = np.where(rows > 0, copies_by_kind, 1 << 40).min(axis=1)
            parts = [(1, rows[:0])]
            for pipelines in pipeline_counts(pool):
                fitting = np.flatnonzero(max_copies >= pipelines)
                if not len(fitting):
                    break
                parts.append((pipelines, rows[fitting]))
            counts = np.concatenate([rows for _, rows in parts])
            copies = np.concatenate([np.full(len(rows), count) for count, rows in parts])
            gradients = min(float(kind.costs.gradient_bytes.sum()) for kind in pool.kinds)
            lengths: NDArray[np.int64] = counts.sum(axis=1)
            sums.append(2 * (copies - 1) / copies * gradients / lengths / fastest)
            micro_batches: NDArray[np.int64] = pool.total_micro_batches // copies
            work = micro_batches / np.maximum(counts @ (1.0 / bound.work_seconds), 1e-300) * (1 - 1e-8)
            seconds.append(np.where(enough_micro_batches(lengths, micro_batches), work + sums[-1], np.inf))
            self._counts.append(counts)
            self._start.append(total)
            total += len(counts)
            numbers.append(np.full(len(counts), number))
            groups.append(copies)
        self._pool_of, self._pipelines, self._sums = (np.concatenate(each) for each in (numbers, groups, sums))
        self._work = np.concatenate(seconds)  # lower bounds by work over speed, which are quick, ``[rows]``
        self.seconds = self._work.copy()
        """Lower bounds, ``[rows]``: those of work over speed, until better ones are needed."""
        self._left = self._work < below
        self._by_work = np.argsort(self._work, kind="stable")

    def row(self, row: int) -> tuple[SlotPool, tuple[int, ...], int]:
        """Pool, slots of a pipeline by kind, and number of pipelines."""
        number = int(self._pool_of[row])
        counts = self._counts[number][row - self._start[number]]
        return self.pools[number], tuple(counts.tolist()), int(self._pipelines[row])

    def holds(self, tensor_parallel: int) -> bool:
        """True if devices can hold the model with this degree, by the lower bounds."""
        return any(
            np.isfinite(self._bound(np.arange(len(counts)) + start)).any()
            for pool, counts, start in zip(self.pools, self._counts, self._start, strict=True)
            if pool.tensor_parallel == tensor_parallel and len(counts)
        )

    def of_kinds(self, allowed: frozenset[str]) -> NDArray[np.int64]:
        """The best rows that use only devices of these kinds, see :meth:`_best`."""
        usable = np.zeros(len(self.seconds), dtype=bool)
        for number, pool in enumerate(self.pools):
            others = [place for place, kind in enumerate(pool.kinds) if kind.device not in allowed]
            usable[self._part(number)] = (self._counts[number][:, others] == 0).all(axis=1)
        return self._best(usable)

    def of_size(self, devices: int) -> NDArray[np.int64]:
        whole = np.zeros(len(self.seconds), dtype=bool)
        for number, pool in enumerate(self.pools):
            part = self._part(number)
            used = self._counts[number].sum(axis=1) * pool.tensor_parallel * self._pipelines[part]
            whole[part] = used == devices
        return self._best(whole)

    def _part(self, number: int) -> slice:
        return slice(self._start[number], self._start[number] + len(self._counts[number]))

    def _best(self, allowed: NDArray[np.bool_]) -> NDArray[np.int64]:
        """At most :data:`MAX_ROWS` of the allowed rows, in the order of their bounds."""
        rows = self._by_work[allowed[self._by_work]]
        number, stop = 0, 256 * MAX_ROWS
        while True:
            self._improve(rows[number:stop])
            number, stop = min(stop, len(rows)), 2 * stop
            best = np.sort(rows[:number])
            best = best[np.argsort(self.seconds[best], kind="stable")][:MAX_ROWS]
            # Better bounds are never lower.
            if number == len(rows) or self.seconds[best[-1]] < self._work[rows[number]]:
                return best

    def _improve(self, rows: NDArray[np.int64]) -> None:
        rows = rows[self._left[rows]]
        self._left[rows] = False
        pools = self._pool_of[rows]
        for number in np.unique(pools).tolist():
            part = rows[pools == number]
            self.seconds[part] = self._bound(part) + self._sums[part]

    def _bound(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Lower bounds on the seconds of pipelines, of rows of one pool."""
        number = int(self._pool_of[rows[0]])
        micro_batches = self.pools[number].total_micro_batches // self._pipelines[rows]
        return self._bounds[number].seconds(self._counts[number][rows - self._start[number]], micro_batches)


def some_numbers(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … pipelines: with more numbers, good ones of models that fit tightly are not looked at."""
    powers = {factor << power for factor in (1, 3) for power in range(most.bit_length())}
    return sorted(number for number in powers if number <= most)


def pipeline_counts(pool: SlotPool) -> list[int]:
    """Possible numbers of pipelines with equally many micro-batches, ascending."""
    return [number for number in divisors(pool.total_micro_batches) if pool.allows(number)]


def shapes(
    pools: Sequence[SlotPool], bounds: Sequence[PipelineBounds], stages: Sequence[int] | None
) -> list[tuple[float, int, int, int]]:
    """Shapes of equal pipelines whose slots may be of any kinds, in the order of their lower bounds: seconds, number of
    the pool, of pipelines, and of stages."""
    found = []
    for number, (pool, bound) in enumerate(zip(pools, bounds, strict=True)):
        power = np.repeat(1.0 / bound.work_seconds, [len(kind.slots) for kind in pool.kinds])
        # Power of the fastest slots, by their number.
        power = np.cumsum(np.sort(power)[::-1])
        total = pool.total_micro_batches
        for pipelines in pipeline_counts(pool):
            for length in range(1, min(len(power) // pipelines, bound.blocks) + 1):
                allowed = stages is None or length in stages
                if allowed and enough_micro_batches(length, total // pipelines):
                    seconds = float(total / power[pipelines * length - 1])
                    found.append((seconds, number, pipelines, length))
    return sorted(found)


# Starting rows -------------------------------------------------------------------------------------------------------


def starting_rows(topology: Topology, pool: SlotPool, pipelines: int, stages: int) -> Iterator[Rows]:
    """Slots of each pipeline in the order of the stages, ``[pipelines][stages]``.

    Slots of all nodes, and of nodes with faster networks only, are sorted by speed, memory or nearness, and given out
    pipeline by pipeline or stage by stage, in this order and the opposite one within a pipeline.
    """
    number = pipelines * stages
    nodes = topology.nodes
    node_of = {(kind, slot): topology.devices[pool.kinds[kind].slots[slot][0]].node for kind, slot in pool.places}
    network = {node: max((nic.bytes_per_second for nic in nodes[node].nics), default=0.0) for node in node_of.values()}

    def work(place: Place) -> float:
        return pool.kinds[place[0]].model_seconds

    def in_groups(places: Sequence[Place], size: int) -> Iterator[list[Place]]:
        yield from _in_groups(places, size, work, lambda place: node_of[place])
        yield from _in_groups(places, size, work, lambda place: nodes[node_of[place]].nics)

    for least in sorted(set(network.values())):
        places = sorted(
            (place for place in node_of if network[node_of[place]] >= least),
            key=lambda place: (work(place), node_of[place]),
        )
        if len(places) < number:
            break
        by_memory = sorted(places, key=lambda place: -pool.kinds[place[0]].memory_bytes)
        sizes = Counter(node_of[place] for place in places)
        by_node = sorted(places, key=lambda place: (-sizes[node_of[place]], node_of[place]))
        for order in (places, by_memory, by_node, *in_groups(places, stages)):
            yield from _both_ways([order[first * stages : (first + 1) * stages] for first in range(pipelines)])
        for order in (places, by_memory, *in_groups(places, pipelines)):
            yield from _both_ways([order[first:number:pipelines] for first in range(pipelines)])


def _both_ways(rows: Sequence[Sequence[Place]]) -> Iterator[Rows]:
    yield tuple(tuple(row) for row in rows)
    yield tuple(tuple(row[::-1]) for row in rows)


def _in_groups(
    places: Sequence[Place], size: int, work: Callable[[Place], float], near: Callable[[Place], object]
) -> Iterator[list[Place]]:
    """Places in groups of ``size`` with equal ``near``, a node in a wide sense, and then those left over. First come
    the fastest groups, or the fastest group of each node, or all groups of the largest node."""
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


# Pipelines that differ -----------------------------------------------------------------------------------------------


def expected_seconds(pool: SlotPool, allowed: frozenset[str] | None = None) -> float:
    """Estimated seconds of the best plan on these kinds of devices, without its sums: as many pipelines as memory
    allows, idle only while they fill."""
    kinds = [(kind, len(kind.slots)) for kind in pool.kinds if allowed is None or kind.device in allowed]
    slots, total = sum(count for _, count in kinds), pool.total_micro_batches
    most = min(int(sum(count * kind.models_in_memory for kind, count in kinds)), total, slots)
    pipelines = most if pool.pipelines is None else pool.pipelines
    if not 1 <= pipelines <= most:
        return np.inf
    return (total + slots - pipelines) / sum(count / kind.model_seconds for kind, count in kinds)


def unequal_groups(
    pool: SlotPool, bounds: PipelineBounds, allowed: frozenset[str], stages: Sequence[int] | None, below: float
) -> list[Groups]:
    """Groups of slots of these kinds of devices that may run all micro-batches in less than ``below`` seconds."""
    available = np.array([len(kind.slots) if kind.device in allowed else 0 for kind in pool.kinds])
    dealt = _dealt(pool, bounds, available) if pool.slots <= SMALL else ()
    found = [*_of_one_device(pool, bounds, available), *dealt]
    total, blocks = pool.total_micro_batches, bounds.blocks
    return [
        list(each)
        for each in dict.fromkeys(tuple(sorted(each)) for each in found)
        if pool.allows(len(each))
        and all(1 <= sum(group) <= blocks and (stages is None or sum(group) in stages) for group in each)
        and bounds.may_run(Counter(map(named, each)), total, below)
    ]


def _dealt(pool: SlotPool, bounds: PipelineBounds, available: NDArray[np.int64]) -> Iterator[Groups]:
    """All slots given out, the strongest first, each to the weakest pipeline."""
    slots = np.repeat(np.arange(len(available)), available)[::-1].tolist()
    power = (1.0 / bounds.work_seconds).tolist()
    for number in range(1, min(len(slots), pool.total_micro_batches) + 1):
        groups = [[0] * len(available) for _ in range(number)]
        weakest = [(0.0, at) for at in range(number)]
        for kind in slots:
            reached, at = weakest[0]
            groups[at][kind] += 1
            heapq.heapreplace(weakest, (reached + power[kind], at))
        yield [tuple(group) for group in groups]


def _of_one_device(pool: SlotPool, bound: PipelineBounds, available: NDArray[np.int64]) -> Iterator[Groups]:
    """Pipelines of one device each, of like speeds: of each device as many as memory allows, a half of them, …"""
    total, number = pool.total_micro_batches, len(available)
    unit = np.eye(number, dtype=np.int64)
    slots: dict[str, list[int]] = {}
    for kind, count in enumerate(available.tolist()):
        slots.setdefault(pool.kinds[kind].device, []).extend([kind] * count)
    most: dict[str, int] = {}
    for device, kinds in slots.items():
        lengths = np.arange(1, min(len(kinds), bound.blocks) + 1)
        held = bound.fits(lengths[:, None] * unit[kinds[0]], np.full(len(lengths), total)) if kinds else lengths < 1
        most[device] = len(kinds) // int(lengths[held][0]) if held.any() else 0
    share = 1
    while max(most.values()) // share >= 1:
        groups: Groups = []
        for device, kinds in slots.items():
            pipelines = max(most[device] // share, 1) if most[device] else 0
            for part in np.array_split(np.array(kinds), pipelines) if pipelines else ():
                groups.append(tuple(np.bincount(part[: bound.blocks], minlength=number).tolist()))
        yield groups
        share *= 2
