"""Links between the ranks of a batch profile, from the machines that ``colossal-hetero probe`` has measured."""

from __future__ import annotations

from itertools import combinations

from ..cluster.link import MeasuredLink
from ..cluster.topology import Channel, Topology
from .batch_profile import BatchProfile

__all__ = ["with_cluster_links"]

ETHERNET = "Ethernet"
"""The kind of NIC that Gloo uses between machines."""


def with_cluster_links(profile: BatchProfile, topology: Topology) -> BatchProfile:
    """``profile`` with a link between all pairs of ranks in each protocol that both have.

    Device i of ``topology`` is rank i. Between machines, NCCL uses the fastest kind of NIC that both have, and Gloo
    uses Ethernet, if both have it. Inside a machine, both protocols have the same speed, because a cluster file has
    one: for GPUs that of NCCL, so that Gloo among them looks faster than it is. If a bandwidth depends on the size of
    the message, it is that of a message in a ring all-reduce: the model's gradients divided by the number of ranks.

    Raises:
        ValueError: the profile has links already; or the devices are not those of the profile: their number differs, or
            devices of one kind in ``topology`` have different names in the profile; or two of them cannot reach each
            other.
    """
    if profile.links:
        raise ValueError("the profile has measured links already; leave out the cluster file, or remove these links")
    _check_devices(profile, topology)
    message_bytes = max(profile.model.gradient_bytes / len(profile.ranks), 1.0)
    links = []
    for a, b in combinations(range(len(profile.ranks)), 2):
        both = [profile.kinds[profile.ranks[rank]].protocols for rank in (a, b)]
        for protocol in both[0]:
            if protocol in both[1]:
                channel = _channel(topology, a, b, protocol)
                links.append(
                    MeasuredLink(
                        ranks=(a, b),
                        protocol=protocol,
                        latency_seconds=channel.latency_seconds,
                        bytes_per_second=channel.bandwidth(message_bytes),
                    )
                )
    return profile.model_copy(update={"links": tuple(links)})


def _check_devices(profile: BatchProfile, topology: Topology) -> None:
    if len(topology.devices) != len(profile.ranks):
        raise ValueError(
            f"the cluster has {len(topology.devices)} devices, the profile {len(profile.ranks)} ranks; "
            "probe the machines that the profile was measured on, with one rank per device"
        )
    names: dict[str, tuple[int, str]] = {}
    for rank, (device, name) in enumerate(zip(topology.devices, profile.devices, strict=True)):
        first, known = names.setdefault(device.kind.name, (rank, name))
        if name != known:
            raise ValueError(
                f"ranks {first} and {rank} are of the same kind in the cluster ({device.kind.name}), but {known} and "
                f"{name} in the profile; start the ranks in the same order for both, cluster by cluster"
            )


def _channel(topology: Topology, a: int, b: int, protocol: str) -> Channel:
    nodes = [topology.nodes[topology.devices[rank].node] for rank in (a, b)]
    if protocol == "gloo" and nodes[0] is not nodes[1]:
        cards = [[nic for nic in node.nics if nic.kind == ETHERNET] for node in nodes]
        if all(cards):
            fastest = [max(each, key=lambda nic: nic.bytes_per_second) for each in cards]
            return min(fastest, key=lambda nic: nic.bytes_per_second)
    return topology.channel(a, b)
