"""Holmes' layout: groups by network card, so that each kind of traffic has the network it needs (section 3)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ..cluster.topology import Topology
from .layout import Layout, check_degrees, naive_layout
from .layout_costs import layout_costs
from .node_groups import Island, cells_of, islands_of, orders, stages_of

__all__ = ["nic_layout"]

MEGABYTE = 10**6


def nic_layout(
    topology: Topology,
    tensor_parallel: int,
    pipeline: int,
    data_parallel: int,
    *,
    gradient_bytes: float | Sequence[float] = 1000 * MEGABYTE,
    activation_bytes: float = 32 * MEGABYTE,
    micro_batches: int = 8,
) -> Layout:
    """Holmes' layout: every stage's replicas in one cluster, next to each other.

    Where clusters are no multiple of a stage's devices and none can stay out, some stages must span clusters: as few
    as possible, made of what is left over. Of layouts that do equally well the one with the least :func:`layout_costs`
    under the given sizes is taken: orders of clusters and nodes, and the orders as launched. ``Layout.verify`` says
    where the definition does not hold.

    Raises:
        ValueError: a degree below 1, more places than devices, nodes too small for the tensor-parallel degree, or
            devices that would have to reach each other and cannot.
    """
    islands = _islands_with_room(topology, tensor_parallel, pipeline, data_parallel)

    unreachable: list[ValueError] = []

    def rank(layout: Layout) -> tuple[float, float]:
        try:
            costs = layout_costs(topology, layout, gradient_bytes, activation_bytes, micro_batches)
            return len(layout.verify(topology)), costs.seconds
        except ValueError as error:
            unreachable.append(error)
            return math.inf, math.inf

    found = dict.fromkeys(
        stages_of(order, pipeline, data_parallel, compact) for order in orders(islands) for compact in (True, False)
    )
    candidates = [Layout(tuple(zip(*stages, strict=True))) for stages in found if stages]
    # With large activations and small gradients a pipeline inside a node may beat replicas inside a node.
    cells = {cell for island in islands for node in island for cell in node}
    launched = (naive_layout(topology, tensor_parallel, pipeline, data_parallel, outside) for outside in (True, False))
    candidates += [layout for layout in launched if cells.issuperset(layout.tensor_groups)]
    best = min(candidates, key=rank)
    if len(unreachable) == len(candidates):
        raise unreachable[0]
    return best


def _islands_with_room(topology: Topology, tensor_parallel: int, pipeline: int, data_parallel: int) -> list[Island]:
    check_degrees(topology, tensor_parallel, pipeline, data_parallel)
    islands = islands_of(topology, tensor_parallel)
    available = sum(len(cells) for island in islands for cells in island)
    if available < pipeline * data_parallel:
        raise ValueError(
            f"{pipeline} stages of {data_parallel} replicas take {pipeline * data_parallel} tensor-parallel groups of "
            f"{tensor_parallel}, and the nodes hold {available} ({_group_counts(topology, tensor_parallel)}): a group "
            "stays inside a node, on devices of one kind; lower a degree"
        )
    return islands


def _group_counts(topology: Topology, tensor_parallel: int) -> str:
    counts = Counter(
        (len(node.devices), sum(1 for _ in cells_of(topology, node.devices, tensor_parallel)))
        for node in topology.nodes
    )
    return ", ".join(
        f"{nodes} nodes of {devices} devices: {groups} each" for (devices, groups), nodes in counts.items()
    )
