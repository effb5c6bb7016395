"""Backend and network of a group of ranks, and the environment variables that select them.

[Note: what is read when] NCCL reads the *name of the network*, ``NCCL_NET`` ("IB" for InfiniBand and RoCE, "Socket" for
Ethernet) or ``ncclConfig_t.netName``, for every communicator (init.cc, ``envConfigOverride``; the variable takes
precedence). It reads ``NCCL_IB_HCA``, ``NCCL_IB_GID_INDEX``, ``NCCL_IB_DISABLE`` and ``NCCL_SOCKET_IFNAME`` once per
process, at the first use of their network (net_ib.cc, net_socket.cc, param.cc; NVIDIA/nccl, issue 443). A rank
has one set of adapters, so its groups differ only in RDMA or Ethernet. Gloo reads ``GLOO_SOCKET_IFNAME`` per group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .all_reduce import ring_hops, ring_network
from .topology import Topology

RDMA = ("InfiniBand", "RoCE")
ETHERNET = "Ethernet"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    interface: str | None = None
    """Name in the operating system, e.g. "eth0"; Gloo and NCCL's sockets need it."""
    hca: str | None = None
    """RDMA devices as the value of ``NCCL_IB_HCA``, e.g. "mlx5_0" or "=mlx5_0:1,mlx5_1:1"; None: NCCL chooses."""
    gid_index: int | None = None
    """GID index of RoCE, the value of ``NCCL_IB_GID_INDEX``; None: NCCL chooses it, from version 2.21 on."""


@dataclass(frozen=True)
class Network:
    backend: Literal["nccl", "gloo"]
    kind: str
    """Of the slowest channel in the group's ring: "NVLink", "InfiniBand", "RoCE", "Ethernet", …; "" for one device."""
    nccl_net: Literal["IB", "Socket"] | None = None
    """Value of ``NCCL_NET`` for a group that spans nodes; None: NCCL chooses, as it does inside a node."""

    def environment(self, adapters: Mapping[str, Adapter] | None = None) -> dict[str, str]:
        """Environment variables to set while this group's communicator is made.

        Gloo uses IP, also over InfiniBand. Without an interface it uses the one that the host name resolves to.
        """
        if self.backend == "nccl":
            return {} if self.nccl_net is None else {"NCCL_NET": self.nccl_net}
        adapter = (adapters or {}).get(self.kind)
        return {} if adapter is None or adapter.interface is None else {"GLOO_SOCKET_IFNAME": adapter.interface}


def group_network(topology: Topology, group: Sequence[int]) -> Network:
    """Backend of a group, and the network that all hops of its ring can use.

    If a CPU is in the group (a kind whose name begins with "cpu"), all use Gloo, else NCCL (ADAPT, section 6). An NCCL
    communicator has one network, so the slowest one of the hops.
    """
    if not group:
        raise ValueError("the group is empty; it needs a device")
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
    """Environment variables that a process needs before its first communicator. See Note: what is read when."""
    environment = {}
    for kind in RDMA:
        adapter = adapters.get(kind, Adapter())
        if adapter.hca is not None:
            environment["NCCL_IB_HCA"] = adapter.hca
        if kind == "RoCE" and adapter.gid_index is not None:
            environment["NCCL_IB_GID_INDEX"] = str(adapter.gid_index)
    # Communicators that span clusters first connect over this interface too, so all nodes must reach it.
    ethernet = adapters.get(ETHERNET)
    if ethernet is not None and ethernet.interface is not None:
        environment["NCCL_SOCKET_IFNAME"] = f"={ethernet.interface}"
    return environment
