"""Which nodes of a cluster to take: the nodes in the cluster file are those that can be had at most."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Device, Node, Topology
from ..plans.runnable import NoPlanError

__all__ = ["NodeType", "choices", "node_types", "taken", "within"]

MAX_CHOICES = 20_000
"""If there are more ways to choose numbers of nodes, some numbers are left out, first of the types with most nodes."""


@dataclass(frozen=True)
class NodeType:
    """Nodes that are alike, in one cluster, and have one price."""

    name: str
    """What their names have in common."""
    nodes: tuple[int, ...]
    """Their numbers."""
    dollars_per_hour: float
    """Of each of them."""


def node_types(topology: Topology) -> list[NodeType]:
    """The types of nodes, in the order of their first nodes."""
    numbers: dict[object, list[int]] = {}
    for number, node in enumerate(topology.nodes):
        devices = tuple((topology.devices[rank].kind, topology.devices[rank].speed) for rank in node.devices)
        same = (node.inside, node.nics, node.inside_bytes_per_second, node.dollars_per_hour)
        key = (node.cluster, devices, *same)
        numbers.setdefault(key, []).append(number)
    return [
        NodeType(
            _common_name([topology.nodes[number].name for number in alike]),
            tuple(alike),
            topology.nodes[alike[0]].dollars_per_hour or 0.0,
        )
        for alike in numbers.values()
    ]


def choices(types: Sequence[NodeType]) -> NDArray[np.int64]:
    """How many nodes of each type to take: all ways but none at all, ``[choices, types]``; see :data:`MAX_CHOICES`."""
    counts = [np.arange(len(each.nodes) + 1) for each in types]
    while np.prod([float(len(each)) for each in counts]) > MAX_CHOICES:
        longest = max(range(len(counts)), key=lambda number: len(counts[number]))
        if len(counts[longest]) <= 2:
            break
        counts[longest] = np.unique(np.concatenate([counts[longest][::2], counts[longest][-1:]]))
    rows = np.array(list(itertools.islice(itertools.product(*counts), 1, MAX_CHOICES + 1)), dtype=np.int64)
    return rows.reshape(-1, len(types))


def within(
    topology: Topology, types: Sequence[NodeType], counts: NDArray[np.int64], at_most: Mapping[str, int]
) -> NDArray[np.bool_]:
    """Which choices keep to quotas, ``[choices]``.

    Args:
        topology: all nodes.
        types: of nodes.
        counts: nodes of each type, ``[choices, types]``.
        at_most: by the name of a type of nodes, how many of these nodes; by a kind of devices, how many such devices.

    Raises:
        NoPlanError: no choice keeps to the quotas.
        ValueError: there is no such type or kind.
    """
    allowed = np.ones(len(counts), dtype=bool)
    devices = [
        Counter(topology.devices[rank].kind.name for rank in topology.nodes[each.nodes[0]].devices) for each in types
    ]
    known = {each.name: [float(each is other) for other in types] for each in types}
    known |= {kind: [each[kind] for each in devices] for kind in sorted(set().union(*devices))}
    for name, most in at_most.items():
        if name not in known:
            raise ValueError(
                f"at most {most} of {name}: there are no such nodes or devices; the cluster has {', '.join(known)}"
            )
        allowed &= counts @ np.array(known[name]) <= most
    if not allowed.any():
        words = ", ".join(f"{most} of {name}" for name, most in at_most.items())
        raise NoPlanError(f"at most {words}: no node is left; allow more")
    return allowed


def taken(topology: Topology, types: Sequence[NodeType], counts: Sequence[int]) -> tuple[Topology, tuple[int, ...]]:
    """The cluster with only so many nodes of each type, and the number of each of its devices in ``topology``."""
    chosen = sorted(number for each, count in zip(types, counts, strict=True) for number in each.nodes[:count])
    devices: list[Device] = []
    nodes: list[Node] = []
    numbers: list[int] = []
    for number in chosen:
        node = topology.nodes[number]
        first = len(devices)
        devices += [replace(topology.devices[rank], node=len(nodes)) for rank in node.devices]
        numbers += node.devices
        nodes.append(replace(node, devices=tuple(range(first, len(devices)))))
    return replace(topology, devices=tuple(devices), nodes=tuple(nodes)), tuple(numbers)


def _common_name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return names[0].rpartition("-")[0] or names[0]
