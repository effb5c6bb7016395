"""Machines that a plan is made for: devices in nodes in clusters, and the channels between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated

from pydantic import Field, field_validator

from ...common.files import BytesPerSecond, FilePart, NonNegative, Seconds

MEGABYTE = 1e6
SMALLEST_EXPONENT, LARGEST_EXPONENT = -20, 30
"""Range of message sizes that are searched, as exponents of two, in megabytes."""
STEPS_PER_OCTAVE = 16


@dataclass(frozen=True)
class Channel:
    """Channel from one device to another, in ``latency + bytes / bandwidth`` seconds (ADAPT, section 6).

    With ``curve = (a, b, c)``, the bandwidth is ``a·x² + b·x + c`` GB/s with ``x = log2(megabytes)``, at most
    ``bytes_per_second``. A smaller message never takes longer than a larger one.
    """

    kind: str
    """E.g. "NVLink", "PCIe", "InfiniBand", "RoCE", "Ethernet"."""
    bytes_per_second: float
    latency_seconds: float = 0.0
    curve: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ValueError(f"a {self.kind} channel of {self.bytes_per_second} bytes per second; it must be above 0")
        if self.curve is not None and not math.isfinite(_fastest_message(self.curve, self.bytes_per_second)[0]):
            raise ValueError(f"a {self.kind} channel with curve {self.curve}, which gives large messages no bandwidth")

    def seconds(self, message_bytes: float) -> float:
        if message_bytes <= 0:
            return 0.0
        return self.latency_seconds + message_bytes / self.bandwidth(message_bytes)

    def limited(self, bytes_per_second: float) -> Channel:
        """Channel if others leave only this bandwidth."""
        return self if bytes_per_second >= self.bytes_per_second else self.with_bandwidth(bytes_per_second)

    def with_bandwidth(self, bytes_per_second: float) -> Channel:
        """Channel of this bandwidth; a curve changes in the same proportion."""
        share = bytes_per_second / self.bytes_per_second
        curve = self.curve and (share * self.curve[0], share * self.curve[1], share * self.curve[2])
        return replace(self, bytes_per_second=bytes_per_second, curve=curve)

    def bandwidth(self, message_bytes: float) -> float:
        if self.curve is None:
            return self.bytes_per_second
        fastest_bytes, shortest_seconds = _fastest_message(self.curve, self.bytes_per_second)
        if message_bytes < fastest_bytes:
            return message_bytes / shortest_seconds
        return _fitted_bandwidth(self.curve, self.bytes_per_second, math.log2(message_bytes / MEGABYTE))


def _fitted_bandwidth(curve: tuple[float, float, float], max_bytes_per_second: float, exponent: float) -> float:
    """Bytes per second for messages of ``2 ** exponent`` megabytes. It does not fall as messages grow."""
    a, b, c = curve
    if a != 0:
        turn = -b / (2 * a)
        # Beyond its vertex, the parabola does not describe the measurement any more.
        exponent = min(exponent, turn) if a < 0 else max(exponent, turn)
    return min((a * exponent * exponent + b * exponent + c) * 1e9, max_bytes_per_second)


@functools.lru_cache(maxsize=1024)
def _fastest_message(curve: tuple[float, float, float], max_bytes_per_second: float) -> tuple[float, float]:
    """Bytes and seconds of the message that takes the shortest time; smaller messages count as taking the same time.
    Below the measured sizes a fitted curve falls to 0, as if smaller messages took longer."""
    fastest_bytes, shortest_seconds = math.inf, math.inf
    for step in range(LARGEST_EXPONENT * STEPS_PER_OCTAVE, SMALLEST_EXPONENT * STEPS_PER_OCTAVE - 1, -1):
        exponent = step / STEPS_PER_OCTAVE
        message, fitted = 2**exponent * MEGABYTE, _fitted_bandwidth(curve, max_bytes_per_second, exponent)
        if fitted <= 0 or message / fitted >= shortest_seconds:
            break
        fastest_bytes, shortest_seconds = message, message / fitted
    return fastest_bytes, shortest_seconds


@dataclass(frozen=True)
class DeviceKind:
    name: str
    memory_bytes: int
    flops: float
    """Dense half-precision FLOP/s, nominal or measured."""
    memory_reserve_bytes: int = 0
    """Memory that is not planned with: context, communication buffers, workspaces, lost to the allocator."""

    def __post_init__(self) -> None:
        if not 0 <= self.memory_reserve_bytes < self.memory_bytes:
            reserve, memory = self.memory_reserve_bytes / 1e9, self.memory_bytes / 1e9
            raise ValueError(
                f"{self.name} has a memory reserve of {reserve:.3g} GB and {memory:.3g} GB of memory; the reserve must "
                "be at least 0 and less than the memory"
            )

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.memory_reserve_bytes


@dataclass(frozen=True)
class Device:
    """One device. Devices are numbered cluster by cluster and node by node, like the ranks at launch."""

    kind: DeviceKind
    node: int
    cluster: int
    speed: float = 1.0
    """Share of its kind's speed that it reaches: ¼ if it is throttled to a quarter."""
    training_speed: float | None = None
    """Speed that training on its cluster alone reached, in a unit that all clusters share; for the method holmes."""


@dataclass(frozen=True)
class Node:
    name: str
    cluster: int
    devices: tuple[int, ...]
    inside: Channel
    nics: tuple[Channel, ...]
    """Network cards, by descending bandwidth."""
    inside_bytes_per_second: float = math.inf
    """Limit of all transfers between its devices together: a bus, a switch with few lanes, host memory."""
    dollars_per_hour: float | None = None


@dataclass(frozen=True)
class Topology:
    """All machines. Nodes of one cluster with equal NICs are a *node class*; one look-up per pair of classes."""

    devices: tuple[Device, ...]
    nodes: tuple[Node, ...]
    clusters: tuple[str, ...]
    between: tuple[tuple[int, int, Channel], ...] = ()
    """Links between clusters: the numbers of both clusters, and the channel."""
    egress: tuple[tuple[int, int, float], ...] = ()
    """Dollars per gigabyte (10⁹ bytes) that is sent between two clusters, where it costs anything."""

    def __hash__(self) -> int:
        return self._hash

    def channel(self, a: int, b: int) -> Channel:
        return self.node_channel(self.devices[a].node, self.devices[b].node)

    def node_channel(self, a: int, b: int) -> Channel:
        """Channel between two nodes, in either direction.

        Within a cluster: the fastest kind of NIC that both nodes have, with the bandwidth of the slower one. Between
        clusters: the link in :attr:`between`, or else Ethernet if both nodes have it.
        """
        if a == b:
            return self.nodes[a].inside
        classes = self._node_classes
        pair = (classes[a], classes[b])
        found = self._channels.get(pair)
        if found is None:
            found = _find_channel(self, min(a, b), max(a, b))
            self._channels[pair] = self._channels[pair[::-1]] = found
        return found

    def of_devices(self, ranks: Collection[int]) -> Topology:
        """The machines with only these devices, which are numbered anew in the same order."""
        devices: list[Device] = []
        nodes: list[Node] = []
        for node in self.nodes:
            kept = [replace(self.devices[rank], node=len(nodes)) for rank in node.devices if rank in ranks]
            if kept:
                nodes.append(replace(node, devices=tuple(range(len(devices), len(devices) + len(kept)))))
                devices += kept
        return replace(self, devices=tuple(devices), nodes=tuple(nodes))

    def with_memory_reserve(self, reserve_bytes: int) -> Topology:
        kinds = {
            kind: replace(kind, memory_reserve_bytes=reserve_bytes) for kind in {device.kind for device in self.devices}
        }
        return replace(self, devices=tuple(replace(device, kind=kinds[device.kind]) for device in self.devices))

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def _node_classes(self) -> tuple[int, ...]:
        numbers: dict[tuple[int, tuple[Channel, ...]], int] = {}
        return tuple(numbers.setdefault((node.cluster, node.nics), len(numbers)) for node in self.nodes)

    @cached_property
    def _channels(self) -> dict[tuple[int, int], Channel]:
        """Channels between different nodes by their classes; filled when they are asked for."""
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


class MeasuredLink(FilePart):
    """Time of a message between two ranks in one protocol; both ways, unless the opposite way has a link."""

    ranks: tuple[NonNegative, NonNegative]
    protocol: Annotated[str, Field(min_length=1)]
    """"gloo" or "nccl"."""
    latency_seconds: Seconds
    bytes_per_second: BytesPerSecond

    @field_validator("ranks")
    @classmethod
    def _two_ranks(cls, ranks: tuple[int, int]) -> tuple[int, int]:
        if ranks[0] == ranks[1]:
            raise ValueError(f"a link joins two different ranks, but both are rank {ranks[0]}")
        return ranks
