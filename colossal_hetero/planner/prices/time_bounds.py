"""Lower bounds on the time of any plan that uses given numbers of nodes.

[Note: a bound for all plans] Let ρ[t] be the time that a slot of kind t needs at least for a whole micro-batch (see
[Note: a lower bound on a pipeline's time] in ``bounds/pipeline_bounds.py``): for a share σ of the model's work it needs
at least σ·ρ[t]. Let P = Σ 1/ρ over all slots, and K the number of micro-batches of an iteration of T seconds.

- Work over speed. A slot of a pipeline with K_p micro-batches takes at least K_p·σ·ρ ≤ T. Summed over its slots, whose
  shares are 1 together, K_p ≤ T·P_p; summed over pipelines, T ≥ K / P.
- Filling pipelines. The first micro-batch takes at least ρ_min, and each further one at least 1 / P_p. So
  K_p − 1 ≤ (T − ρ_min)·P_p, and with D pipelines T ≥ ρ_min + (K − D) / P. A pipeline has at least as many stages as are
  needed to hold the model, so D is at most the number of slots over that.
- Summing gradients. With D pipelines on n slots, some pipeline has at most n / D stages, and one of these holds at
  least the share D / n of the gradients' bytes G. Its ring of D ranks takes at least 2·(D − 1)/D · G·D/n over the
  bandwidth: of the fastest link inside a node if D slots are in one node, else of the fastest link between nodes.
  This comes after the passes, so it is added to the other two.
- Memory. All slots together must hold all blocks.

The bound is the smallest over all D. Of a range of D, the first bound is taken at its end and the third at its start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise

import numpy as np
from numpy.typing import NDArray

from ..bounds.pipeline_bounds import PipelineBounds
from ..cluster.topology import Topology
from ..slots.placement import SlotPool
from .node_choice import NodeType

__all__ = ["time_bounds"]


def time_bounds(
    topology: Topology, pools: Sequence[SlotPool], types: Sequence[NodeType], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Lower bounds on the seconds of an iteration, ``[choices]``; infinite where the model does not fit.

    Args:
        topology: all nodes.
        pools: the slots of all nodes, for each degree and micro-batch that plans may have.
        types: of nodes.
        counts: nodes of each type, ``[choices, types]``.
    """
    bounds = np.full(len(counts), np.inf)
    for pool in pools:
        bounds = np.minimum(bounds, _of_pool(topology, pool, types, counts))
    return bounds


def _of_pool(
    topology: Topology, pool: SlotPool, types: Sequence[NodeType], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    per_node = _slots_per_node(topology, pool, types)
    slots = counts @ per_node
    bounds = PipelineBounds.of_pool(pool)
    work, present, held = bounds.work_seconds, slots > 0, bounds.blocks_per_stage
    fits = ((slots * held).sum(axis=1) >= bounds.blocks) & (
        (slots.sum(axis=1) > 1) | (present & bounds.hold_the_model).any(axis=1)
    )
    counts, slots, present = counts[fits], slots[fits], present[fits]
    total, number = pool.total_micro_batches, slots.sum(axis=1)
    power = (slots / work).sum(axis=1)
    first = np.where(present, work, np.inf).min(axis=1)
    whole = (present & bounds.hold_the_model).any(axis=1)  # a pipeline of one stage needs more memory
    stages = np.maximum(np.ceil(bounds.blocks / np.where(present, held, 0).max(axis=1)), np.where(whole, 1, 2))
    most = np.minimum(np.floor(number / stages), total)
    inside, between = _bandwidths(topology, types, counts)
    in_a_node = np.where(counts > 0, per_node.sum(axis=1), 0).max(axis=1)
    gradients = float(pool.kinds[0].costs.gradient_bytes.sum())
    best = np.full(len(counts), np.inf)
    for start, stop in pairwise(_ranges(int(most.max(initial=0)))):
        passes = np.maximum(total / power, first + (total - np.minimum(stop - 1, most)) / power)
        rate = np.where(start <= in_a_node, np.maximum(inside, between), between)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            sums = 2 * (start - 1) * gradients / number / rate if start > 1 else 0.0
        seconds = passes + sums
        best = np.minimum(best, np.where(start <= most, seconds, np.inf))
    found = np.full(len(fits), np.inf)
    found[fits] = best * (1 - 1e-9)
    return found


def _ranges(most: int) -> list[int]:
    """Where ranges of numbers of pipelines begin, and one more than the last number."""
    starts = {round(1.15**power) for power in range(math.ceil(math.log(most + 1, 1.15)) + 1)} if most else set()
    return sorted({each for each in starts if each <= most} | {most + 1})


def _bandwidths(
    topology: Topology, types: Sequence[NodeType], counts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes per second of the fastest link inside a node, and between nodes, ``[choices]``; 0 if there is none."""
    rates = np.array([topology.nodes[each.nodes[0]].inside.bytes_per_second for each in types])
    inside = np.where(counts > 0, rates, 0.0).max(axis=1, initial=0.0)
    between = np.zeros(len(counts))
    for one, other in combinations_with_replacement(range(len(types)), 2):
        if one == other and len(types[one].nodes) < 2:
            continue
        try:
            channel = topology.node_channel(types[one].nodes[0], types[other].nodes[-1])
        except ValueError:
            continue
        both = (counts[:, one] > 1) if one == other else (counts[:, one] > 0) & (counts[:, other] > 0)
        between = np.where(both, np.maximum(between, channel.bytes_per_second), between)
    return inside, between


def _slots_per_node(topology: Topology, pool: SlotPool, types: Sequence[NodeType]) -> NDArray[np.int64]:
    """Slots in a node, ``[types, kinds]``."""
    type_of = {number: place for place, each in enumerate(types) for number in each.nodes[:1]}
    slots = np.zeros((len(types), len(pool.kinds)), dtype=np.int64)
    for kind, each in enumerate(pool.kinds):
        for ranks in each.slots:
            place = type_of.get(topology.devices[ranks[0]].node)
            if place is not None:
                slots[place, kind] += 1
    return slots
