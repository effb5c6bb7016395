"""Local search for a split that is faster in the event simulation, which the closed form only approximates.

With few micro-batches, the place of the longest stage matters, which the closed form does not see: part of the work of
the stages behind it happens during warm-up and cool-down, with its own (``pipeline.py``, Note: closed form).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from .event_simulation import Transfers, simulate
from .fixed_order import exact
from .pipeline import Pipeline, Split, evaluate
from .rules import autohet, holmes, uniform

__all__ = ["ADAPT_NODES", "adapt", "refine", "simulated"]


# Adapt search --------------------------------------------------------------------------------------------------------


ADAPT_NODES = 200_000
"""Maximum number of nodes of the search tree that are visited."""


def adapt(pipeline: Pipeline, order: Sequence[int] | None, nodes: int = ADAPT_NODES) -> Split | None:
    """The split with the smallest cost of ADAPT, ``Σ Comp + (K − 1)·max Comp`` (Eq. 6.4), with Comp the forward and
    backward time of a stage, plus the transfer over each cut once (Eq. 6.2); None if none fits in memory.

    The search is depth-first: each layer goes to the device of the layer before it or to one that is not used yet. The
    paper does not say which branch comes first; here it is the one with the shortest longest stage if the remaining
    layers are divided perfectly over the remaining devices. A branch is pruned if (1) it returns to a device used
    before, because the layers of a device are contiguous; (2) it exceeds a device's memory, with the activations in
    flight at its stage; (3) its cost is not below the best so far; (4) fewer layers than slots remain, because every
    slot must be used here. As in the paper, interchangeable devices are treated as different. The search takes
    exponential time: after ``nodes`` nodes it returns the best split so far, which may not be the best of all.
    """
    search = _DepthFirstSearch(pipeline, order, nodes)
    search.run()
    if search.best is None and search.visited >= nodes:
        raise ValueError(
            f"method 'adapt' stopped after {nodes:,} nodes without a split that fits in memory; use method 'exact'"
        )
    return search.best


class _Node(NamedTuple):
    """A partial split: the first ``placed`` layers have devices; ``order`` and ``bounds`` are of its stages."""

    cost: float
    """ADAPT's cost of the partial split."""
    placed: int
    order: tuple[int, ...]
    bounds: tuple[int, ...]
    finished: float
    """Seconds of all stages except the last, and of the transfers over the cuts."""
    longest: float
    """Longest time of all stages except the last."""
    time: float
    """Time of the last stage so far; bytes are of this stage too."""
    state_bytes: float
    activation_bytes: float
    """For one micro-batch."""


class _DepthFirstSearch:
    """State of the search: the number of visited nodes and the best split so far."""

    def __init__(self, pipeline: Pipeline, order: Sequence[int] | None, nodes: int) -> None:
        self.order = order
        self.nodes = nodes
        self.visited = 0
        self.best: Split | None = None
        self.best_cost = inf
        self.blocks, self.stages = pipeline.blocks, len(pipeline.slots)
        self.micro_batches = pipeline.micro_batches
        self.memory = [slot.memory_bytes for slot in pipeline.slots]
        costs = [slot.costs for slot in pipeline.slots]
        self.times = [(cost.forward_seconds + cost.backward_seconds).tolist() for cost in costs]
        self.speed = [self.blocks / max(sum(times), 1e-30) for times in self.times]
        self.all_speed = sum(self.speed)
        self.states = [cost.state_bytes.tolist() for cost in costs]
        self.activations = [cost.activation_bytes.tolist() for cost in costs]
        self.hops = [
            [cost.hop_seconds(channel).tolist() if a != b else [] for b, channel in enumerate(pipeline.channels[a])]
            for a, cost in enumerate(costs)
        ]

    def run(self) -> None:
        firsts = range(self.stages) if self.order is None else self.order[:1]
        root = _Node(0.0, 0, (), (), 0.0, 0.0, 0.0, 0.0, 0.0)
        waiting = self._sorted(self._child(root, device, new=True) for device in firsts)
        while waiting and self.visited < self.nodes:
            node = waiting.pop()
            self.visited += 1
            if node.cost >= self.best_cost:
                continue
            if node.placed == self.blocks:
                self.best, self.best_cost = Split(node.order, (*node.bounds, self.blocks)), node.cost
                continue
            waiting.extend(self._sorted(self._children(node)))

    def _sorted(self, children: Iterable[_Node | None]) -> list[_Node]:
        """The children, most promising last: the search takes the last one first."""
        return sorted((child for child in children if child is not None), key=self._promise, reverse=True)

    def _promise(self, node: _Node) -> tuple[float, float]:
        """Sort key: the longest stage if the remaining devices divide the remaining layers perfectly, then the cost."""
        speed = self.all_speed - sum(self.speed[device] for device in node.order)
        rest = (self.blocks - node.placed) / speed if len(node.order) < self.stages else 0.0
        return max(node.longest, node.time, rest), node.cost

    def _children(self, node: _Node) -> Iterator[_Node | None]:
        """The partial splits with one more layer; None for each that is pruned."""
        if self.blocks - node.placed > self.stages - len(node.order):
            yield self._child(node, node.order[-1], new=False)
        if len(node.order) < self.stages:
            after = range(self.stages) if self.order is None else (self.order[len(node.order)],)
            for device in after:
                if device not in node.order:
                    yield self._child(node, device, new=True)

    def _child(self, node: _Node, device: int, new: bool) -> _Node | None:
        """The partial split with the next layer on ``device``; None if it is pruned."""
        layer = node.placed
        order, bounds, finished, longest = node.order, node.bounds, node.finished, node.longest
        time, state, activation = node.time, node.state_bytes, node.activation_bytes
        if new:
            hop = self.hops[order[-1]][device][layer] if order else 0.0
            order, bounds = (*order, device), (*bounds, layer)
            finished, longest = finished + time + hop, max(longest, time)
            time = state = activation = 0.0
        time += self.times[device][layer]
        state += self.states[device][layer]
        activation += self.activations[device][layer]
        in_flight = min(self.micro_batches, self.stages - len(order) + 1)
        if state + in_flight * activation > self.memory[device]:
            return None
        cost = finished + time + (self.micro_batches - 1) * max(longest, time)
        if cost >= self.best_cost:
            return None
        return _Node(cost, layer + 1, order, bounds, finished, longest, time, state, activation)


START_NODES = 500
"""Nodes that the method ``adapt`` visits for a split to compare with."""
MIN_IMPROVEMENT = 1e-9
"""Relative improvement in time from which a split counts as faster."""


def refine(
    pipeline: Pipeline, split: Split, transfers: Transfers = "blocking", *, reorder: bool = True, simulations: int = 500
) -> Split:
    """A split that is not slower than ``split`` in the event simulation, and that fits in memory if ``split`` does.

    A local search takes the first improvement: one or two blocks move from one stage to another, or (with ``reorder``)
    two stages exchange their slots, with or without their numbers of blocks. It ends if no step improves the split, or
    after ``simulations`` simulations, and helps most with few micro-batches (``benchmarks/planner/splits.py``).
    """
    search = _LocalSearch(pipeline, split, transfers, reorder, simulations, must_fit=evaluate(pipeline, split).fits)
    search.climb(split)
    if reorder:
        search.climb(_split_of(split.order[::-1], split.blocks_per_stage[::-1]))
    return search.best


def simulated(pipeline: Pipeline, order: Sequence[int] | None) -> Split | None:
    """The best split by the closed form, improved by :func:`refine`; None if none fits. In the event simulation it is
    not slower than fitting splits of other methods (of ``adapt`` after ``START_NODES`` nodes)."""
    found = exact(pipeline, order)
    if found is None:
        return None
    best = refine(pipeline, found, reorder=order is None)
    others = [uniform(pipeline, order), holmes(pipeline, order), autohet(pipeline, order)]
    with contextlib.suppress(ValueError):
        others.append(adapt(pipeline, order, START_NODES))
    fitting = [other for other in others if other is not None and evaluate(pipeline, other).fits]
    if fitting:
        other = min(fitting, key=lambda split: simulate(pipeline, split).seconds)
        if simulate(pipeline, other).seconds < simulate(pipeline, best).seconds:
            best = refine(pipeline, other, reorder=order is None)
    return best


class _LocalSearch:
    """State of a search: the best split so far, the splits that were tried, and the number of simulations left."""

    def __init__(
        self, pipeline: Pipeline, split: Split, transfers: Transfers, reorder: bool, simulations: int, must_fit: bool
    ) -> None:
        self.pipeline = pipeline
        self.transfers = transfers
        self.reorder = reorder
        self.simulations_left = simulations
        self.must_fit = must_fit
        self.best = split
        self.best_seconds = np.inf
        self.tried: set[tuple[object, ...]] = set()

    def climb(self, split: Split) -> None:
        """Go from ``split`` to faster neighbors until there is none."""
        current = self._seconds(split, np.inf)
        improved = current < np.inf
        while improved:
            if current < self.best_seconds * (1 - MIN_IMPROVEMENT):
                self.best, self.best_seconds = split, current
            improved = False
            for neighbor in _neighbors(split, self.reorder):
                found = self._seconds(neighbor, current)
                if found < current * (1 - MIN_IMPROVEMENT):
                    split, current, improved = neighbor, found, True
                    break

    def _seconds(self, split: Split, limit: float) -> float:
        """Simulated time of an iteration; infinite if the split was tried before, does not fit, certainly takes
        ``limit`` or longer, or if no simulations are left."""
        key = _key(self.pipeline, split)
        if key in self.tried or self.simulations_left == 0:
            return np.inf
        self.tried.add(key)
        cost = evaluate(self.pipeline, split)
        work = zip(cost.forward_seconds, cost.backward_seconds, cost.schedule_seconds, strict=True)
        # No iteration is shorter than the work of one stage.
        if self.pipeline.micro_batches * max(map(sum, work)) >= limit or (self.must_fit and not cost.fits):
            return np.inf
        self.simulations_left -= 1
        return simulate(self.pipeline, split, self.transfers).seconds


def _key(pipeline: Pipeline, split: Split) -> tuple[object, ...]:
    """A key that is equal for splits that differ only by interchangeable slots with equal channels."""
    slots = tuple(pipeline.slots[slot].kind for slot in split.order)
    hops = tuple(pipeline.channels[a][b] for a, b in itertools.pairwise(split.order))
    return slots, hops, split.bounds


def _neighbors(split: Split, reorder: bool) -> Iterator[Split]:
    """Splits one step away from ``split``: first moves between adjacent stages, then exchanges, then other moves."""
    order, parts = split.order, split.blocks_per_stage
    stages = range(len(order))
    for a, b in itertools.permutations(stages, 2):
        if abs(a - b) == 1:
            yield from _moved(order, parts, a, b)
    if reorder:
        for a, b in itertools.combinations(stages, 2):
            swapped, lengths = list(order), list(parts)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            yield _split_of(tuple(swapped), parts)
            lengths[a], lengths[b] = lengths[b], lengths[a]
            yield _split_of(tuple(swapped), tuple(lengths))
    for a, b in itertools.permutations(stages, 2):
        if abs(a - b) > 1:
            yield from _moved(order, parts, a, b)


def _moved(order: tuple[int, ...], parts: tuple[int, ...], a: int, b: int) -> Iterator[Split]:
    """Splits in which one or two blocks have moved from stage a to stage b."""
    for amount in (1, 2):
        if parts[a] > amount:
            moved = list(parts)
            moved[a] -= amount
            moved[b] += amount
            yield _split_of(order, tuple(moved))


def _split_of(order: tuple[int, ...], parts: tuple[int, ...]) -> Split:
    return Split(order, (0, *itertools.accumulate(parts)))
