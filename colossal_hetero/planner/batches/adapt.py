"""ADAPT (chapter 5; docs/algorithms.md, 2.4): devices that take part, their order in a ring all-reduce, their batches.

All devices of a ring send at the same time, so the slowest link decides. The best ring is the tour whose *longest* edge
is shortest (a bottleneck traveling-salesman tour) and, among these, the one with the least total time. ADAPT searches
for the least total time, but states the longest edge as its cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster.group_networks import ETHERNET
from ..cluster.topology import Channel, MeasuredLink, Topology
from .allocation import Allocation, Share, allocate, evaluate
from .batch_profile import PASSES, BatchProfile
from .time_curve import Curve

EXACT_DEVICES = 12
STARTS = 8  # nearest-neighbor tours that the local search improves
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


@dataclass(frozen=True)
class RingNetwork:
    """Links between ranks, and the message that each sends in a synchronization."""

    links: Sequence[MeasuredLink]
    protocols: Sequence[Sequence[str]]  # by rank, the protocols that it supports
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
            speed = {"latency_seconds": channel.latency_seconds, "bytes_per_second": channel.bandwidth(message_bytes)}
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


# Device dropping -----------------------------------------------------------------------------------------------------
# If a device is dropped, the others run its samples; that is faster if it costs more communication than it saves
# compute, for example if it is the only one without NCCL. The paper's cost, ``max_d B_d·S_d + max_d Comm(d, next(d))``
# (Eq. 5.3), is here the wall time of :mod:`.allocation`, with the ring's longest edge as the time of a synchronization.


@dataclass(frozen=True)
class AdaptStep:
    without: tuple[int, ...]  # the ranks that it drops, in addition to those dropped before
    reason: str
    protocol: str
    cost_seconds: float  # predicted time per global batch; infinite if the remaining ranks cannot hold a sample each
    kept: bool  # True if the configuration was better than those before it


@dataclass(frozen=True)
class AdaptPlan:
    allocation: Allocation  # the division over all ranks; a dropped rank has ``runs == ()`` and ``busy_seconds == 0``
    ring: tuple[int, ...]  # ranks in sending order; the last one sends to the first
    protocol: str
    steps: tuple[AdaptStep, ...] = ()
    """Configurations that were tried, in order; the first one keeps all devices that hold a sample."""

    @property
    def dropped(self) -> tuple[int, ...]:
        return tuple(rank for rank, share in enumerate(self.allocation.shares) if not share.runs)

    @property
    def cost_seconds(self) -> float:
        return self.allocation.wall_seconds


def adapt(
    curves_of: Callable[[int], Sequence[Curve]],
    global_batch_size: int,
    stage: int,
    network: RingNetwork,
    accumulation: str = "shared",
) -> AdaptPlan:
    """Drop devices as long as that reduces the predicted time per global batch.

    Each round tries to drop, in this order (the paper tries one of the first two):

    1. the busiest device of those whose communication with both ring neighbors takes longer than their compute;
    2. the device with the fewest samples per second (parts in proportion to speed take equally long);
    3. all devices without NCCL at once: with two CPUs, dropping one does not make NCCL possible.

    ``curves_of`` returns the curves of all ranks if so many of them take part.
    """
    everyone = range(len(network.protocols))

    def unable(ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if curves_of(len(ranks))[rank].max_batch < 1]

    def plan(ranks: Sequence[int]) -> AdaptPlan:
        curves, seconds = curves_of(len(ranks)), network.seconds(ranks)
        ring = ring_order(seconds)
        times: dict[str, Any] = {"accumulation": accumulation, "communication_seconds": ring_cost(seconds, ring)[0]}
        divided = allocate([curves[rank] for rank in ranks], global_batch_size, stage, **times)
        by_rank = dict(zip(ranks, divided.shares, strict=True))
        shares = [by_rank.get(rank, Share(())) for rank in everyone]
        allocation = evaluate(curves, shares, stage, method="adapt", **times)
        return AdaptPlan(allocation, tuple(ranks[index] for index in ring), network.protocol(ranks))

    able = list(everyone)
    while unable(able):
        able = [rank for rank in able if rank not in unable(able)]
    if not able:
        raise ValueError(
            f"none of {len(everyone)} devices holds one sample in stage {stage}; use a higher stage, or free memory"
        )
    current = plan(able)
    reason = f"cannot hold one sample: {_names(current.dropped)}" if current.dropped else "all devices"
    steps = [AdaptStep(current.dropped, reason, current.protocol, current.cost_seconds, True)]
    improved = True
    while improved:
        improved = False
        for without, reason in _drop_candidates(current, curves_of(len(everyone)), network):
            rest = [rank for rank in sorted(current.ring) if rank not in without]
            if unable(rest):
                steps.append(AdaptStep(without, reason, network.protocol(rest), math.inf, False))
                continue
            tried = plan(rest)
            improved = tried.cost_seconds < current.cost_seconds
            steps.append(AdaptStep(without, reason, tried.protocol, tried.cost_seconds, improved))
            if improved:
                current = tried
                break
    return replace(current, steps=tuple(steps))


def adapt_profile(profile: BatchProfile, global_batch_size: int, stage: int, accumulation: str = "shared") -> AdaptPlan:
    """:func:`adapt` for the devices and links of a profile."""

    @lru_cache
    def curves_of(ranks: int) -> list[Curve]:
        return profile.curves(stage, global_batch_size, sharing_ranks=ranks, allow_empty=True)

    return adapt(curves_of, global_batch_size, stage, RingNetwork.of(profile, stage), accumulation)


def _drop_candidates(
    current: AdaptPlan, curves: Sequence[Curve], network: RingNetwork
) -> list[tuple[tuple[int, ...], str]]:
    """The ranks to try to drop, in order, each with the reason."""
    ring, busy = current.ring, current.allocation.busy_seconds
    if len(ring) == 1:
        return []
    edges = network.seconds(ring) * (1 if current.allocation.stage < 2 else current.allocation.steps)
    near = {rank: min(edges[i - 1, i], edges[i, (i + 1) % len(ring)]) for i, rank in enumerate(ring)}
    found: dict[tuple[int, ...], str] = {}
    bound = [rank for rank in ring if near[rank] > busy[rank]]
    if bound:
        rank = min(bound, key=lambda rank: (-busy[rank], rank))
        found[rank,] = f"rank {rank} communicates longer ({near[rank]:.3g} s) than it computes ({busy[rank]:.3g} s)"
    rank = min(ring, key=lambda rank: (curves[rank].peak_speed, rank))
    found.setdefault((rank,), f"rank {rank} is the slowest ({curves[rank].peak_speed:.3g} samples/s)")
    lacking = tuple(rank for rank in sorted(ring) if "nccl" not in network.protocols[rank])
    if current.protocol != "nccl" and 0 < len(lacking) < len(ring):
        found.setdefault(lacking, f"without {_names(lacking)} the others use nccl instead of {current.protocol}")
    return list(found.items())


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
