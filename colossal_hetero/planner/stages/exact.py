"""The best contiguous split over all orders of the slots, under ``pipeline.evaluate`` and the memory limits.

Wanted is the least ``Σ t + (K − 1)·max t + max u`` (t a stage's time per micro-batch, u its update). If the longest
stage and the longest update are bounded, ``t ≤ τ`` and ``u ≤ υ``, only the sum is left, and a dynamic program finds
its least: over stages, nodes of the graph of orders (``slot_order``) and blocks placed. A best-first search over boxes
of (τ, υ) does the rest. The least sum within a box's upper bounds, put together with the box's lower bounds, is a bound
for all splits in the box.

`[Note: window minima]`  A stage's time is separable: ``t(a, b) = E[b] − A[a]`` with ``E[b]`` the cumulative time up to
block b plus the hop behind b, and ``A[a]`` the same up to a less the hop before it. So the least sum over all starts a
of the stage that ends at b is ``E[b] + min (g[a] − A[a])`` over the a that the limits allow. These are a window
``[low(b), b − 1]`` wherever A does not fall, that is, where no block is quicker than the hop grows over it; its
minimum comes from a table of minima over runs of 1, 2, 4, … starts. Elsewhere all pairs are tried.

`[Note: slack]`  Under tight bounds a slot of a kind holds at most so many blocks wherever it stands. If all slots
together hold ``slack`` more than the model has, a node needs a table of ``slack + 1`` places only: from what must be
placed, as the slots that are left cannot hold more, to what can be, as those before cannot. With loose bounds all
``blocks − stages + 1`` places are possible.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .many_orders import by_speed, exchanged, like_kinds, near_each_other
from .pipeline import Pipeline, Split, evaluate
from .slot_orders import Depth, Orders, TooManyOrders, all_orders, one_order

__all__ = ["best_split", "exact"]

MAX_STATES = 20_000
"""Up to so many ways to have used some of the slots, like ones not told apart, all orders are searched: 64 slots of 3
kinds are 12,000, 16 slots in 4 unlike nodes 600."""

ROUNDING = 1e-12

SAME = 1e-11
"""Times that differ by less, relatively, are the same but for rounding."""

STEPS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.8, 3.0, 10.0, np.inf)
"""By which the lower bound of the longest stage is raised until there is a split."""

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int_]


class _Frame(NamedTuple):
    """Which numbers of placed blocks the table of a node has: ``base(left) + [0, width)``."""

    blocks: int
    step: _Ints
    """How far the base goes on behind a slot of each kind."""
    shift: int
    width: int

    def base(self, left: _Ints) -> _Ints:
        """By slots of each kind that are left ``[..., kinds]``."""
        return self.blocks - self.shift - left @ self.step


class _Table:
    """The dynamic program for one pipeline and graph of orders."""

    def __init__(self, pipeline: Pipeline, orders: Orders) -> None:
        self.pipeline = pipeline
        self.orders = orders
        self.stages = len(orders.depths)
        self.blocks = pipeline.blocks
        self.width = self.blocks - self.stages + 1
        totals = [costs.cumulative for costs, _ in orders.kinds]
        self.work = np.array([total.forward_seconds + total.backward_seconds for total in totals])
        self.update = np.array([total.update_seconds for total in totals])
        # Which (kind, hop in, hop out) occur, and which of them each exit of each depth is.
        triples = [
            np.stack([depth.kinds[depth.exits], depth.hops_in[depth.exits], depth.hops_out], axis=1)
            for depth in orders.depths
        ]
        self.triples, which = np.unique(np.concatenate(triples), axis=0, return_inverse=True)
        self.exit_triples = np.split(which.reshape(-1), np.cumsum([len(part) for part in triples])[:-1])
        kinds, hops_in, hops_out = self.triples.T
        self.kinds = kinds
        self.ends = self.work[kinds] + orders.hop_seconds[hops_out]
        self.begins = self.work[kinds] - orders.hop_seconds[hops_in]
        # Only the first stage starts at block 0, without a hop; for others the place is not used.
        self.begins[hops_in > 0, 0] = -np.inf
        self.windows = bool((np.diff(self.begins[:, :-1], axis=1) >= 0).all())
        self.memory_low = [self._memory_low(stage) for stage in range(self.stages)]

    def _memory_low(self, stage: int) -> _Ints:
        """Earliest start of this stage by memory, for each triple and each end: ``[triples, blocks + 1]``."""
        in_flight = min(self.pipeline.micro_batches, self.stages - stage)
        low = []
        for costs, memory in self.orders.kinds:
            total = costs.cumulative.state_bytes + in_flight * costs.cumulative.activation_bytes
            low.append(np.searchsorted(total, total - memory, side="left"))
        return np.asarray(np.array(low)[self.kinds])

    def times(self, least: float, most: float) -> _Floats:
        """What a stage can take, from ``least`` to ``most``, ascending; of those equal but for rounding, the most."""
        rows = [
            (ends - begins[:, None])[np.triu_indices(len(ends), 1)]
            for begins, ends in zip(self.begins, self.ends, strict=True)
        ]
        return _different(np.concatenate(rows), least, most)

    def updates(self, least: float, most: float) -> _Floats:
        """Same of the updates."""
        rows = [(update - update[:, None])[np.triu_indices(len(update), 1)] for update in self.update]
        return _different(np.concatenate(rows), least, most)

    def solve(self, longest: float, longest_update: float) -> tuple[float, Split] | None:
        """The least sum of times under both bounds, and its split; None if there is no split.

        See Note: slack.
        """
        low = self._low(longest, longest_update)
        frame = self._frame(low)
        if frame is None:
            return None
        least = np.full((len(self.orders.depths[0].kinds), frame.width), np.inf)
        least[:, -frame.base(self.orders.depths[0].left[0])] = 0.0
        tables = []
        for stage, depth in enumerate(self.orders.depths):
            tables.append(least)
            through = self._through(stage, depth, least, low, longest, frame)
            least = np.minimum.reduceat(through[depth.edges], depth.starts, axis=0)
        total = float(least[0, frame.shift])
        if total == np.inf:
            return None
        return total, self._trace(tables, low, longest, frame)

    def _low(self, longest: float, longest_update: float) -> _Ints:
        """Earliest start by time and update, for each triple and each end ``[triples, blocks + 1]``."""
        low = np.zeros(self.ends.shape, dtype=int)
        if self.windows and longest < np.inf:
            for row, (begins, ends) in enumerate(zip(self.begins, self.ends, strict=True)):
                low[row] = np.searchsorted(begins[:-1], ends - longest * (1 + ROUNDING), side="left")
        if longest_update < np.inf:
            by_update = [
                np.searchsorted(update, update - longest_update * (1 + ROUNDING), side="left") for update in self.update
            ]
            low = np.maximum(low, np.array(by_update)[self.kinds])
        return low

    def _frame(self, low: _Ints) -> _Frame | None:
        """Which numbers of placed blocks are looked at; None if no more than some blocks can be placed."""
        room = self.width - 1
        most = np.arange(self.blocks + 1) - np.maximum(low, self.memory_low[-1])
        capacity = np.zeros(len(self.work), dtype=int)
        np.maximum.at(capacity, self.kinds, most.max(axis=1))
        capacity = np.minimum(capacity, room + 1)
        slack = int(self.orders.depths[0].left[0] @ capacity) - self.blocks
        if slack < 0:
            return None
        if slack < room:
            return _Frame(self.blocks, capacity, 0, slack + 1)
        return _Frame(self.blocks, np.ones_like(capacity), room, room + 1)

    def _through(self, stage: int, depth: Depth, least: _Floats, low: _Ints, longest: float, frame: _Frame) -> _Floats:
        """Least sum over all starts by exit and end of ``stage`` ``[exits, width]``, places as in the frame."""
        triples = self.exit_triples[stage]
        node_triples = np.empty(len(depth.kinds), dtype=int)
        node_triples[depth.exits] = triples
        place = np.arange(frame.width)
        base = frame.base(depth.left)
        starts = np.clip(base[:, None] + place, 0, self.blocks)
        values = least - self.begins[node_triples[:, None], starts]
        base = base[depth.exits]
        stops = (base + frame.step[depth.kinds[depth.exits]])[:, None] + place
        possible = (stops > stage) & (stops <= self.blocks - (self.stages - stage - 1))
        stops = np.clip(stops, 0, self.blocks)
        pairs = triples[:, None] * (self.blocks + 1) + stops
        first = np.maximum(low.reshape(-1)[pairs], self.memory_low[stage].reshape(-1)[pairs]) - base[:, None]
        first = np.maximum(first, 0)
        ends = np.where(possible, self.ends.reshape(-1)[pairs], np.inf)
        last = np.minimum(stops - 1 - base[:, None], frame.width - 1)
        if not self.windows:
            return self._all_pairs(
                values[depth.exits], self.begins[triples[:, None], starts[depth.exits]], ends, first, last, longest
            )
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
        offset = level * values.size + (depth.exits * frame.width)[:, None]
        left = offset + np.minimum(first, frame.width - 1)
        right = offset + np.maximum(last - (1 << level) + 1, 0)
        return np.asarray(np.minimum(flat[left], flat[right]) + ends)

    def _all_pairs(
        self, values: _Floats, begins: _Floats, ends: _Floats, first: _Ints, last: _Ints, longest: float
    ) -> _Floats:
        """Same where windows do not do: every start for every end."""
        place = np.arange(values.shape[1])[:, None]
        through = np.empty_like(values)
        for row in range(len(values)):
            allowed = (place >= first[row]) & (place <= last[row])
            allowed &= ends[row] - begins[row][:, None] <= longest * (1 + ROUNDING)
            through[row] = np.where(allowed, values[row][:, None], np.inf).min(axis=0)
        return through + ends

    def _trace(self, tables: Sequence[_Floats], low: _Ints, longest: float, frame: _Frame) -> Split:
        """The split of the least sum, from its end."""
        bounds = [self.blocks]
        path: list[int] = []
        target, end = 0, self.blocks
        for stage in reversed(range(self.stages)):
            depth = self.orders.depths[stage]
            stop = depth.starts[target + 1] if target + 1 < len(depth.starts) else len(depth.edges)
            edges = depth.edges[depth.starts[target] : stop]
            triples = self.exit_triples[stage][edges]
            nodes = depth.exits[edges]
            starts = frame.base(depth.left[nodes])[:, None] + np.arange(frame.width)
            inside = (starts >= stage) & (starts < end)
            starts = np.clip(starts, 0, self.blocks)
            times = self.ends[triples, end][:, None] - self.begins[triples[:, None], starts]
            first = np.maximum(low[triples, end], self.memory_low[stage][triples, end])[:, None]
            inside &= (starts >= first) & (times <= longest * (1 + ROUNDING))
            sums = np.where(inside, tables[stage][nodes] + times, np.inf)
            which, place = (int(index) for index in np.unravel_index(np.argmin(sums), sums.shape))
            target = int(nodes[which])
            end = int(starts[which, place])
            path.append(target)
            bounds.append(end)
        return Split(self.orders.slots(path[::-1]), tuple(bounds[::-1]))


def _different(values: _Floats, least: float, most: float) -> _Floats:
    kept = np.sort(values[(values >= least * (1 - SAME)) & (values <= most * (1 + SAME))])
    return kept[np.append(kept[1:] > kept[:-1] * (1 + SAME), True)] if len(kept) else kept


def exact(pipeline: Pipeline, order: Sequence[int] | None) -> Split | None:
    """The split with the least ``evaluate(pipeline, split).seconds``; None if none fits in memory.

    If there are too many unlike slots (``MAX_STATES``), it is the best for each of several good orders, and may miss
    the best order, or what fits in memory only in another one.
    """
    if order is not None:
        return best_split(pipeline, one_order(pipeline, order))
    try:
        return best_split(pipeline, all_orders(pipeline, MAX_STATES))
    except TooManyOrders:
        return _best_of_some(pipeline)


def _best_of_some(pipeline: Pipeline) -> Split | None:
    """Over orders by speed, and the best one if only the kinds of slots mattered, put where hops are short."""
    orders = list(by_speed(pipeline))
    alike = like_kinds(pipeline)
    with contextlib.suppress(TooManyOrders):
        if (found := best_split(alike, all_orders(alike, MAX_STATES))) is not None:
            orders.append(near_each_other(pipeline, found.order))
    best: tuple[float, Split] | None = None
    for order in orders:
        if (found := best_split(pipeline, one_order(pipeline, order))) is None:
            continue
        found = best_split(pipeline, one_order(pipeline, exchanged(pipeline, found).order)) or found
        seconds = evaluate(pipeline, found).seconds
        if best is None or seconds < best[0]:
            best = seconds, found
    return None if best is None else best[1]


def best_split(pipeline: Pipeline, orders: Orders) -> Split | None:
    """The split with the least ``evaluate(pipeline, split).seconds`` over ``orders``; None if none fits in memory."""
    search = _BoxSearch(pipeline, _Table(pipeline, orders))
    search.run()
    return search.best


class _Box(NamedTuple):
    """Splits whose longest stage and longest update are among those numbered, both ends included, and whose times
    sum to ``least`` or more.
    """

    first: int
    last: int
    first_update: int
    last_update: int
    least: float


class _Solved(NamedTuple):
    """What the table gave under two bounds."""

    longest: float
    longest_update: float
    split: Split | None = None
    least: float = np.inf
    time: float = np.inf
    """Longest stage of the split, a little less for rounding."""
    update: float = np.inf
    """Same of the updates."""


class _BoxSearch:
    """Best first over boxes of (τ, υ), from a split that is found by raising τ from its lower bound."""

    def __init__(self, pipeline: Pipeline, table: _Table) -> None:
        self.pipeline = pipeline
        self.table = table
        self.weight = pipeline.micro_batches - 1
        self.best: Split | None = None
        self.best_seconds = np.inf
        self.relaxed = _Relaxed(table.orders)
        self.times = np.array([0.0])
        self.updates = np.array([0.0])
        self.boxes: list[tuple[float, int, _Box]] = []
        self.number = itertools.count()
        self.known: list[_Solved] = []

    def run(self) -> None:
        """Search; ``best`` stays None if nothing fits."""
        above = below = self.relaxed.longest
        for step in STEPS:
            below = self.relaxed.longest * step
            if self._try(below, np.inf) is not None:
                break
            above = below
        if self.best is None:
            return
        # What is left of the best so far for the longest stage or the longest update, if all else is least.
        rest = self.best_seconds - self.relaxed.least_sum(np.inf)
        self.updates = self.table.updates(self.relaxed.longest_update, rest - self.weight * above)
        if self.weight:
            self.times = self.table.times(above, (rest - self.relaxed.longest_update) / self.weight)
        else:
            self.times = np.array([self.best_seconds])
        everything = _Box(0, len(self.times) - 1, 0, len(self.updates) - 1, 0.0)
        if everything.last >= 0 and everything.last_update >= 0:
            self._look(everything)
        while self.boxes:
            bound, _, box = heapq.heappop(self.boxes)
            if bound >= self.best_seconds * (1 - ROUNDING):
                break
            self._search(box)

    def _try(self, longest: float, longest_update: float) -> _Solved | None:
        """Solve with these bounds, unless looser ones are known to allow nothing, or what these allow as well."""
        for known in self.known:
            if longest <= known.longest and longest_update <= known.longest_update:
                if known.split is None:
                    return None
                if known.time <= longest and known.update <= longest_update:
                    return known
        found = self.table.solve(longest, longest_update)
        if found is None:
            self.known.append(_Solved(longest, longest_update))
            return None
        least, split = found
        cost = evaluate(self.pipeline, split)
        if cost.seconds < self.best_seconds:
            self.best, self.best_seconds = split, cost.seconds
        time, update = max(cost.stage_seconds) * (1 - SAME), max(cost.update_seconds) * (1 - SAME)
        self.known.append(_Solved(longest, longest_update, split, least, time, update))
        return self.known[-1]

    def _search(self, box: _Box) -> None:
        """Halve a box along its dearer side, and look at the lower half."""
        spare = self.best_seconds - self._bound(box)
        if self.weight:
            most = self.times[box.first] + spare / self.weight
            box = box._replace(last=min(box.last, int(np.searchsorted(self.times, most, side="right")) - 1))
        # Longest updates that are too long are not cut off: the same bounds are then asked for more often.
        most = min(self.updates[box.first_update] + spare, self.updates[box.last_update])
        by_update = most - self.updates[box.first_update]
        by_time = self.weight * (self.times[box.last] - self.times[box.first])
        if box.last > box.first and (by_time >= by_update or box.last_update == len(self.updates) - 1):
            middle = (box.first + box.last) // 2
            self._keep(box._replace(first=middle + 1))
            box = box._replace(last=middle)
        elif box.last_update > box.first_update and box.last_update < len(self.updates) - 1:
            middle = (box.first_update + int(np.searchsorted(self.updates, most, side="right")) - 1) // 2
            self._keep(box._replace(first_update=middle + 1))
            box = box._replace(last_update=middle)
        self._look(box)

    def _look(self, box: _Box) -> None:
        """Solve with the upper bounds of a box, and keep what then is left of it."""
        found = self._try(self.times[box.last], self.updates[box.last_update])
        if found is None:
            return
        # A split that is neither shorter in its longest stage nor in its longest update is not better.
        time = int(np.searchsorted(self.times, found.time, side="left"))
        update = int(np.searchsorted(self.updates, found.update, side="left"))
        below = min(box.last_update, update - 1)
        self._keep(box._replace(last=min(box.last, time - 1), least=found.least))
        self._keep(box._replace(first=max(box.first, time), last_update=below, least=found.least))

    def _keep(self, box: _Box) -> None:
        if box.first > box.last or box.first_update > box.last_update:
            return
        box = box._replace(least=max(box.least, self.relaxed.least_sum(self.times[box.last])))
        bound = self._bound(box)
        if bound < self.best_seconds * (1 - ROUNDING):
            heapq.heappush(self.boxes, (bound, next(self.number), box))

    def _bound(self, box: _Box) -> float:
        return float(box.least + self.weight * self.times[box.first] + self.updates[box.first_update])


class _Relaxed:
    """Bounds for all splits and orders, from work that can be divided at will.

    Work is counted in seconds on the best slot for each block; slot i takes at least ``rate[i]`` times as long.
    """

    def __init__(self, orders: Orders) -> None:
        left = orders.depths[0].left[0]
        work = np.array([costs.forward_seconds + costs.backward_seconds for costs, _ in orders.kinds])
        update = np.array([costs.update_seconds for costs, _ in orders.kinds])
        self.count = left
        self.work, self.rate, self.smallest, lowest = _shared_out(work, left)
        self.hop = float(orders.hop_seconds[_hops_used(orders), 1:-1].min()) if len(orders.depths) > 1 else 0.0
        self.longest = lowest + self.hop
        self.longest_update = _shared_out(update, left)[3]
        self.hops = 2 * (len(orders.depths) - 1) * self.hop

    def least_sum(self, longest: float) -> float:
        """Of the times of all stages, if none is longer than that: the quickest slots are filled first."""
        seconds, left = 0.0, self.work - float(self.count.sum()) * self.smallest
        for kind in np.argsort(self.rate):
            most = max((longest - self.hop) / self.rate[kind] - self.smallest, 0.0) * self.count[kind]
            taken = min(most, max(left, 0.0))
            left -= taken
            seconds += self.rate[kind] * (self.count[kind] * self.smallest + taken)
        return float(seconds + self.hops) * (1 - SAME)


def _shared_out(seconds: _Floats, count: _Ints) -> tuple[float, _Floats, float, float]:
    """Work of all blocks, rate by kind, work of the smallest block, and the least for the longest stage."""
    best = seconds.min(axis=0)
    rate = np.ones(len(seconds))
    some = best > 0
    if some.any():
        rate = (seconds[:, some] / best[some]).min(axis=1)
    used = count > 0
    longest = max(best.sum() / (count / rate).sum(), best.max(), seconds.min(axis=1)[used].max())
    return float(best.sum()), rate, float(best.min()), float(longest)


def _hops_used(orders: Orders) -> list[int]:
    return sorted({int(hop) for depth in orders.depths[:-1] for hop in depth.hops_out})
