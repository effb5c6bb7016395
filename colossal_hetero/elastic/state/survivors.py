"""The cluster as it is now: the devices of the members that are there."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from ...planner.cluster.topology import Device, Node, Topology

__all__ = ["surviving_topology"]


def surviving_topology(cluster: Topology, nodes: Sequence[str]) -> Topology:
    """The part of a cluster that consists of one device for each member.

    Args:
        cluster: with all nodes that may be members.
        nodes: name of each member's node, by rank, in the order of the cluster.

    Returns:
        the devices, numbered like the ranks, on the nodes that have any.

    Raises:
        ValueError: a node is not in the cluster, or has fewer devices than members.
    """
    members = Counter(nodes)
    unknown = sorted(members.keys() - {node.name for node in cluster.nodes})
    if unknown:
        raise ValueError(
            f"node {', '.join(unknown)} is not in the cluster file, which has "
            f"{', '.join(node.name for node in cluster.nodes)}; add it there, or start it with one of these names"
        )
    devices: list[Device] = []
    kept: list[Node] = []
    for number, node in enumerate(cluster.nodes):
        count = members[node.name]
        if count > len(node.devices):
            raise ValueError(
                f"node {node.name} has {len(node.devices)} devices in the cluster file, but {count} members; start at "
                "most one for each device"
            )
        if not count:
            continue
        first = len(devices)
        devices += [dataclasses.replace(cluster.devices[device], node=len(kept)) for device in node.devices[:count]]
        kept.append(dataclasses.replace(node, devices=tuple(range(first, len(devices)))))
        assert nodes[first] == node.name == cluster.nodes[number].name, "members are in the order of the cluster"
    return dataclasses.replace(cluster, devices=tuple(devices), nodes=tuple(kept))
