"""The order of devices in a ring all-reduce, their protocol and links (ADAPT, chapter 5; docs/algorithms.md, 2.4).

All devices of a ring send at the same time, so the slowest link decides. The best ring is the tour whose *longest* edge
is shortest (a bottleneck traveling-salesman tour) and, among these, the one with the least total time. ADAPT searches
for the least total time, but states the longest edge as its cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel, MeasuredLink, Topology
from .batch_profile import PASSES, BatchProfile

__all__ = ["EXACT_DEVICES", "RingNetwork", "ring_cost", "ring_order", "with_cluster_links"]

EXACT_DEVICES = 12
STARTS = 8
"""Nearest-neighbor tours that the local search improves."""
ROUNDING = 1e-12


def ring_cost(seconds: NDArray[np.float64], ring: Sequence[int] | NDArray[np.int64]) -> tuple[float, float]:
    """Seconds of the longest edge of a ring, given as indices into ``seconds [n, n]``, and of all edges in total."""
    edges = seconds[np.asarray(ring), np.roll(ring, -1)]
    return float(edges.max()), float(edges.sum())


def ring_order(seconds: NDArray[np.float64]) -> tuple[int, ...]:
    """The ring with the shortest longest edge, and among equal ones the least total time; it begins with index 0.

    ``seconds[i, j]`` is the edge from i to j. Up to ``EXACT_DEVICES`` devices the search is exact (Held and Karp);
    above, nearest-neighbor tours are improved by 2-opt moves and relocations that remove the longest edge.
    """
    if len(seconds) > EXACT_DEVICES:
        return _local_search(seconds)
    # One pass over (longest edge, total) pairs would not be exact: it drops a path with a small total whose longest
    # edge is exceeded later anyway.
    longest, _ = ring_cost(seconds, _held_karp(seconds, np.maximum))
    return _held_karp(np.where(seconds <= longest, seconds, np.inf), np.add)


def _held_karp(seconds: NDArray[np.float64], combine: np.ufunc) -> tuple[int, ...]:
    """The tour from index 0 with the least combination of its edges, by (set of visited indices, last index)."""
    others = len(seconds) - 1
    if others == 0:
        return (0,)
    seconds = seconds.T  # the tour is built from its end, so that of two equal directions the ascending one is found
    bits = 1 << np.arange(others)
    best = np.full((1 << others, others), np.inf)
    best[bits, np.arange(others)] = seconds[0, 1:]
    before = np.zeros((1 << others, others), dtype=np.int8)
    everyone = (1 << others) - 1
    for chosen in range(1, everyone):
        added = np.flatnonzero((chosen & bits) == 0)
        reached = combine(best[chosen][:, None], seconds[1:, 1:][:, added])
        source = reached.argmin(axis=0)
        best[chosen | bits[added], added] = reached[source, np.arange(len(added))]
        before[chosen | bits[added], added] = source
    last = int(combine(best[everyone], seconds[1:, 0]).argmin())
    tour, chosen = [], everyone
    while chosen:
        tour.append(last + 1)
        last, chosen = int(before[chosen, last]), chosen & ~(1 << last)
    return (0, *tour)


def _local_search(seconds: NDArray[np.float64]) -> tuple[int, ...]:
    count = len(seconds)
    tours = [np.arange(count), *(_nearest(seconds, start) for start in range(0, count, -(-count // STARTS)))]
    rings = [_improve(seconds, tour) for tour in tours]
    found = [tuple(np.roll(ring, -int(ring.argmin())).tolist()) for ring in rings]
    return min(found, key=lambda ring: (ring_cost(seconds, ring), ring))


def _nearest(seconds: NDArray[np.float64], start: int) -> NDArray[np.int64]:
    free = np.ones(len(seconds), dtype=bool)
    free[start] = False
    tour = [start]
    for _ in range(len(seconds) - 1):
        tour.append(int(np.where(free, seconds[tour[-1]], np.inf).argmin()))
        free[tour[-1]] = False
    return np.array(tour)


def _improve(seconds: NDArray[np.float64], ring: NDArray[np.int64]) -> NDArray[np.int64]:
    """Apply moves that remove the longest edge as long as (longest edge, total) decreases."""
    found = ring_cost(seconds, ring)
    while True:
        # The longest edge leads from the last index to the first one.
        ring = np.roll(ring, -(int(seconds[ring, np.roll(ring, -1)].argmax()) + 1))
        moves = [np.concatenate([ring[:cut][::-1], ring[cut:]]) for cut in range(2, len(ring) - 1)]
        for moved, rest in ((ring[0], ring[1:]), (ring[-1], ring[:-1])):
            moves += [np.insert(rest, place, moved) for place in range(1, len(rest))]
        best = min(moves, key=lambda move: ring_cost(seconds, move))
        longest, total = ring_cost(seconds, best)
        if not (longest < found[0] or (longest == found[0] and total < found[1] * (1 - ROUNDING))):
            return ring
        ring, found = best, (longest, total)


# Links ---------------------------------------------------------------------------------------------------------------

ETHERNET = "Ethernet"


@dataclass(frozen=True)
class RingNetwork:
    """Links between ranks, and the message that each sends in a synchronization."""

    links: Sequence[MeasuredLink]
    protocols: Sequence[Sequence[str]]
    """By rank, the protocols that it supports."""
    message_bytes: float

    def protocol(self, ranks: Sequence[int]) -> str:
        """The protocol that all of ``ranks`` use: NCCL among GPUs, Gloo as soon as a CPU takes part."""
        for protocol in ("nccl", "gloo"):
            if all(protocol in self.protocols[rank] for rank in ranks):
                return protocol
        supported = "; ".join(f"device {rank}: {', '.join(self.protocols[rank]) or 'none'}" for rank in ranks)
        raise ValueError(f"no protocol of nccl, gloo is supported by all devices ({supported})")

    def seconds(self, ranks: Sequence[int]) -> NDArray[np.float64]:
        """``Comm(i, j) = latency + bytes / bandwidth`` (ADAPT, Eq. 5.3) between all of ``ranks``: ``[n, n]``."""
        protocol = self.protocol(ranks)
        known = {
            tuple(link.ranks): link.latency_seconds + self.message_bytes / link.bytes_per_second
            for link in self.links
            if link.protocol == protocol
        }
        seconds = np.zeros((len(ranks), len(ranks)))
        for i, j in np.argwhere(~np.eye(len(ranks), dtype=bool)):
            a, b = ranks[i], ranks[j]
            edge = known.get((a, b), known.get((b, a)))
            if edge is None:
                raise ValueError(
                    f"no {protocol} link between ranks {min(a, b)} and {max(a, b)}; "
                    "measure that pair, or leave one of them out"
                )
            seconds[i, j] = edge
        return seconds

    @classmethod
    def of(cls, profile: BatchProfile, stage: int) -> RingNetwork:
        """The measured links, and the message with which the ring in rank order takes the measured time."""
        linked = {link.protocol for link in profile.links}
        protocols = [[each for each in profile.kinds[kind].protocols if each in linked] for kind in profile.ranks]
        ranks, time = range(len(profile.ranks)), profile.communication(stage)
        if time == 0:
            # In stage 1 the parameters are gathered as often as the gradients are summed, once per global batch.
            passes = PASSES[stage] + (stage == 1)
            return cls(profile.links, protocols, passes * (len(ranks) - 1) / len(ranks) * profile.model.gradient_bytes)
        # Comm = latency + message · (seconds per byte): solve for the message of each edge and take the smallest.
        latency, byte = (cls(profile.links, protocols, size).seconds(ranks) for size in (0.0, 1.0))
        edges = [(rank, (rank + 1) % len(ranks)) for rank in ranks]
        room = ((time - latency[edge]) / (byte[edge] - latency[edge]) for edge in edges)
        return cls(profile.links, protocols, max(min(room), 0.0) if len(ranks) > 1 else 0.0)


def with_cluster_links(profile: BatchProfile, topology: Topology) -> BatchProfile:
    """``profile`` with a link between all pairs of ranks in each protocol that both have; device i is rank i.

    Between machines, NCCL uses the fastest kind of NIC that both have, and Gloo uses Ethernet, if both have it. Inside
    a machine, both have the one speed of the cluster file, that of NCCL for GPUs, so Gloo looks faster than it is.
    Bandwidths are those for the message of a ring all-reduce: the model's gradients divided by the number of ranks.
    """
    if profile.links:
        raise ValueError("the profile has measured links already; leave out the cluster file, or remove these links")
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
    message_bytes = max(profile.model.gradient_bytes / len(profile.ranks), 1.0)
    protocols = [profile.kinds[kind].protocols for kind in profile.ranks]
    links = []
    for a, b in combinations(range(len(profile.ranks)), 2):
        for protocol in (each for each in protocols[a] if each in protocols[b]):
            channel = _channel(topology, a, b, protocol)
            speed = {
                "latency_seconds": channel.latency_seconds,
                "bytes_per_second": channel.bandwidth(message_bytes),
            }
            links.append(MeasuredLink(ranks=(a, b), protocol=protocol, **speed))
    return profile.model_copy(update={"links": tuple(links)})


def _channel(topology: Topology, a: int, b: int, protocol: str) -> Channel:
    nodes = [topology.nodes[topology.devices[rank].node] for rank in (a, b)]
    if protocol == "gloo" and nodes[0] is not nodes[1]:
        cards = [[nic for nic in node.nics if nic.kind == ETHERNET] for node in nodes]
        if all(cards):
            fastest = [max(each, key=lambda nic: nic.bytes_per_second) for each in cards]
            return min(fastest, key=lambda nic: nic.bytes_per_second)
    return topology.channel(a, b)
