"""The fastest contiguous split over all orders of the slots, by ``pipeline.evaluate`` and within the memory limits.

The search minimizes ``Σ t + (K − 1)·max t + max u``, where t is a stage's time per micro-batch and u its update time.
For limits ``t ≤ τ`` and ``u ≤ υ``, a dynamic program over stages, nodes of the graph of orders (``slot_orders.py``) and
numbers of placed blocks minimizes the sum. Branch and bound finds the best τ and υ: it divides the pairs (τ, υ) into
regions and takes the most promising first. The minimum sum at the largest τ and υ of a region, plus the terms of its
smallest τ and υ, is a lower bound for all splits in the region.

`[Note: window minima]`  A stage with blocks ``[a, b)`` takes ``t(a, b) = E[b] − A[a]``. ``E[b]`` is the cumulative time
of the first b blocks plus the hop and the schedule's time at the cut at b, and ``A[a]`` is the cumulative time of the
first a blocks minus those at the cut at a. Let ``g[a]`` be the minimum sum of the stages before a. Then the minimum
sum with a stage that ends at b is ``E[b] + min (g[a] − A[a])`` over the starts a that the limits allow. If A never
decreases (for each block, the hop behind it is longer than the hop before it by at most the time of the block), these
starts are a window ``[low(b), b − 1]``, and the minimum over it comes from a table of minima over runs of 1, 2, 4, …
starts. Otherwise all pairs (a, b) are tried.

`[Note: slack]`  Under tight limits, a slot of each kind can hold a certain number of blocks at most. If all slots can
hold ``slack`` blocks more than the model has, the table of a node needs only ``slack + 1`` entries: at least as many
blocks are placed as the remaining slots cannot hold, and at most as many as the slots before can hold. With loose
limits all ``blocks − stages + 1`` numbers are possible.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .pipeline import Pipeline, Split, earliest_starts, evaluate
from .slot_orders import (
    NO_HOP,
    Depth,
    Orders,
    TooManyOrders,
    all_orders,
    by_speed,
    exchanged,
    like_kinds,
    near_each_other,
    one_order,
)

__all__ = ["best_split", "exact"]

MAX_STATES = 20_000
"""States up to which all orders are searched. A state is a possible set of used slots, where interchangeable slots
count as equal: 64 slots of 3 kinds have 12,000 states, and 16 slots in 4 different nodes 600."""

ROUNDING = 1e-12
"""Relative rounding error that is allowed when a time is compared with a limit."""

TOLERANCE = 1e-11
"""Times with a smaller relative difference are considered equal."""

STEPS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.8, 3.0, 10.0, np.inf)
"""Factors on the lower bound of the longest stage; they are tried in this order until a split exists."""

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int_]


class _TableRange(NamedTuple):
    """The numbers of placed blocks in the table of a node: ``base(left) + [0, width)``."""

    blocks: int
    step: _Ints
    """Increase of the base after a slot of each kind, ``[kinds]``."""
    shift: int
    """Amount by which all bases are lowered: 0 under tight limits, ``blocks − stages`` under loose limits."""
    width: int

    def base(self, left: _Ints) -> _Ints:
        """Smallest number of placed blocks, if ``left`` slots of each kind remain, ``[..., kinds]``."""
        return self.blocks - self.shift - left @ self.step


class _DynamicProgram:
    """The dynamic program for one pipeline and graph of orders."""

    def __init__(self, pipeline: Pipeline, orders: Orders) -> None:
        self.pipeline = pipeline
        self.orders = orders
        self.stages = len(orders.depths)
        self.blocks = pipeline.blocks
        self.width = self.blocks - self.stages + 1
        totals = [form.costs.cumulative for form in orders.kinds]
        self.work = np.array([total.forward_seconds + total.backward_seconds for total in totals])
        self.update = np.array([total.update_seconds for total in totals])
        # All (kind, incoming hop, outgoing hop) that occur, and the one of each exit at each depth.
        triples = [
            np.stack([depth.kinds[depth.exits], depth.hops_in[depth.exits], depth.hops_out], axis=1)
            for depth in orders.depths
        ]
        self.triples, which = np.unique(np.concatenate(triples), axis=0, return_inverse=True)
        self.exit_triples = np.split(which.reshape(-1), np.cumsum([len(part) for part in triples])[:-1])
        kinds, hops_in, hops_out = self.triples.T
        self.kinds = kinds
        schedule = np.array([form.costs.schedule_seconds for form in orders.kinds])[kinds]
        self.ends = self.work[kinds] + orders.hop_seconds[hops_out] + (schedule * (hops_out != NO_HOP))[:, None]
        self.begins = self.work[kinds] - orders.hop_seconds[hops_in] - (schedule * (hops_in != NO_HOP))[:, None]
        # Only the first stage, which has no incoming hop, can start at block 0.
        self.begins[hops_in != NO_HOP, 0] = -np.inf
        self.windows = bool((np.diff(self.begins[:, :-1], axis=1) >= 0).all())
        self.earliest_by_memory = [self._earliest_by_memory(stage) for stage in range(self.stages)]
        self.again: list[_Floats] | None = None
        """By stage: time that recomputation adds to blocks ``[a, b)``, ``[kinds, b, a]``; None if none may."""
        self.forward = np.array([total.forward_seconds for total in totals])
        if any(form.recomputed is not None for form in orders.kinds):
            self.windows = False
            self.again = [self._again(stage) for stage in range(self.stages)]

    def _earliest_by_memory(self, stage: int) -> _Ints:
        """Earliest start of this stage by memory, for each triple and each end, ``[triples, blocks + 1]``."""
        in_flight = min(self.pipeline.micro_batches, self.stages - stage)
        by_kind = [earliest_starts(form, in_flight) for form in self.orders.kinds]
        return np.asarray(np.array(by_kind)[self.kinds])

    def _again(self, stage: int) -> _Floats:
        in_flight = min(self.pipeline.micro_batches, self.stages - stage)
        start = np.arange(self.blocks + 1)
        added = []
        for form, forward in zip(self.orders.kinds, self.forward, strict=True):
            fits = start >= earliest_starts(form._replace(recomputed=None), in_flight)[:, None]
            added.append(np.where(fits, 0.0, forward[:, None] - forward))
        return np.array(added)

    def times(self, min_seconds: float, max_seconds: float) -> _Floats:
        """Possible times of a stage between two values, as from :func:`_distinct`."""
        some = np.triu_indices(self.blocks + 1, 1)
        rows = [(ends - begins[:, None])[some] for begins, ends in zip(self.begins, self.ends, strict=True)]
        if self.again is not None:
            again = [(forward - forward[:, None])[some] for forward in self.forward]
            rows += [row + again[kind] for row, kind in zip(rows, self.kinds, strict=True)]
        return _distinct(np.concatenate(rows), min_seconds, max_seconds)

    def updates(self, min_seconds: float, max_seconds: float) -> _Floats:
        """Possible update times of a stage between two values, as :meth:`times`."""
        rows = [(update - update[:, None])[np.triu_indices(len(update), 1)] for update in self.update]
        return _distinct(np.concatenate(rows), min_seconds, max_seconds)

    def solve(self, longest: float, longest_update: float) -> tuple[float, Split] | None:
        """Minimum sum of stage times under both limits, and its split; None if there is no split. See Note: slack."""
        earliest = self._earliest(longest, longest_update)
        table_range = self._table_range(earliest)
        if table_range is None:
            return None
        min_sums = np.full((len(self.orders.depths[0].kinds), table_range.width), np.inf)
        min_sums[:, -table_range.base(self.orders.depths[0].left[0])] = 0.0
        tables = []
        for stage, depth in enumerate(self.orders.depths):
            tables.append(min_sums)
            extended = self._extended(stage, depth, min_sums, earliest, longest, table_range)
            min_sums = np.minimum.reduceat(extended[depth.edges], depth.starts, axis=0)
        total = float(min_sums[0, table_range.shift])
        if total == np.inf:
            return None
        return total, self._backtrack(tables, earliest, longest, table_range)

    def _earliest(self, longest: float, longest_update: float) -> _Ints:
        """Earliest start by time and update, for each triple and each end, ``[triples, blocks + 1]``."""
        earliest = np.zeros(self.ends.shape, dtype=int)
        if self.windows and longest < np.inf:
            for row, (begins, ends) in enumerate(zip(self.begins, self.ends, strict=True)):
                earliest[row] = np.searchsorted(begins[:-1], ends - longest * (1 + ROUNDING), side="left")
        if longest_update < np.inf:
            by_update = [
                np.searchsorted(update, update - longest_update * (1 + ROUNDING), side="left") for update in self.update
            ]
            earliest = np.maximum(earliest, np.array(by_update)[self.kinds])
        return earliest

    def _table_range(self, earliest: _Ints) -> _TableRange | None:
        """Numbers of placed blocks that have to be considered; None if the slots cannot hold all blocks."""
        room = self.width - 1
        max_blocks = np.arange(self.blocks + 1) - np.maximum(earliest, self.earliest_by_memory[-1])
        capacity = np.zeros(len(self.work), dtype=int)
        np.maximum.at(capacity, self.kinds, max_blocks.max(axis=1))
        capacity = np.minimum(capacity, room + 1)
        slack = int(self.orders.depths[0].left[0] @ capacity) - self.blocks
        if slack < 0:
            return None
        if slack < room:
            return _TableRange(self.blocks, capacity, 0, slack + 1)
        return _TableRange(self.blocks, np.ones_like(capacity), room, room + 1)

    def _extended(
        self, stage: int, depth: Depth, min_sums: _Floats, earliest: _Ints, longest: float, table_range: _TableRange
    ) -> _Floats:
        """Minimum sum over all starts of ``stage`` by exit and end in the table range behind it, ``[exits, width]``."""
        triples = self.exit_triples[stage]
        node_triples = np.empty(len(depth.kinds), dtype=int)
        node_triples[depth.exits] = triples
        place = np.arange(table_range.width)
        base = table_range.base(depth.left)
        starts = np.clip(base[:, None] + place, 0, self.blocks)
        values = min_sums - self.begins[node_triples[:, None], starts]
        base = base[depth.exits]
        stops = (base + table_range.step[depth.kinds[depth.exits]])[:, None] + place
        possible = (stops > stage) & (stops <= self.blocks - (self.stages - stage - 1))
        stops = np.clip(stops, 0, self.blocks)
        pairs = triples[:, None] * (self.blocks + 1) + stops
        by_memory = self.earliest_by_memory[stage].reshape(-1)[pairs]
        first = np.maximum(np.maximum(earliest.reshape(-1)[pairs], by_memory) - base[:, None], 0)
        ends = np.where(possible, self.ends.reshape(-1)[pairs], np.inf)
        last = np.minimum(stops - 1 - base[:, None], table_range.width - 1)
        if not self.windows:
            begins = self.begins[triples[:, None], starts[depth.exits]]
            again = None
            if self.again is not None:
                kinds = self.kinds[triples][:, None, None]
                again = self.again[stage][kinds, stops[:, None, :], starts[depth.exits][:, :, None]]
            return self._all_pairs(values[depth.exits], begins, ends, first, last, longest, again)
        length = last - first + 1
        ends[length <= 0] = np.inf
        level = np.frexp(np.maximum(length, 1))[1] - 1
        minima = np.empty((int(level.max()) + 1, *values.shape))
        minima[0] = values
        for power in range(1, len(minima)):
            run = 1 << (power - 1)
            np.minimum(minima[power - 1, :, :-run], minima[power - 1, :, run:], out=minima[power, :, :-run])
            minima[power, :, -run:] = minima[power - 1, :, -run:]
        flat = minima.reshape(-1)
        offset = level * values.size + (depth.exits * table_range.width)[:, None]
        left = offset + np.minimum(first, table_range.width - 1)
        right = offset + np.maximum(last - (1 << level) + 1, 0)
        return np.asarray(np.minimum(flat[left], flat[right]) + ends)

    def _all_pairs(
        self,
        values: _Floats,
        begins: _Floats,
        ends: _Floats,
        first: _Ints,
        last: _Ints,
        longest: float,
        again: _Floats | None,
    ) -> _Floats:
        """:meth:`_extended` if allowed starts may be no window; ``again`` is ``[exits, starts, ends]``."""
        place = np.arange(values.shape[1])[:, None]
        extended = np.empty_like(values)
        for row in range(len(values)):
            added = 0.0 if again is None else again[row]
            allowed = (place >= first[row]) & (place <= last[row])
            allowed &= ends[row] - begins[row][:, None] + added <= longest * (1 + ROUNDING)
            extended[row] = np.where(allowed, values[row][:, None] + added, np.inf).min(axis=0)
        return extended + ends

    def _backtrack(self, tables: Sequence[_Floats], earliest: _Ints, longest: float, table_range: _TableRange) -> Split:
        """The split with the minimum sum, found from its last stage backwards."""
        bounds = [self.blocks]
        path: list[int] = []
        target, end = 0, self.blocks
        for stage in reversed(range(self.stages)):
            depth = self.orders.depths[stage]
            stop = depth.starts[target + 1] if target + 1 < len(depth.starts) else len(depth.edges)
            edges = depth.edges[depth.starts[target] : stop]
            triples = self.exit_triples[stage][edges]
            nodes = depth.exits[edges]
            starts = table_range.base(depth.left[nodes])[:, None] + np.arange(table_range.width)
            inside = (starts >= stage) & (starts < end)
            starts = np.clip(starts, 0, self.blocks)
            times = self.ends[triples, end][:, None] - self.begins[triples[:, None], starts]
            if self.again is not None:
                times = times + self.again[stage][self.kinds[triples][:, None], end, starts]
            first = np.maximum(earliest[triples, end], self.earliest_by_memory[stage][triples, end])[:, None]
            inside &= (starts >= first) & (times <= longest * (1 + ROUNDING))
            sums = np.where(inside, tables[stage][nodes] + times, np.inf)
            which, place = (int(index) for index in np.unravel_index(np.argmin(sums), sums.shape))
            target = int(nodes[which])
            end = int(starts[which, place])
            path.append(target)
            bounds.append(end)
        return Split(self.orders.slots(path[::-1]), tuple(bounds[::-1]))


def _distinct(values: _Floats, min_seconds: float, max_seconds: float) -> _Floats:
    """The values between two bounds, ascending; of values that are equal within ``TOLERANCE``, only the largest."""
    kept = np.sort(values[(values >= min_seconds * (1 - TOLERANCE)) & (values <= max_seconds * (1 + TOLERANCE))])
    return kept[np.append(kept[1:] > kept[:-1] * (1 + TOLERANCE), True)] if len(kept) else kept


def exact(
    pipeline: Pipeline, order: Sequence[int] | None, known: Split | None = None, max_states: int = MAX_STATES
) -> Split | None:
    """The split with the smallest ``evaluate(pipeline, split).seconds``; None if none fits in memory. A ``known`` split
    that fits saves the time to find a first one. If there are too many different slots (``max_states``), only several
    good orders are searched: the result may not be the best, or be None although another order fits."""
    if order is not None:
        return best_split(pipeline, one_order(pipeline, order))
    try:
        return best_split(pipeline, all_orders(pipeline, max_states), known)
    except TooManyOrders:
        return _best_of_several_orders(pipeline)


def _best_of_several_orders(pipeline: Pipeline) -> Split | None:
    """The best split of several orders: by speed, and the best order of kinds, with slots chosen for short hops."""
    orders = list(by_speed(pipeline))
    alike = like_kinds(pipeline)
    with contextlib.suppress(TooManyOrders):
        if (found := best_split(alike, all_orders(alike, MAX_STATES))) is not None:
            orders.append(near_each_other(pipeline, found.order))
    best: tuple[float, Split] | None = None
    for order in dict.fromkeys(orders):
        if (found := best_split(pipeline, one_order(pipeline, order))) is None:
            continue
        if (nearer := exchanged(pipeline, found).order) != found.order:
            found = best_split(pipeline, one_order(pipeline, nearer)) or found
        seconds = evaluate(pipeline, found).seconds
        if best is None or seconds < best[0]:
            best = seconds, found
    return None if best is None else best[1]


def best_split(pipeline: Pipeline, orders: Orders, known: Split | None = None) -> Split | None:
    """Split with the least ``evaluate(...).seconds`` over ``orders``, with ``known`` a first one; None if none fits."""
    search = _BranchAndBound(pipeline, _DynamicProgram(pipeline, orders), known)
    search.run()
    return search.best


class _Region(NamedTuple):
    """Splits whose longest stage and update are in a range of the possible times: first and last index, included."""

    first: int
    last: int
    first_update: int
    last_update: int
    min_sum: float
    """Lower bound of the sum of stage times."""


class _Solution(NamedTuple):
    """Split with the smallest sum of stage times under two limits; None if there is no split."""

    longest: float
    longest_update: float
    split: Split | None = None
    min_sum: float = np.inf
    time: float = np.inf
    """Longest stage of the split, reduced by ``TOLERANCE``, as is its longest update."""
    update: float = np.inf


class _BranchAndBound:
    """Best-first branch and bound over regions of (τ, υ); the first split comes from raising τ from its bound."""

    def __init__(self, pipeline: Pipeline, program: _DynamicProgram, known: Split | None) -> None:
        self.pipeline = pipeline
        self.program = program
        self.weight = pipeline.micro_batches - 1
        self.best = known
        self.best_seconds = evaluate(pipeline, known).seconds if known is not None else np.inf
        self.relaxation = _Relaxation(program.orders)
        self.times = np.array([0.0])
        self.updates = np.array([0.0])
        self.regions: list[tuple[float, int, _Region]] = []
        self.number = itertools.count()
        self.known: list[_Solution] = []

    def run(self) -> None:
        """Search; ``best`` remains None if no split fits in memory."""
        above = below = self.relaxation.longest
        for step in STEPS if self.best is None else ():
            below = self.relaxation.longest * step
            if self._solve(below, np.inf) is not None:
                break
            above = below
        if self.best is None:
            return
        # Time that a better split can spend on its longest stage and update, if its sum is the smallest possible.
        rest = self.best_seconds - self.relaxation.min_sum(np.inf)
        self.updates = self.program.updates(self.relaxation.longest_update, rest - self.weight * above)
        if self.weight:
            self.times = self.program.times(above, (rest - self.relaxation.longest_update) / self.weight)
        else:
            self.times = np.array([self.best_seconds])
        everything = _Region(0, len(self.times) - 1, 0, len(self.updates) - 1, 0.0)
        if everything.last >= 0 and everything.last_update >= 0:
            self._examine(everything)
        while self.regions:
            bound, _, region = heapq.heappop(self.regions)
            if bound >= self.best_seconds * (1 - ROUNDING):
                break
            self._branch(region)

    def _solve(self, longest: float, longest_update: float) -> _Solution | None:
        """Solve with these limits, or reuse the result of looser limits if it also holds for these."""
        for known in self.known:
            if longest <= known.longest and longest_update <= known.longest_update:
                if known.split is None:
                    return None
                if known.time <= longest and known.update <= longest_update:
                    return known
        found = self.program.solve(longest, longest_update)
        if found is None:
            self.known.append(_Solution(longest, longest_update))
            return None
        min_sum, split = found
        cost = evaluate(self.pipeline, split)
        if cost.seconds < self.best_seconds:
            self.best, self.best_seconds = split, cost.seconds
        # Not above the limits, which rounding can exceed if times differ by many orders of magnitude: a region must
        # become smaller with every solution.
        time = min(max(cost.stage_seconds) * (1 - TOLERANCE), longest)
        update = min(max(cost.update_seconds) * (1 - TOLERANCE), longest_update)
        self.known.append(_Solution(longest, longest_update, split, min_sum, time, update))
        return self.known[-1]

    def _branch(self, region: _Region) -> None:
        """Halve a region along the side that changes the iteration time more, and examine the lower half."""
        spare = self.best_seconds - self._lower_bound(region)
        if self.weight:
            max_time = self.times[region.first] + spare / self.weight
            region = region._replace(
                last=min(region.last, int(np.searchsorted(self.times, max_time, side="right")) - 1)
            )
        # Update times that are too long stay in the region, so that the same limits occur again and are known.
        max_update = min(self.updates[region.first_update] + spare, self.updates[region.last_update])
        by_update = max_update - self.updates[region.first_update]
        by_time = self.weight * (self.times[region.last] - self.times[region.first])
        if region.last > region.first and (by_time >= by_update or region.last_update == len(self.updates) - 1):
            middle = (region.first + region.last) // 2
            self._push(region._replace(first=middle + 1))
            region = region._replace(last=middle)
        elif region.last_update > region.first_update and region.last_update < len(self.updates) - 1:
            middle = (region.first_update + int(np.searchsorted(self.updates, max_update, side="right")) - 1) // 2
            self._push(region._replace(first_update=middle + 1))
            region = region._replace(last_update=middle)
        self._examine(region)

    def _examine(self, region: _Region) -> None:
        """Solve with the upper limits of a region, and queue the parts of it that can contain a better split."""
        found = self._solve(self.times[region.last], self.updates[region.last_update])
        if found is None:
            return
        # A better split has a shorter longest stage or a shorter longest update.
        time = int(np.searchsorted(self.times, found.time, side="left"))
        update = int(np.searchsorted(self.updates, found.update, side="left"))
        below = min(region.last_update, update - 1)
        self._push(region._replace(last=min(region.last, time - 1), min_sum=found.min_sum))
        self._push(region._replace(first=max(region.first, time), last_update=below, min_sum=found.min_sum))

    def _push(self, region: _Region) -> None:
        """Queue a region, unless it is empty or cannot contain a better split."""
        if region.first > region.last or region.first_update > region.last_update:
            return
        region = region._replace(min_sum=max(region.min_sum, self.relaxation.min_sum(self.times[region.last])))
        bound = self._lower_bound(region)
        if bound < self.best_seconds * (1 - ROUNDING):
            heapq.heappush(self.regions, (bound, next(self.number), region))

    def _lower_bound(self, region: _Region) -> float:
        return float(region.min_sum + self.weight * self.times[region.first] + self.updates[region.first_update])


class _Relaxation:
    """Lower bounds for all splits and orders, from a problem in which work can be divided into any parts. The work of a
    block is its time on the fastest slot for it; a slot of kind i takes at least ``rate[i]`` times as long."""

    def __init__(self, orders: Orders) -> None:
        left = orders.depths[0].left[0]
        work = np.array([form.costs.forward_seconds + form.costs.backward_seconds for form in orders.kinds])
        update = np.array([form.costs.update_seconds for form in orders.kinds])
        self.count = left
        self.work, self.rate, self.smallest, lowest = _relaxed_bounds(work, left)
        self.hop = float(orders.hop_seconds[_hops_used(orders), 1:-1].min()) if len(orders.depths) > 1 else 0.0
        self.longest = lowest + self.hop
        self.longest_update = _relaxed_bounds(update, left)[3]
        self.hops = 2 * (len(orders.depths) - 1) * self.hop

    def min_sum(self, longest: float) -> float:
        """Lower bound of the sum of stage times up to ``longest``: the fastest slots are filled first."""
        seconds, left = 0.0, self.work - float(self.count.sum()) * self.smallest
        for kind in np.argsort(self.rate):
            capacity = max((longest - self.hop) / self.rate[kind] - self.smallest, 0.0) * self.count[kind]
            taken = min(capacity, max(left, 0.0))
            left -= taken
            seconds += self.rate[kind] * (self.count[kind] * self.smallest + taken)
        return float(seconds + self.hops) * (1 - TOLERANCE)


def _relaxed_bounds(seconds: _Floats, count: _Ints) -> tuple[float, _Floats, float, float]:
    """Work of all blocks, rate of each kind, work of the smallest block, and lower bound of the longest stage, from the
    times ``[kinds, blocks]`` and the number of slots of each kind."""
    best = seconds.min(axis=0)
    rate = np.ones(len(seconds))
    positive = best > 0
    if positive.any():
        rate = (seconds[:, positive] / best[positive]).min(axis=1)
    used = count > 0
    longest = max(best.sum() / (count / rate).sum(), best.max(), seconds.min(axis=1)[used].max())
    return float(best.sum()), rate, float(best.min()), float(longest)


def _hops_used(orders: Orders) -> list[int]:
    """Numbers of the hops that occur between stages, ascending."""
    return sorted({int(hop) for depth in orders.depths[:-1] for hop in depth.hops_out})
