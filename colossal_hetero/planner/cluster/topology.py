"""The machines that a plan is made for: devices in nodes in clusters, and how fast they reach each other."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from functools import cached_property

__all__ = ["Channel", "Device", "DeviceKind", "Node", "Topology"]

MEGABYTE = 1e6
SMALLEST_EXPONENT, LARGEST_EXPONENT = -20, 30
"""Of two, in megabytes: messages from a byte on."""
STEPS_PER_OCTAVE = 16


@dataclass(frozen=True)
class Channel:
    """One way from device to device: ``latency + bytes / bandwidth`` (ADAPT, section 6: Comm between two devices).

    Bandwidth may depend on the message: with ``curve = (a, b, c)`` it is ``a·x² + b·x + c`` GB/s with
    ``x = log2(megabytes)``, at most ``bytes_per_second``, and no message takes longer than a larger one.

    Raises:
        ValueError: a bandwidth that is not above 0, also that of a curve for large messages, or a latency below 0.
    """

    kind: str
    """E.g. "NVLink", "PCIe", "InfiniBand", "RoCE", "Ethernet"."""
    bytes_per_second: float
    latency_seconds: float = 0.0
    curve: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ValueError(f"a {self.kind} channel of {self.bytes_per_second} bytes per second; it must be above 0")
        if not self.latency_seconds >= 0:
            raise ValueError(f"a {self.kind} channel with a latency of {self.latency_seconds} s; it must be at least 0")
        if self.curve is not None and not math.isfinite(_least_message(self.curve, self.bytes_per_second)[0]):
            raise ValueError(f"a {self.kind} channel with curve {self.curve}, which gives large messages no bandwidth")

    def seconds(self, message_bytes: float) -> float:
        """Time of one message; 0 for no bytes."""
        if message_bytes <= 0:
            return 0.0
        return self.latency_seconds + message_bytes / self.bandwidth(message_bytes)

    def bandwidth(self, message_bytes: float) -> float:
        """Bytes per second for messages of that size."""
        if self.curve is None:
            return self.bytes_per_second
        least_bytes, least_seconds = _least_message(self.curve, self.bytes_per_second)
        if message_bytes < least_bytes:
            return message_bytes / least_seconds
        return _fitted_bandwidth(self.curve, self.bytes_per_second, math.log2(message_bytes / MEGABYTE))


def _fitted_bandwidth(curve: tuple[float, float, float], most: float, exponent: float) -> float:
    """Bytes per second for messages of ``2 ** exponent`` megabytes; never falling as messages grow."""
    a, b, c = curve
    if a != 0:
        turn = -b / (2 * a)
        # Beyond its turn a parabola no longer says what was measured.
        exponent = min(exponent, turn) if a < 0 else max(exponent, turn)
    return min((a * exponent * exponent + b * exponent + c) * 1e9, most)


@functools.lru_cache(maxsize=1024)
def _least_message(curve: tuple[float, float, float], most: float) -> tuple[float, float]:
    """The message, in bytes, that takes least, and its seconds: below what was measured a fitted curve falls to nothing
    and below, as if a smaller message took longer. All messages below take as long as that one."""
    least_bytes, least_seconds = math.inf, math.inf
    for step in range(LARGEST_EXPONENT * STEPS_PER_OCTAVE, SMALLEST_EXPONENT * STEPS_PER_OCTAVE - 1, -1):
        exponent = step / STEPS_PER_OCTAVE
        message, fitted = 2**exponent * MEGABYTE, _fitted_bandwidth(curve, most, exponent)
        if fitted <= 0 or message / fitted >= least_seconds:
            break
        least_bytes, least_seconds = message, message / fitted
    return least_bytes, least_seconds


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
    """All machines.

    Channels between nodes are found once for each pair of *node classes*: nodes of one cluster with equal NICs.
    """

    devices: tuple[Device, ...]
    nodes: tuple[Node, ...]
    clusters: tuple[str, ...]
    between: tuple[tuple[int, int, Channel], ...] = ()
    """Links between clusters, by cluster number."""

    def __hash__(self) -> int:
        return self._hash

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
        if a == b:
            return self.nodes[a].inside
        classes = self._node_classes
        pair = (classes[a], classes[b])
        found = self._channels.get(pair)
        if found is None:
            # Either way round gives the same, so that what a sends to b takes as long as what b sends to a.
            found = _find_channel(self, min(a, b), max(a, b))
            self._channels[pair] = self._channels[pair[::-1]] = found
        return found

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def _node_classes(self) -> tuple[int, ...]:
        """By node: a number that nodes of one cluster with equal NICs share."""
        numbers: dict[tuple[int, tuple[Channel, ...]], int] = {}
        return tuple(numbers.setdefault((node.cluster, node.nics), len(numbers)) for node in self.nodes)

    @cached_property
    def _channels(self) -> dict[tuple[int, int], Channel]:
        """Between different nodes, by their classes, as far as asked for."""
        return {}


def _find_channel(topology: Topology, a: int, b: int) -> Channel:
    first, second = topology.nodes[a], topology.nodes[b]
    if first.cluster != second.cluster:
        wanted = {first.cluster, second.cluster}
        for one, other, channel in topology.between:
            if {one, other} == wanted:
                return channel
    pairs = [
        (one, other)
        for one in first.nics
        for other in second.nics
        if one.kind == other.kind and (first.cluster == second.cluster or one.kind == "Ethernet")
    ]
    if not pairs:
        clusters = [topology.clusters[node.cluster] for node in (first, second)]
        remedy = (
            "give both a NIC of one kind"
            if first.cluster == second.cluster
            else f'add a link with clusters = ["{clusters[0]}", "{clusters[1]}"], or give both Ethernet'
        )
        raise ValueError(
            f"no link between node {first.name} of cluster {clusters[0]} ({_kinds(first)}) and node {second.name} of "
            f"cluster {clusters[1]} ({_kinds(second)}); {remedy}"
        )
    slower = (min(pair, key=lambda channel: channel.bytes_per_second) for pair in pairs)
    return max(slower, key=lambda channel: channel.bytes_per_second)


def _kinds(node: Node) -> str:
    return ", ".join(nic.kind for nic in node.nics) or "no NIC"
