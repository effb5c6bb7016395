"""Clusters for tests: nodes with NVLink inside, RDMA NICs and Ethernet, and nodes of any devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology

GIGABIT = 1e9 / 8
NVLINK = Channel("NVLink", 300e9)


@dataclass(frozen=True)
class Nodes:
    """The nodes of one cluster."""

    nic: str
    """Kind of the fastest NIC: "InfiniBand", "RoCE" or "Ethernet"."""
    sizes: Sequence[int]
    """Number of devices of each node."""
    nics: int = 1
    """Number of RDMA NICs per node."""


def machines(
    *clusters: Nodes, latency_seconds: float = 5e-6, one_cluster: bool = False, device: str = "A100-80"
) -> Topology:
    """The nodes of each cluster, with 200 Gbit/s per InfiniBand or RoCE NIC and 25 Gbit/s of Ethernet per node, as in
    Holmes' Table 1. In ``one_cluster`` nodes may have different NICs. ``device``: name of the kind of all devices."""
    kind = DeviceKind(device, 80 << 30, 312e12)
    devices: list[Device] = []
    nodes: list[Node] = []
    for number, cluster in enumerate(clusters):
        index = 0 if one_cluster else number
        for size in cluster.sizes:
            numbers = tuple(range(len(devices), len(devices) + size))
            devices += [Device(kind, len(nodes), index)] * size
            nics = [Channel("Ethernet", 25 * GIGABIT, latency_seconds)]
            if cluster.nic != "Ethernet":
                nics = [Channel(cluster.nic, 200 * GIGABIT, latency_seconds)] * cluster.nics + nics
            nodes.append(Node(f"node-{len(nodes)}", index, numbers, NVLINK, tuple(nics)))
    count = 1 if one_cluster else len(clusters)
    return Topology(tuple(devices), tuple(nodes), tuple(f"cluster-{number}" for number in range(count)))


def of_nodes(
    nodes: Iterable[tuple[Sequence[DeviceKind], Channel, tuple[Channel, ...]]], inside_total: float = math.inf
) -> Topology:
    """One cluster of nodes with these devices, the channel between them, and NICs; transfers inside share a total."""
    devices: list[Device] = []
    made = []
    for number, (kinds, inside, nics) in enumerate(nodes):
        ranks = tuple(range(len(devices), len(devices) + len(kinds)))
        devices += [Device(kind, number, 0) for kind in kinds]
        made.append(Node(f"n{number}", 0, ranks, inside, nics, inside_total))
    return Topology(tuple(devices), tuple(made), ("here",))
