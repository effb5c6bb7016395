"""Holmes' layout (section 3): groups by network card, so that each kind of traffic has the network it needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ..cluster.topology import Topology
from .layout import Layout, check_degrees, naive_layout
from .layout_costs import layout_costs
from .node_groups import NodeGroup, find_node_groups, find_tensor_groups, form_stages, node_group_orders

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
    """Holmes' layout: all replicas of a stage are in one cluster, next to each other.

    If the devices of the clusters are not multiples of a stage's devices and no device can be left out, some stages
    must span clusters. There are as few of these as possible; they consist of the devices that remain after all other
    stages are formed.

    Several orders of clusters and nodes, and the ranks as launched, are compared. The result is the layout with the
    fewest violations (:meth:`Layout.verify`) and, among those, the lowest :func:`layout_costs`.

    Args:
        topology: Machines.
        tensor_parallel: Devices in a tensor-parallel group.
        pipeline: Stages.
        data_parallel: Replicas.
        gradient_bytes: Gradients per device; one number per stage, or one for all stages.
        activation_bytes: Bytes that a device sends to the next stage per micro-batch.
        micro_batches: Micro-batches per iteration and replica.

    Raises:
        ValueError: A degree is below 1, there are more places than devices, the nodes are too small for the
            tensor-parallel degree, or every layout needs a link between devices that cannot reach each other.
    """
    node_groups = _node_groups_with_room(topology, tensor_parallel, pipeline, data_parallel)

    unreachable: list[ValueError] = []

    def rank(layout: Layout) -> tuple[float, float]:
        try:
            costs = layout_costs(topology, layout, gradient_bytes, activation_bytes, micro_batches)
            return len(layout.verify(topology)), costs.seconds
        except ValueError as error:
            unreachable.append(error)
            return math.inf, math.inf

    found = dict.fromkeys(
        form_stages(order, pipeline, data_parallel, compact)
        for order in node_group_orders(node_groups)
        for compact in (True, False)
    )
    candidates = [Layout(tuple(zip(*stages, strict=True))) for stages in found if stages]
    # If activations are large and gradients small, a pipeline inside a node may be faster than replicas inside a node.
    tensor_groups = {group for node_group in node_groups for node in node_group for group in node}
    launched = (naive_layout(topology, tensor_parallel, pipeline, data_parallel, outside) for outside in (True, False))
    candidates += [layout for layout in launched if tensor_groups.issuperset(layout.tensor_groups)]
    best = min(candidates, key=rank)
    if len(unreachable) == len(candidates):
        raise unreachable[0]
    return best


def _node_groups_with_room(
    topology: Topology, tensor_parallel: int, pipeline: int, data_parallel: int
) -> list[NodeGroup]:
    """The node groups, after a check that they hold enough tensor-parallel groups."""
    check_degrees(topology, tensor_parallel, pipeline, data_parallel)
    node_groups = find_node_groups(topology, tensor_parallel)
    available = sum(len(node) for node_group in node_groups for node in node_group)
    if available < pipeline * data_parallel:
        raise ValueError(
            f"{pipeline} stages of {data_parallel} replicas need {pipeline * data_parallel} tensor-parallel groups of "
            f"{tensor_parallel} devices, but the nodes hold {available} ({_group_counts(topology, tensor_parallel)}). "
            "All devices of a group must be in one node and of one kind; lower a degree"
        )
    return node_groups


def _group_counts(topology: Topology, tensor_parallel: int) -> str:
    counts = Counter(
        (len(node.devices), sum(1 for _ in find_tensor_groups(topology, node.devices, tensor_parallel)))
        for node in topology.nodes
    )
    return ", ".join(
        f"{nodes} nodes of {devices} devices: {groups} each" for (devices, groups), nodes in counts.items()
    )
