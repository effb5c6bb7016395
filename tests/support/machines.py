"""Clusters for tests of layouts: nodes of devices with NVLink inside, an RDMA NIC and Ethernet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology

GIGABIT = 1e9 / 8
NVLINK = Channel("NVLink", 300e9)


@dataclass(frozen=True)
class Nodes:
    """Of one cluster: their fastest kind of NIC, and how many devices each has."""

    nic: str
    sizes: Sequence[int]
    nics: int = 1


def machines(
    *clusters: Nodes, latency_seconds: float = 5e-6, one_cluster: bool = False, device: str = "A100-80"
) -> Topology:
    """200 Gbit/s of InfiniBand or RoCE per NIC and 25 Gbit/s of Ethernet per node, as in Holmes' Table 1."""
    kind = DeviceKind(device, 80 << 30, 312e12)
    devices: list[Device] = []
    nodes: list[Node] = []
    for number, cluster in enumerate(clusters):
        place = 0 if one_cluster else number
        for size in cluster.sizes:
            numbers = tuple(range(len(devices), len(devices) + size))
            devices += [Device(kind, len(nodes), place)] * size
            nics = [Channel("Ethernet", 25 * GIGABIT, latency_seconds)]
            if cluster.nic != "Ethernet":
                nics = [Channel(cluster.nic, 200 * GIGABIT, latency_seconds)] * cluster.nics + nics
            nodes.append(Node(f"node-{len(nodes)}", place, numbers, NVLINK, tuple(nics)))
    count = 1 if one_cluster else len(clusters)
    return Topology(tuple(devices), tuple(nodes), tuple(f"cluster-{number}" for number in range(count)))
