"""The best contiguous split over all orders of the slots, under ``pipeline.evaluate`` and the memory limits.

Wanted is the least ``Σ t + (K − 1)·max t + max u`` (t a stage's time per micro-batch, u its update). If the longest
stage and the longest update are bounded, ``t ≤ τ`` and ``u ≤ υ``, only the sum is left, and a dynamic programme finds
its least: over stages, nodes of the graph of orders (``slot_order``) and blocks placed. A best-first search over boxes
of (τ, υ) does the rest. The least sum within a box's upper bounds, put together with the box's lower bounds, is a bound
for all splits in the box.

`[Note: window minima]`  A stage's time is separable: ``t(a, b) = E[b] − A[a]`` with ``E[b]`` the cumulative time up to
block b plus the hop behind b, and ``A[a]`` the same up to a less the hop before it. So the least sum over all starts a
of the stage that ends at b is ``E[b] + min (g[a] − A[a])`` over the a that the limits allow. These are a window
``[low(b), b − 1]`` wherever A does not fall, that is, where no block is quicker than the hop grows over it; its
minimum comes from a table of minima over runs of 1, 2, 4, … starts. Elsewhere all pairs are tried.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .pipeline import Pipeline, Split, evaluate
from .slot_order import Depth, Orders, all_orders, one_order

__all__ = ["best_split", "exact"]

MOST_NODES = 300_000

ROUNDING = 1e-12

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int_]


class _Table:
    """The dynamic programme for one pipeline and graph of orders."""

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
        return np.array(low)[self.kinds]

    def solve(self, longest: float, longest_update: float) -> tuple[float, Split] | None:
        """The least sum of times under both bounds, and its split; None if there is no split."""
        low = self._low(longest, longest_update)
        least = np.full((len(self.orders.depths[0].kinds), self.width), np.inf)
        least[:, 0] = 0.0
        tables = []
        for stage, depth in enumerate(self.orders.depths):
            tables.append(least)
            through = self._through(stage, depth, least, low, longest)
            least = np.minimum.reduceat(through[depth.edges], depth.starts, axis=0)
        total = float(least[0, -1])
        if total == np.inf:
            return None
        return total, self._trace(tables, low, longest)

    def _low(self, longest: float, longest_update: float) -> _Ints:
        """Earliest start by time, for each triple and each end."""
        low = np.zeros(self.ends.shape, dtype=int)
        if self.windows and longest < np.inf:
            for row, (begins, ends) in enumerate(zip(self.begins, self.ends, strict=True)):
                low[row] = np.searchsorted(begins[:-1], ends - longest * (1 + ROUNDING), side="left")
        if longest_update < np.inf:
            for row, kind in enumerate(self.kinds):
                update = self.update[kind]
                by_update = np.searchsorted(update, update - longest_update * (1 + ROUNDING), side="left")
                low[row] = np.maximum(low[row], by_update)
        return low

    def _through(self, stage: int, depth: Depth, least: _Floats, low: _Ints, longest: float) -> _Floats:
        """Least sum over all starts by exit and end of ``stage`` ``[exits, width]``; places count from the first
        block that is possible.
        """
        triples = self.exit_triples[stage]
        starts = slice(stage, stage + self.width)
        stops = slice(stage + 1, stage + 1 + self.width)
        first = np.maximum(np.maximum(low[:, stops], self.memory_low[stage][:, stops]) - stage, 0)
        node_triples = np.empty(len(depth.kinds), dtype=int)
        node_triples[depth.exits] = triples
        values = least - self.begins[node_triples][:, starts]
        if not self.windows:
            return self._all_pairs(stage, depth, values, first, longest)
        length = np.arange(1, self.width + 1) - first
        level = np.frexp(np.maximum(length, 1))[1] - 1
        minima = np.empty((int(level.max()) + 1, *values.shape))
        minima[0] = values
        for power in range(1, len(minima)):
            run = 1 << (power - 1)
            np.minimum(minima[power - 1, :, :-run], minima[power - 1, :, run:], out=minima[power, :, :-run])
            minima[power, :, -run:] = minima[power - 1, :, -run:]
        flat = minima.reshape(-1)
        base = level * values.size
        left = base + np.minimum(first, self.width - 1)
        right = base + np.arange(self.width) - (1 << level) + 1
        rows = (depth.exits * self.width)[:, None]
        found = np.minimum(flat[left[triples] + rows], flat[right[triples] + rows])
        bias = np.where(length > 0, self.ends[:, stops], np.inf)
        return found + bias[triples]

    def _all_pairs(self, stage: int, depth: Depth, values: _Floats, first: _Ints, longest: float) -> _Floats:
        triples = self.exit_triples[stage]
        begins = self.begins[:, stage : stage + self.width, None]
        ends = self.ends[:, None, stage + 1 : stage + 1 + self.width]
        place = np.arange(self.width)
        allowed = (place[:, None] <= place) & (place[:, None] >= first[:, None, :])
        allowed &= ends - begins <= longest * (1 + ROUNDING)
        cost = np.where(allowed, np.broadcast_to(ends, allowed.shape), np.inf)
        return np.array(
            [
                (values[node][:, None] + cost[triple]).min(axis=0)
                for node, triple in zip(depth.exits, triples, strict=True)
            ]
        )

    def _trace(self, tables: Sequence[_Floats], low: _Ints, longest: float) -> Split:
        """The split of the least sum, from its end."""
        bounds = [self.blocks]
        path: list[int] = []
        target, place = 0, self.width - 1
        for stage in reversed(range(self.stages)):
            depth = self.orders.depths[stage]
            stop = depth.starts[target + 1] if target + 1 < len(depth.starts) else len(depth.edges)
            edges = depth.edges[depth.starts[target] : stop]
            triples = self.exit_triples[stage][edges]
            nodes = depth.exits[edges]
            end = stage + 1 + place
            starts = np.arange(stage, end)
            times = self.ends[triples, end][:, None] - self.begins[triples][:, starts]
            first = np.maximum(low[triples, end], self.memory_low[stage][triples, end])[:, None]
            sums = tables[stage][nodes][:, : place + 1] + times
            sums[(starts < first) | (times > longest * (1 + ROUNDING))] = np.inf
            which, place = (int(index) for index in np.unravel_index(np.argmin(sums), sums.shape))
            target = int(nodes[which])
            path.append(target)
            bounds.append(stage + place)
        return Split(self.orders.slots(path[::-1]), tuple(bounds[::-1]))


def exact(pipeline: Pipeline, order: Sequence[int] | None) -> Split | None:
    """The split with the least ``evaluate(pipeline, split).seconds``; None if none fits in memory."""
    if order is not None:
        return best_split(pipeline, one_order(pipeline, order))
    return best_split(pipeline, all_orders(pipeline, MOST_NODES))


def best_split(pipeline: Pipeline, orders: Orders) -> Split | None:
    """The split with the least ``evaluate(pipeline, split).seconds`` over ``orders``; None if none fits in memory."""
    table = _Table(pipeline, orders)
    weight = pipeline.micro_batches - 1
    found = table.solve(np.inf, np.inf)
    if found is None:
        return None
    best, best_seconds = found[1], np.inf
    number = itertools.count()
    boxes: list[tuple[float, int, _Box]] = []

    def look(box: _Box, least: float, split: Split) -> None:
        """Take note of the least sum within a box's upper bounds, and of what remains to be searched there."""
        nonlocal best, best_seconds
        cost = evaluate(pipeline, split)
        if cost.seconds < best_seconds:
            best, best_seconds = split, cost.seconds
        time, update = max(cost.stage_seconds), max(cost.update_seconds)
        # A split that is neither shorter in its longest stage nor in its longest update is not better.
        update_below = min(box.update_below, update * (1 - ROUNDING))
        keep(box._replace(below=min(box.below, time * (1 - ROUNDING)), least=least))
        keep(box._replace(above=max(box.above, time), update_below=update_below, least=least))

    def keep(box: _Box) -> None:
        if box.above <= box.below and box.update_above <= box.update_below:
            heapq.heappush(boxes, (box.bound(weight), next(number), box))

    look(_Box(0.0, np.inf, 0.0, np.inf, 0.0, halve=False), *found)
    while boxes:
        bound, _, box = heapq.heappop(boxes)
        if bound >= best_seconds * (1 - ROUNDING):
            break
        spare = best_seconds - bound
        if weight:
            box = box._replace(below=min(box.below, box.above + spare / weight))
        box = box._replace(update_below=min(box.update_below, box.update_above + spare))
        probe = box
        if box.halve:
            by_time = weight * (box.below - box.above) >= box.update_below - box.update_above
            if by_time:
                middle = (box.above + box.below) / 2
                probe, rest = box._replace(below=middle), box._replace(above=middle)
            else:
                middle = (box.update_above + box.update_below) / 2
                probe, rest = box._replace(update_below=middle), box._replace(update_above=middle)
            keep(rest._replace(halve=False))
        found = table.solve(probe.below, probe.update_below)
        if found is not None:
            look(probe._replace(halve=not box.halve), *found)
    return best


class _Box(NamedTuple):
    """Splits whose longest stage and longest update lie between bounds, and whose times sum to ``least`` or more."""

    above: float
    below: float
    update_above: float
    update_below: float
    least: float
    halve: bool

    def bound(self, weight: int) -> float:
        return self.least + weight * self.above + self.update_above
