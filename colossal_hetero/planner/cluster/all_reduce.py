"""Time in which replicas sum their gradients, over networks that they share.

A ring all-reduce of n devices takes ``2 (n−1)/n · bytes/bandwidth + 2 (n−1) · latency`` on its slowest hop (Patarasuk
and Yuan 2009). A ring visits its devices node by node, in ascending order. It has one communicator, hence one network
between nodes: that of its slowest hop.

[Note: shared NICs] Rings that run at the same time share NICs. A hop between nodes gets at most the channel's
bandwidth, and at most the sum over the node's NICs of that kind divided by the rings that leave (or enter: full duplex)
the node through them. If a ring ends early, its share is not given to the others, so for rings of different sizes this
is an upper bound. Devices in a node share ``Node.inside_bytes_per_second``; without it each pair has the whole
bandwidth, as behind a switch. A link between clusters is shared by rings that cross it from the same node, but not by
those of other nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .topology import Channel, Topology

INSIDE = "inside"  # network name of transfers inside a node

Hop = tuple[int, int]
"""(from node, to node)."""


def synchronization_seconds(topology: Topology, group: Sequence[int], gradient_bytes: float, sharing: int = 1) -> float:
    """Seconds of a ring all-reduce of ``gradient_bytes`` per device over ``group``, if ``sharing`` such rings run."""
    ring = _nodes(topology, group)
    return ConcurrentRings(topology, {ring: sharing}).seconds(ring, gradient_bytes)


def concurrent_seconds(
    topology: Topology, groups: Sequence[Sequence[int]], gradient_bytes: Sequence[float]
) -> tuple[float, ...]:
    """Seconds by group if all groups that have gradients synchronize at the same time. See Note: shared NICs."""
    both = list(zip([_nodes(topology, group) for group in groups], gradient_bytes, strict=True))
    rings = ConcurrentRings(topology, [ring for ring, size in both if size > 0])
    known = {key: rings.seconds(*key) for key in dict.fromkeys(both)}
    return tuple(known[key] for key in both)


class ConcurrentRings:
    """Rings that synchronize at the same time, by the nodes of their members. See Note: shared NICs."""

    def __init__(self, topology: Topology, rings: Iterable[tuple[int, ...]] | Mapping[tuple[int, ...], int]) -> None:
        self._topology = topology
        # Rings over the same nodes are alike; a large cluster has few different ones.
        numbers = Counter(rings)
        self._rings: dict[tuple[int, ...], _Ring] = {}
        self._load: Counter[tuple[int, int, str]] = Counter()
        for nodes, number in numbers.items():
            hops = _hops(nodes)
            # A ring that leaves a node has one message less inside it than it has devices there.
            inside = {node: count - bool(hops) for node, count in Counter(nodes).items() if count > 1}
            ring = self._rings[nodes] = _Ring(hops, ring_network(topology, hops) if hops else "", inside)
            for hop in ring.hops:
                for way, node in enumerate(hop):
                    self._load[node, way, ring.network] += number
            for node, messages in ring.inside.items():
                self._load[node, 0, INSIDE] += number * messages
        self._limits: dict[tuple[int, ...], _Limits] = {}

    def seconds(self, nodes: tuple[int, ...], gradient_bytes: float) -> float:
        """Seconds of one of the rings; ``gradient_bytes`` per device. 0 for a single device."""
        if not gradient_bytes >= 0:
            raise ValueError(f"gradient_bytes={gradient_bytes} must be at least 0")
        if len(nodes) < 2 or gradient_bytes == 0:
            return 0.0
        if nodes not in self._limits:
            self._limits[nodes] = self._limits_of(self._rings[nodes])
        inside, hops = self._limits[nodes]
        chunk = gradient_bytes / len(nodes)
        step = max((channel.seconds(chunk) for channel in inside), default=0.0)
        for channel, ends in hops:
            shares = [sum(nic.bandwidth(chunk) for nic in nics) / load for nics, load in ends]
            step = max(step, channel.latency_seconds + chunk / min(channel.bandwidth(chunk), *shares))
        return 2 * (len(nodes) - 1) * step

    def _limits_of(self, ring: _Ring) -> _Limits:
        inside, hops = set(), set()
        for number in ring.inside:
            node = self._topology.nodes[number]
            inside.add(node.inside.limited(node.inside_bytes_per_second / self._load[number, 0, INSIDE]))
        for hop in ring.hops:
            channel = _hop_channel(self._topology, hop, ring.network)
            loads = [self._load[node, way, ring.network] for way, node in enumerate(hop)]
            nics = [_nics(self._topology, node, channel) for node in hop]
            hops.add((channel, tuple(zip(nics, loads, strict=True))))
        return _Limits(frozenset(inside), frozenset(hops))


class _Ring(NamedTuple):
    hops: tuple[Hop, ...]
    network: str
    inside: Mapping[int, int]  # messages per step that stay inside, by node


class _Limits(NamedTuple):
    """Limits of a ring, each different one once: a ring over many nodes has few."""

    inside: frozenset[Channel]
    hops: frozenset[tuple[Channel, tuple[tuple[tuple[Channel, ...], int], ...]]]
    """Between nodes: the channel; of both ends, the NICs and the number of messages that share them."""


def ring_hops(topology: Topology, group: Sequence[int]) -> tuple[Hop, ...]:
    """Hops between nodes in a ring over ``group``; none if all devices are in one node."""
    return _hops(_nodes(topology, group))


def ring_network(topology: Topology, hops: Sequence[Hop]) -> str:
    """Kind of channel that a ring over several nodes uses: that of its slowest hop."""
    return min((topology.node_channel(*hop) for hop in hops), key=lambda channel: channel.bytes_per_second).kind


def _nodes(topology: Topology, group: Sequence[int]) -> tuple[int, ...]:
    for device in group:
        if not 0 <= device < len(topology.devices):
            raise ValueError(
                f"device {device} of group {tuple(group)} does not exist; there are {len(topology.devices)} devices"
            )
    if len(set(group)) != len(group):
        raise ValueError(f"group {tuple(group)} names a device twice")
    return tuple(sorted(topology.devices[device].node for device in group))


def _hops(nodes: Sequence[int]) -> tuple[Hop, ...]:
    different = sorted(set(nodes))
    return tuple(zip(different, [*different[1:], different[0]], strict=True)) if len(different) > 1 else ()


def _hop_channel(topology: Topology, hop: Hop, kind: str) -> Channel:
    """Channel of a hop over NICs of ``kind``; the fastest one between the nodes if one of them has no such NIC."""
    channel = topology.node_channel(*hop)
    if channel.kind == kind:
        return channel
    nics = [[nic for nic in topology.nodes[node].nics if nic.kind == kind] for node in hop]
    ends = [max(of_node, key=lambda nic: nic.bytes_per_second) for of_node in nics if of_node]
    return min(ends, key=lambda nic: nic.bytes_per_second) if len(ends) == 2 else channel


def _nics(topology: Topology, node: int, channel: Channel) -> tuple[Channel, ...]:
    """NICs of a node that have the channel's kind; the channel itself if there are none."""
    return tuple(nic for nic in topology.nodes[node].nics if nic.kind == channel.kind) or (channel,)
