"""Which backend and which network a group of ranks communicates over, and the environment that brings it about.

[Note: what is read when]  NCCL reads the *name of the network*, ``NCCL_NET`` ("IB" for InfiniBand and RoCE, "Socket"
for Ethernet) or ``ncclConfig_t.netName``, for every communicator that it makes (init.cc, ``envConfigOverride``; the
variable goes before the configuration). All else that chooses NICs is read once per process, when its network is used
for the first time: ``NCCL_IB_HCA``, ``NCCL_IB_GID_INDEX``, ``NCCL_IB_DISABLE`` and ``NCCL_SOCKET_IFNAME`` (net_ib.cc,
net_socket.cc, param.cc; NVIDIA/nccl, issue 443). That suffices: a rank has one node, hence one set of adapters, and
only between RDMA and Ethernet must its groups differ. Gloo reads ``GLOO_SOCKET_IFNAME`` for each group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .all_reduce import ring_hops, ring_network
from .topology import Topology

__all__ = ["Adapter", "Network", "group_network", "process_environment"]

RDMA = ("InfiniBand", "RoCE")
ETHERNET = "Ethernet"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What a node calls its NICs of one kind."""

    interface: str | None = None
    """Of the operating system, e.g. "eth0"; Gloo and NCCL's sockets need one."""
    hca: str | None = None
    """RDMA devices as ``NCCL_IB_HCA`` takes them, e.g. "mlx5_0" or "=mlx5_0:1,mlx5_1:1"; None leaves it to NCCL."""
    gid_index: int | None = None
    """RoCE's, as ``NCCL_IB_GID_INDEX`` takes it; None leaves it to NCCL, which finds it from 2.21 on."""


@dataclass(frozen=True)
class Network:
    """What the members of a group have in common."""

    backend: Literal["nccl", "gloo"]
    kind: str
    """Of the slowest channel in its ring: "NVLink", "InfiniBand", "RoCE", "Ethernet", …; "" for a single device."""
    nccl_net: Literal["IB", "Socket"] | None = None
    """Between nodes, for NCCL; None leaves the choice to NCCL, as inside a node."""

    def environment(self, adapters: Mapping[str, Adapter] | None = None) -> dict[str, str]:
        """Variables to set while this group's communicator is made, on a node with ``adapters`` by kind of NIC.

        Gloo speaks IP, also over InfiniBand if the adapter names an interface; without one Gloo takes the interface of
        the host's name.
        """
        if self.backend == "nccl":
            return {} if self.nccl_net is None else {"NCCL_NET": self.nccl_net}
        adapter = (adapters or {}).get(self.kind)
        return {} if adapter is None or adapter.interface is None else {"GLOO_SOCKET_IFNAME": adapter.interface}


def group_network(topology: Topology, group: Sequence[int]) -> Network:
    """NCCL among GPUs, Gloo as soon as a CPU takes part (ADAPT, section 6); and the network that all hops can use.

    A CPU is a kind of device whose name begins with "cpu". Where hops differ the whole group takes the slowest's: one
    communicator of NCCL has one network.

    Raises:
        ValueError: an empty group, no such device, one named twice, or two that cannot reach each other.
    """
    if not group:
        raise ValueError("a group needs a device")
    hops = ring_hops(topology, group)
    kinds = {topology.devices[device].kind.name for device in group}
    backend: Literal["nccl", "gloo"] = "gloo" if any(name.lower().startswith("cpu") for name in kinds) else "nccl"
    if not hops:
        kind = topology.nodes[topology.devices[group[0]].node].inside.kind if len(group) > 1 else ""
        return Network(backend, kind)
    kind = ring_network(topology, hops)
    if backend == "gloo":
        return Network(backend, kind)
    rdma = kind in RDMA and all(topology.node_channel(*hop).kind == kind for hop in hops)
    return Network(backend, kind, "IB" if rdma else "Socket")


def process_environment(adapters: Mapping[str, Adapter]) -> dict[str, str]:
    """Variables that a process needs before its first communicator. See Note: what is read when.

    Args:
        adapters: of its node, by kind of NIC.
    """
    environment = {}
    for kind in RDMA:
        adapter = adapters.get(kind, Adapter())
        if adapter.hca is not None:
            environment["NCCL_IB_HCA"] = adapter.hca
        if kind == "RoCE" and adapter.gid_index is not None:
            environment["NCCL_IB_GID_INDEX"] = str(adapter.gid_index)
    # Communicators of several clusters also say hello over this interface, so it must be the one that all can reach.
    ethernet = adapters.get(ETHERNET)
    if ethernet is not None and ethernet.interface is not None:
        environment["NCCL_SOCKET_IFNAME"] = f"={ethernet.interface}"
    return environment
