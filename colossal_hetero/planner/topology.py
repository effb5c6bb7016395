"""The machines that a plan is made for: devices in nodes in clusters, and how fast they reach each other."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

__all__ = ["Channel", "Device", "DeviceKind", "Node", "Topology"]

MEGABYTE = 1e6
LARGEST_EXPONENT = 30


@dataclass(frozen=True)
class Channel:
    """One way from device to device: ``latency + bytes / bandwidth``.

    Bandwidth may depend on the message: with ``curve = (a, b, c)`` it is ``a·x² + b·x + c`` GB/s with
    ``x = log2(megabytes)``, at most ``bytes_per_second``.
    """

    kind: str
    """E.g. "NVLink", "PCIe", "InfiniBand", "RoCE", "Ethernet"."""
    bytes_per_second: float
    latency_seconds: float = 0.0
    curve: tuple[float, float, float] | None = None

    def seconds(self, message_bytes: float) -> float:
        """Time of one message; 0 for no bytes."""
        if message_bytes <= 0:
            return 0.0
        return self.latency_seconds + message_bytes / self.bandwidth(message_bytes)

    def bandwidth(self, message_bytes: float) -> float:
        """Bytes per second for messages of that size."""
        if self.curve is None:
            return self.bytes_per_second
        a, b, c = self.curve
        x = min(float(np.log2(max(message_bytes / MEGABYTE, 1e-6))), LARGEST_EXPONENT)
        fitted = (a * x * x + b * x + c) * 1e9
        # A fitted parabola may turn round outside of what was measured.
        return min(max(fitted, self.bytes_per_second * 1e-3), self.bytes_per_second)


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device."""

    name: str
    memory_bytes: int
    flops: float
    """Nominal dense half-precision FLOP/s, or measured ones."""


@dataclass(frozen=True)
class Device:
    """One device; its number is its rank as launched: cluster by cluster, node by node."""

    kind: DeviceKind
    node: int
    cluster: int
    speed: float = 1.0
    """Share of its kind's speed that it reaches: ¼ for one that is throttled to a quarter."""


@dataclass(frozen=True)
class Node:
    """A machine."""

    name: str
    cluster: int
    devices: tuple[int, ...]
    inside: Channel
    """Between its devices."""
    nics: tuple[Channel, ...]
    """By descending bandwidth."""


@dataclass(frozen=True)
class Topology:
    """All machines."""

    devices: tuple[Device, ...]
    nodes: tuple[Node, ...]
    clusters: tuple[str, ...]
    between: tuple[tuple[int, int, Channel], ...] = ()
    """Links between clusters, by cluster number."""

    def channel(self, a: int, b: int) -> Channel:
        """The fastest way between two devices.

        Raises:
            ValueError: there is none; the message names both nodes.
        """
        return self.node_channel(self.devices[a].node, self.devices[b].node)

    def node_channel(self, a: int, b: int) -> Channel:
        """Between nodes: within a cluster by the fastest kind of NIC that both have, at the slower one's bandwidth;
        between clusters by the link that is given, else by Ethernet where both have it.

        Raises:
            ValueError: there is no way.
        """
        return _node_channel(self, a, b) if a <= b else _node_channel(self, b, a)

    def slowest(self, devices: Iterable[int]) -> Channel:
        """The slowest channel among these devices, which sets the pace of a ring; inside for one node.

        Raises:
            ValueError: two of them cannot reach each other, or there are fewer than two.
        """
        nodes = sorted({self.devices[device].node for device in devices})
        if len(nodes) == 1:
            return self.nodes[nodes[0]].inside
        pairs = {self.node_channel(a, b) for i, a in enumerate(nodes) for b in nodes[i + 1 :]}
        return min(pairs, key=lambda channel: channel.bytes_per_second)


@functools.lru_cache(maxsize=1 << 20)
def _node_channel(topology: Topology, a: int, b: int) -> Channel:
    first, second = topology.nodes[a], topology.nodes[b]
    if a == b:
        return first.inside
    pairs = [
        (one, other)
        for one in first.nics
        for other in second.nics
        if one.kind == other.kind and (first.cluster == second.cluster or one.kind == "Ethernet")
    ]
    if first.cluster != second.cluster:
        wanted = {first.cluster, second.cluster}
        for one, other, channel in topology.between:
            if {one, other} == wanted:
                return channel
    if not pairs:
        raise ValueError(
            f"no link between node {first.name} ({', '.join(nic.kind for nic in first.nics) or 'no NIC'}) and node "
            f"{second.name} ({', '.join(nic.kind for nic in second.nics) or 'no NIC'}); give both a NIC of one kind, "
            "or a link between their clusters"
        )
    slower = (min(pair, key=lambda channel: channel.bytes_per_second) for pair in pairs)
    return max(slower, key=lambda channel: channel.bytes_per_second)
