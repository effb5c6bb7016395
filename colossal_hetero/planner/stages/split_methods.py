"""The methods that divide the blocks of a model over the stages, by name; see docs/algorithms.md, section 3.

Colossal-AI's equal parts, Holmes' partition by speed, AutoHet's balance, ADAPT's search, and ``exact`` of
``fixed_order.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .fixed_order import exact, fits, min_longest, min_sum_bounds, windows
from .pipeline import Pipeline, Split


def split(pipeline: Pipeline, method: str = "exact", *, order: Sequence[int] | None = None) -> Split:
    """Divide the model over the slots.

    ``exact`` has the smallest ``evaluate(...).seconds``, without updates, of all splits in this order that fit in
    memory, or of those in a few orders. ``adapt`` and ``autohet`` also respect memory; for ``uniform`` and ``holmes``,
    check ``evaluate(...).fits``.
    """
    stages = len(pipeline.slots)
    if stages > pipeline.blocks:
        raise ValueError(
            f"{stages} stages for {pipeline.blocks} blocks: each stage needs at least one block, so use at most "
            f"{pipeline.blocks} slots"
        )
    found = _SPLITS[method](pipeline, None if order is None else tuple(order))
    if found is None:
        raise ValueError(_memory_message(pipeline, order))
    return found


def _memory_message(pipeline: Pipeline, order: Sequence[int] | None) -> str:
    """Error message that names a block which no slot can hold even alone, or else the first stage that overflows."""
    stages = len(pipeline.slots)
    best_by_block: list[tuple[float, int, int, float]] = []
    for block in range(pipeline.blocks):
        by_slot = []
        for index, slot in enumerate(pipeline.slots):
            # The last stage that can hold the block has the fewest micro-batches in flight.
            stage = order.index(index) if order is not None else min(block, stages - 1)
            in_flight = min(pipeline.micro_batches, stages - stage)
            need = float(slot.costs.state_bytes[block] + in_flight * slot.costs.activation_bytes[block])
            by_slot.append((need - slot.memory_bytes, block, index, need))
        best_by_block.append(min(by_slot))
    over, block, index, need = max(best_by_block)
    slot = pipeline.slots[index]
    if over > 0:
        return (
            f"no split fits in memory: block {block} alone needs {_gigabytes(need)} in slot {slot.name}, which has "
            f"{_gigabytes(slot.memory_bytes)}, and no other slot can hold it; use smaller micro-batches, more tensor "
            "parallelism, or devices with more memory"
        )
    return _overflow_message(pipeline, order)


def _overflow_message(pipeline: Pipeline, order: Sequence[int] | None) -> str:
    """Error message on the blocks that do not fit if stages are filled in turn, or by memory without an order."""
    stages = len(pipeline.slots)
    if order is None:
        order = sorted(range(stages), key=lambda index: pipeline.slots[index].memory_bytes)
    start = 0
    for stage, index in enumerate(order):
        slot = pipeline.slots[index]
        in_flight = min(pipeline.micro_batches, stages - stage)
        totals = slot.costs.cumulative
        total = totals.state_bytes + in_flight * totals.activation_bytes
        stop = int(np.searchsorted(total, total[start] + slot.memory_bytes, side="right")) - 1
        if stop == start or (stage == stages - 1 and stop < pipeline.blocks):
            break
        start = min(stop, pipeline.blocks - (stages - stage - 1))
    else:
        return (
            "no split fits in memory in any order; use smaller micro-batches, more tensor parallelism, or more devices"
        )
    what = f"block {start}" if stop == start else f"blocks {start} to {stop}"
    return (
        f"no split fits in memory: if the slots are filled in turn, {what} in slot {slot.name} as stage {stage}, with "
        f"{in_flight} micro-batch{'' if in_flight == 1 else 'es'} in flight, need{'s' if stop == start else ''} "
        f"{_gigabytes(float(total[stop + 1] - total[start]))}, but the slot has {_gigabytes(slot.memory_bytes)}; use "
        "smaller micro-batches, more tensor parallelism, or more devices"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


# Rules ----------------------------------------------------------------------------------------------------


HOLMES_ALPHA = 1.05
"""α of Holmes' Eq. 2; the value is from section 4.4."""

ROUNDING = 1e-9
"""Relative rounding error of speeds and loads."""


def _speeds(pipeline: Pipeline) -> NDArray[np.float64]:
    """Speed of each slot, in micro-batches per second if the slot ran all blocks, ``[slots]``."""
    totals = [slot.costs.cumulative for slot in pipeline.slots]
    return np.array([1.0 / max(float(t.forward_seconds[-1] + t.backward_seconds[-1]), 1e-30) for t in totals])


def uniform_bounds(blocks: int, stages: int) -> tuple[int, ...]:
    """Bounds of Colossal-AI's ``PipelineStageManager.distribute_layers``: equal parts, larger ones in the middle."""
    parts = np.full(stages, blocks // stages)
    extra = blocks % stages
    start = stages // 2 - extra // 2
    parts[start : start + extra] += 1
    return _bounds(parts)


def uniform(pipeline: Pipeline, order: Sequence[int] | None) -> Split:
    """Colossal-AI's division into equal parts, see :func:`uniform_bounds`."""
    order = range(len(pipeline.slots)) if order is None else order
    return Split(tuple(order), uniform_bounds(pipeline.blocks, len(pipeline.slots)))


def holmes(pipeline: Pipeline, order: Sequence[int] | None) -> Split:
    """Holmes' self-adapting partition (section 3.3, Eq. 2): in order of speed, a stage of speed S gets ``⌊α·N·S/ΣS⌋``
    of the N blocks; the slowest stages share the rest. S is the speed that training on the stage's cluster alone has
    reached, which contains its network (Table 1), if the cluster file has it, else the speed of the slot's blocks.
    Differences: each stage gets at least one block, and if all are equally fast, the parts are equal."""
    order = tuple(range(len(pipeline.slots)) if order is None else order)
    measured = [slot.training_speed for slot in pipeline.slots]
    speeds = _speeds(pipeline) if None in measured else np.array(measured, dtype=float)
    by_stage = speeds[list(order)]
    slowest = by_stage <= by_stage.min() * (1 + ROUNDING)
    parts = np.zeros(len(order), dtype=int)
    left, waiting = pipeline.blocks, len(order)
    for stage in np.argsort(-by_stage, kind="stable"):
        if slowest[stage]:
            continue
        wanted = math.floor(HOLMES_ALPHA * pipeline.blocks * by_stage[stage] / by_stage.sum() + ROUNDING)
        waiting -= 1
        parts[stage] = min(max(wanted, 1), left - waiting)
        left -= parts[stage]
    parts[slowest] = np.diff(uniform_bounds(left, int(slowest.sum())))
    return Split(order, _bounds(parts))


def autohet(pipeline: Pipeline, order: Sequence[int] | None) -> Split | None:
    """AutoHet's balance (section III-C, Eq. 4): of the splits that fit in memory with the smallest ``max l/g``, with l
    a stage's blocks and g its speed, one with the smallest ``Σ l/g``; None if none fits. Without an order, slower slots
    come first. The printed ``max g/l`` is smallest if one stage does all the work; the text asks for balance."""
    speed, blocks = _speeds(pipeline), np.arange(pipeline.blocks + 1)
    order = tuple(np.argsort(speed, kind="stable").tolist()) if order is None else tuple(order)
    by_stage = speed[list(order)] / speed.sum() * pipeline.blocks
    lengths = blocks - blocks[:, None]
    possible = [
        fits(pipeline.slots[slot], min(pipeline.micro_batches, len(order) - stage)) & (lengths > 0)
        for stage, slot in enumerate(order)
    ]
    loads = windows(list(np.where(possible, lengths / by_stage[:, None, None], np.inf)))
    longest = min_longest(loads)
    return None if longest == inf else Split(order, min_sum_bounds(loads, longest * (1 + ROUNDING)))


def _bounds(parts: NDArray[np.int_]) -> tuple[int, ...]:
    return (0, *(int(bound) for bound in np.cumsum(parts)))


# ADAPT ---------------------------------------------------------------------------------------------------------------


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
    tree = _Tree(pipeline, order)
    firsts = range(tree.stages) if order is None else order[:1]
    root = _Node(0.0, 0, (), (), 0.0, 0.0, 0.0, 0.0, 0.0)
    waiting = tree.by_promise([tree.child(root, device, inf) for device in firsts])
    best, best_cost, visited = None, inf, 0
    while waiting and visited < nodes:
        node = waiting.pop()
        visited += 1
        if node.cost >= best_cost:
            continue
        if node.placed == tree.blocks:
            best, best_cost = Split(node.order, (*node.bounds, tree.blocks)), node.cost
        else:
            waiting += tree.by_promise([tree.child(node, device, best_cost) for device in tree.devices(node)])
    if best is None and visited >= nodes:
        raise ValueError(
            f"method 'adapt' stopped after {nodes:,} nodes without a split that fits in memory; use method 'exact'"
        )
    return best


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


class _Tree:
    """The partial splits of a pipeline."""

    def __init__(self, pipeline: Pipeline, order: Sequence[int] | None) -> None:
        self.order = order
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

    def by_promise(self, children: Sequence[_Node | None]) -> list[_Node]:
        """The children that are not pruned, most promising last: the search takes the last one first. First counts the
        longest stage if the remaining devices divide the remaining layers perfectly, then the cost."""

        def promise(node: _Node) -> tuple[float, float]:
            speed = self.all_speed - sum(self.speed[device] for device in node.order)
            rest = (self.blocks - node.placed) / speed if len(node.order) < self.stages else 0.0
            return max(node.longest, node.time, rest), node.cost

        return sorted((child for child in children if child is not None), key=promise, reverse=True)

    def devices(self, node: _Node) -> list[int]:
        """The devices that the next layer may go to."""
        stage = len(node.order)
        devices = [node.order[-1]] if self.blocks - node.placed > self.stages - stage else []
        if stage < self.stages:
            after = range(self.stages) if self.order is None else (self.order[stage],)
            devices += [device for device in after if device not in node.order]
        return devices

    def child(self, node: _Node, device: int, below: float) -> _Node | None:
        """The partial split with the next layer on ``device``; None if it is pruned."""
        layer = node.placed
        order, bounds, finished, longest = node.order, node.bounds, node.finished, node.longest
        time, state, activation = node.time, node.state_bytes, node.activation_bytes
        if not order or device != order[-1]:
            hop = self.hops[order[-1]][device][layer] if order else 0.0
            order, bounds = (*order, device), (*bounds, layer)
            finished, longest = finished + time + hop, max(longest, time)
            time = state = activation = 0.0
        time += self.times[device][layer]
        state += self.states[device][layer]
        activation += self.activations[device][layer]
        in_flight = min(self.micro_batches, self.stages - len(order) + 1)
        cost = finished + time + (self.micro_batches - 1) * max(longest, time)
        if state + in_flight * activation > self.memory[device] or cost >= below:
            return None
        return _Node(cost, layer + 1, order, bounds, finished, longest, time, state, activation)


_SPLITS: dict[str, Callable[[Pipeline, Sequence[int] | None], Split | None]] = {
    "exact": exact,
    "uniform": uniform,
    "holmes": holmes,
    "adapt": adapt,
    "autohet": autohet,
}
"""By name; a method gives None if no split fits in memory."""

METHODS = tuple(_SPLITS)
