"""Tensor-parallel groups arranged by the network that their nodes share, and pipeline stages formed from them.

Node group: the nodes of one cluster whose fastest NICs are of the same kind, so that they can all communicate over it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from ..cluster.topology import Topology

__all__ = [
    "NodeGroup",
    "StageGroups",
    "TensorGroup",
    "find_node_groups",
    "find_tensor_groups",
    "form_stages",
    "node_group_orders",
]

MAX_PERMUTED = 6
"""Up to this number of node groups, all their orders are tried."""

TensorGroup = tuple[int, ...]
"""The devices of one tensor-parallel group."""
StageGroups = tuple[TensorGroup, ...]
"""The tensor-parallel groups of one stage, one per replica."""
NodeGroup = tuple[tuple[TensorGroup, ...], ...]
"""For each node of a node group, the tensor-parallel groups that fit into it."""


def find_node_groups(topology: Topology, tensor_parallel: int) -> list[NodeGroup]:
    """All nodes that can hold a tensor-parallel group, grouped by cluster and kind of their fastest NIC.

    A node without a NIC is a node group of its own.
    """
    nodes: dict[tuple[int, str], list[tuple[TensorGroup, ...]]] = defaultdict(list)
    for node in topology.nodes:
        groups = tuple(find_tensor_groups(topology, node.devices, tensor_parallel))
        if groups:
            nodes[node.cluster, node.nics[0].kind if node.nics else node.name].append(groups)
    return [tuple(each) for each in nodes.values()]


def find_tensor_groups(topology: Topology, devices: Sequence[int], tensor_parallel: int) -> Iterator[TensorGroup]:
    """Divide the devices of one node into groups of one kind of device. A remainder stays unused."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for device in devices:
        kinds[topology.devices[device].kind.name].append(device)
    for same_kind in kinds.values():
        for start in range(0, len(same_kind) - tensor_parallel + 1, tensor_parallel):
            yield tuple(same_kind[start : start + tensor_parallel])


def node_group_orders(node_groups: list[NodeGroup]) -> Iterator[tuple[NodeGroup, ...]]:
    """Orders of the node groups: with at most ``MAX_PERMUTED`` all of them, otherwise as launched and largest first.

    Each order comes twice: with the nodes inside a node group as launched, and with the largest node first.
    """
    largest_node_first: list[NodeGroup] = [tuple(sorted(each, key=lambda node: -len(node))) for each in node_groups]
    for arranged in (node_groups, largest_node_first):
        if len(arranged) <= MAX_PERMUTED:
            yield from permutations(arranged)
        else:
            yield tuple(arranged)
            yield tuple(sorted(arranged, key=lambda node_group: -sum(map(len, node_group))))


def form_stages(
    order: Sequence[NodeGroup], pipeline: int, replicas: int, compact: bool
) -> tuple[StageGroups, ...] | None:
    """Form ``pipeline`` stages of ``replicas`` tensor-parallel groups each; None if there are too few groups.

    Complete stages are formed in each node group in turn, as far as possible within one node. If these are too few, the
    remaining tensor-parallel groups of all node groups form further stages. Such a stage is placed after the stages of
    the node group that its first tensor-parallel group belongs to.

    Args:
        compact: If more complete stages can be formed than are needed, keep those of the first node groups; False keeps
            those within one node first.
    """
    formed: list[_FormedStage] = []
    left: list[tuple[int, TensorGroup]] = []
    for position, node_group in enumerate(order):
        # Per node, this many tensor-parallel groups form stages inside the node.
        divisible = [len(node) // replicas * replicas for node in node_group]
        inside, _ = _cut([group for node, n in zip(node_group, divisible, strict=True) for group in node[:n]], replicas)
        across, rest = _cut(
            [group for node, n in zip(node_group, divisible, strict=True) for group in node[n:]], replicas
        )
        formed += [_FormedStage(0, position, groups) for groups in inside]
        formed += [_FormedStage(1, position, groups) for groups in across]
        left += [(position, group) for group in rest]
    if len(formed) < pipeline:
        for start in range(0, len(left) - replicas + 1, replicas):
            chosen = left[start : start + replicas]
            formed.append(_FormedStage(2, chosen[0][0], tuple(group for _, group in chosen)))
    if len(formed) < pipeline:
        return None
    formed.sort(key=lambda one: (one.spread == 2, one.position if compact else 0, one.spread, one.position))
    kept = sorted(formed[:pipeline], key=lambda one: (one.position, one.spread == 2, one.groups))
    return tuple(one.groups for one in kept)


@dataclass(frozen=True)
class _FormedStage:
    spread: Literal[0, 1, 2]
    """0: within one node, 1: within one node group, 2: over several node groups."""
    position: int
    """Position, in the order of the node groups, of the first node group that the stage uses."""
    groups: StageGroups


def _cut(groups: list[TensorGroup], replicas: int) -> tuple[list[StageGroups], list[TensorGroup]]:
    """As many stages of ``replicas`` groups as possible, and the remaining groups."""
    stop = len(groups) // replicas * replicas
    return [tuple(groups[start : start + replicas]) for start in range(0, stop, replicas)], groups[stop:]
