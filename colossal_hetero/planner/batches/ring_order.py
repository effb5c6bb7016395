"""The order of devices in a ring all-reduce, and the protocol they share (ADAPT, chapter 5; docs/algorithms.md, 2.4).

All devices of a ring send at the same time, so the slowest link decides. The best ring is the tour whose *longest* edge
is shortest (a bottleneck traveling-salesman tour) and, among these, the one with the least total time. ADAPT searches
for the least total time, but states the longest edge as its cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel, MeasuredLink, Topology
from .batch_profile import BatchProfile

__all__ = [
    "EXACT_DEVICES",
    "common_protocol",
    "link_seconds",
    "longest_edge",
    "ring_order",
    "total_seconds",
    "with_cluster_links",
]

EXACT_DEVICES = 12
ROUNDING = 1e-12


def common_protocol(protocols: Sequence[Sequence[str]], order: Sequence[str] = ("nccl", "gloo")) -> str:
    """The first protocol of ``order`` that all devices support: NCCL among GPUs, Gloo as soon as a CPU takes part."""
    for protocol in order:
        if all(protocol in each for each in protocols):
            return protocol
    supported = "; ".join(f"device {number}: {', '.join(each) or 'none'}" for number, each in enumerate(protocols))
    raise ValueError(f"no protocol of {', '.join(order)} is supported by all devices ({supported})")


def link_seconds(
    links: Iterable[MeasuredLink], ranks: Sequence[int], protocol: str, message_bytes: float
) -> NDArray[np.float64]:
    """``Comm(i, j) = latency + bytes / bandwidth`` (ADAPT, Eq. 5.3) between all of ``ranks``: ``[n, n]`` seconds."""
    known: dict[tuple[int, int], float] = {}
    for link in links:
        if link.protocol == protocol:
            known[link.ranks[0], link.ranks[1]] = link.latency_seconds + message_bytes / link.bytes_per_second
    seconds = np.zeros((len(ranks), len(ranks)))
    for i, a in enumerate(ranks):
        for j, b in enumerate(ranks):
            if i == j:
                continue
            edge = known.get((a, b), known.get((b, a)))
            if edge is None:
                raise ValueError(
                    f"no {protocol} link between ranks {min(a, b)} and {max(a, b)}; "
                    "measure that pair, or leave one of them out"
                )
            seconds[i, j] = edge
    return seconds


def longest_edge(seconds: NDArray[np.float64], ring: Sequence[int]) -> float:
    """Seconds of the slowest edge of a ring, given as indices into ``seconds [n, n]``; 0 for one device."""
    return max(_edges(seconds, ring), default=0.0)


def total_seconds(seconds: NDArray[np.float64], ring: Sequence[int]) -> float:
    return math.fsum(_edges(seconds, ring))


def _edges(seconds: NDArray[np.float64], ring: Sequence[int]) -> list[float]:
    if len(ring) < 2:
        return []
    return [float(seconds[a, b]) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]


def ring_order(seconds: NDArray[np.float64]) -> tuple[int, ...]:
    """The ring with the shortest longest edge, and among equal ones the least total time; it begins with index 0.

    ``seconds[i, j]`` is the edge from i to j. Up to ``EXACT_DEVICES`` devices the search is exact (Held and Karp);
    above, nearest-neighbor tours are improved by 2-opt moves and relocations that remove the longest edge.
    """
    count = len(seconds)
    if seconds.shape != (count, count):
        raise ValueError(f"seconds has shape {seconds.shape}; give one row and one column per device")
    if count <= 3 and np.array_equal(seconds, seconds.T):
        return tuple(range(count))
    if count <= EXACT_DEVICES:
        # One pass over (longest edge, total) pairs would not be exact: it drops a path with a small total whose longest
        # edge is exceeded later anyway.
        bottleneck = longest_edge(seconds, _held_karp(seconds, np.maximum))
        allowed = np.where(seconds <= bottleneck, seconds, np.inf)
        return _held_karp(allowed, np.add)
    return _local_search(seconds)


def _held_karp(seconds: NDArray[np.float64], combine: np.ufunc) -> tuple[int, ...]:
    """The tour from index 0 with the least combination of its edges, by (set of visited indices, last index)."""
    others = len(seconds) - 1
    if others == 0:
        return (0,)
    best = np.full((1 << others, others), np.inf)
    before = np.zeros((1 << others, others), dtype=np.int8)
    inner = seconds[1:, 1:]
    bits = 1 << np.arange(others)
    for last in range(others):
        best[1 << last, last] = seconds[0, last + 1]
    for chosen in range(1, 1 << others):
        added = np.flatnonzero((chosen & bits) == 0)
        if len(added) == 0:
            continue
        reached = combine(best[chosen][:, None], inner[:, added])
        source = reached.argmin(axis=0)
        best[chosen | bits[added], added] = reached[source, np.arange(len(added))]
        before[chosen | bits[added], added] = source
    chosen = (1 << others) - 1
    last = int(combine(best[chosen], seconds[1:, 0]).argmin())
    tour = []
    while chosen:
        tour.append(last + 1)
        last, chosen = int(before[chosen, last]), chosen & ~(1 << last)
    return (0, *reversed(tour))


def _local_search(seconds: NDArray[np.float64]) -> tuple[int, ...]:
    count = len(seconds)
    starts = range(count) if count <= 64 else range(0, count, count // 32)
    tours = [list(range(count)), *(_nearest(seconds, start) for start in starts)]
    tours.sort(key=lambda tour: (longest_edge(seconds, tour), total_seconds(seconds, tour), tour))
    best = min((_improve(seconds, tour) for tour in tours[:8]), key=lambda found: (*found[0], found[1]))[1]
    first = best.index(0)
    return (*best[first:], *best[:first])


def _nearest(seconds: NDArray[np.float64], start: int) -> list[int]:
    free = np.ones(len(seconds), dtype=bool)
    tour = [start]
    free[start] = False
    for _ in range(len(seconds) - 1):
        tour.append(int(np.where(free, seconds[tour[-1]], np.inf).argmin()))
        free[tour[-1]] = False
    return tour


def _improve(seconds: NDArray[np.float64], tour: list[int]) -> tuple[tuple[float, float], list[int]]:
    """Apply moves that remove the longest edge as long as (longest edge, total) decreases; that pair and the tour."""

    def cost(ring: NDArray[np.int64]) -> tuple[float, float]:
        hops = seconds[ring, np.roll(ring, -1)]
        return float(hops.max()), float(hops.sum())

    ring = np.array(tour)
    found = cost(ring)
    while True:
        hops = seconds[ring, np.roll(ring, -1)]
        ring = np.roll(ring, -(int(hops.argmax()) + 1))
        moves = [np.concatenate([ring[:cut][::-1], ring[cut:]]) for cut in range(2, len(ring) - 1)]
        for moved, rest in ((ring[0], ring[1:]), (ring[-1], ring[:-1])):
            moves += [np.insert(rest, place, moved) for place in range(1, len(rest))]
        nearest = min(moves, key=cost)
        improved = cost(nearest)
        if not (improved[0] < found[0] or (improved[0] == found[0] and improved[1] < found[1] * (1 - ROUNDING))):
            return found, ring.tolist()
        ring, found = nearest, improved


# Cluster links -------------------------------------------------------------------------------------------------------

ETHERNET = "Ethernet"


def with_cluster_links(profile: BatchProfile, topology: Topology) -> BatchProfile:
    """``profile`` with a link between all pairs of ranks in each protocol that both have; device i is rank i.

    Between machines, NCCL uses the fastest kind of NIC that both have, and Gloo uses Ethernet, if both have it. Inside
    a machine, both have the one speed of the cluster file, that of NCCL for GPUs, so Gloo looks faster than it is.
    Bandwidths are those for the message of a ring all-reduce: the model's gradients divided by the number of ranks.
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
