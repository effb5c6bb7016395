"""ADAPT's depth-first search over devices for layers (chapter 6), with its three prunings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from .pipeline import Pipeline, Split

__all__ = ["ADAPT_NODES", "adapt"]

ADAPT_NODES = 200_000
"""Nodes of the search tree that are looked at, at most."""


def adapt(pipeline: Pipeline, order: Sequence[int] | None, nodes: int = ADAPT_NODES) -> Split | None:
    """The split with the least of ADAPT's cost: ``Σ Comp + (K − 1)·max Comp`` (Eq. 6.4) and each cut's transfer once
    (Eq. 6.2), with Comp a stage's forward and backward.

    Depth-first: each layer goes to the device of the layer before it or to one that is not used yet. First is tried
    what promises the shortest longest stage if the layers that are left divide well, which the paper leaves open.
    Pruned are (1) devices that were left: a device's layers are contiguous; (2) what exceeds a device's memory, with
    the activations in flight at its place in the pipeline; (3) what costs no less than the best so far. Here every slot
    is used, so a branch that keeps too few layers for the slots left is pruned too. As in the paper, interchangeable
    devices are told apart.

    The search is exponential: it ends after ``nodes`` nodes with the best so far, which then need not be the best.

    Returns:
        None if nothing fits.

    Raises:
        ValueError: nothing was found that fits, and not all was searched.
    """
    search = _DepthFirstSearch(pipeline, order, nodes)
    search.run()
    if search.best is None and search.seen >= nodes:
        raise ValueError(
            f"method 'adapt' looked at {nodes:,} nodes and found no split that fits in memory; 'exact' finds one, or "
            "that there is none"
        )
    return search.best


class _Node(NamedTuple):
    """The first ``placed`` layers have devices."""

    cost: float
    placed: int
    order: tuple[int, ...]
    bounds: tuple[int, ...]
    """Where each stage starts."""
    finished: float
    """Time of all stages but the last, and of the cuts."""
    longest: float
    """Of these."""
    time: float
    """Of the last stage so far."""
    state_bytes: float
    activation_bytes: float


class _DepthFirstSearch:
    def __init__(self, pipeline: Pipeline, order: Sequence[int] | None, nodes: int) -> None:
        self.order = order
        self.nodes = nodes
        self.seen = 0
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
        """Search until all is seen, or as much as may be."""
        firsts = range(self.stages) if self.order is None else self.order[:1]
        root = _Node(0.0, 0, (), (), 0.0, 0.0, 0.0, 0.0, 0.0)
        waiting = self._sorted(self._child(root, device, new=True) for device in firsts)
        while waiting and self.seen < self.nodes:
            node = waiting.pop()
            self.seen += 1
            if node.cost >= self.best_cost:
                continue
            if node.placed == self.blocks:
                self.best, self.best_cost = Split(node.order, (*node.bounds, self.blocks)), node.cost
                continue
            waiting.extend(self._sorted(self._children(node)))

    def _sorted(self, children: Iterable[_Node | None]) -> list[_Node]:
        """The most promising last, which is taken first."""
        return sorted((child for child in children if child is not None), key=self._promise, reverse=True)

    def _promise(self, node: _Node) -> tuple[float, float]:
        """The longest stage if the layers that are left divide well over the devices that are left, and the cost."""
        speed = self.all_speed - sum(self.speed[device] for device in node.order)
        rest = (self.blocks - node.placed) / speed if len(node.order) < self.stages else 0.0
        return max(node.longest, node.time, rest), node.cost

    def _children(self, node: _Node) -> Iterator[_Node | None]:
        if self.blocks - node.placed > self.stages - len(node.order):
            yield self._child(node, node.order[-1], new=False)
        if len(node.order) < self.stages:
            after = range(self.stages) if self.order is None else (self.order[len(node.order)],)
            for device in after:
                if device not in node.order:
                    yield self._child(node, device, new=True)

    def _child(self, node: _Node, device: int, new: bool) -> _Node | None:
        """The next layer on ``device``; None if a prune cuts it off."""
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
