"""The order of devices in a ring all-reduce, and the protocol that they speak (ADAPT, chapter 5; ALGORITHMS 2.4).

In a ring every device sends to the next one only, all at the same time: the slowest link decides. So the best ring is
the tour whose *longest* edge is shortest (a bottleneck travelling-salesman tour); among these the one with the least
total time. ADAPT searches a tour by total time; the cost that it then states is the longest edge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EXACT_DEVICES",
    "Link",
    "LinkLike",
    "common_protocol",
    "link_seconds",
    "longest_edge",
    "ring_order",
    "total_seconds",
]

EXACT_DEVICES = 12
"""Up to so many devices the ring is the best there is; above, the best that a local search finds."""

ROUNDING = 1e-12


@dataclass(frozen=True)
class Link:
    """How fast two ranks reach each other by one protocol; both ways, unless the other way has a link of its own."""

    ranks: tuple[int, int]
    protocol: str
    latency_seconds: float
    bytes_per_second: float


class LinkLike(Protocol):
    """Anything with the fields of :class:`Link`, such as the links of a profile file."""

    @property
    def ranks(self) -> tuple[int, int]: ...
    @property
    def protocol(self) -> str: ...
    @property
    def latency_seconds(self) -> float: ...
    @property
    def bytes_per_second(self) -> float: ...


def common_protocol(protocols: Sequence[Sequence[str]], order: Sequence[str] = ("nccl", "gloo")) -> str:
    """The first of ``order`` that all speak: NCCL among GPUs, Gloo as soon as a CPU takes part.

    Raises:
        ValueError: there is none, naming what each speaks.
    """
    for protocol in order:
        if all(protocol in each for each in protocols):
            return protocol
    spoken = "; ".join(f"device {count}: {', '.join(each) or 'none'}" for count, each in enumerate(protocols))
    raise ValueError(f"no protocol of {', '.join(order)} is spoken by all devices ({spoken})")


def link_seconds(
    links: Iterable[LinkLike], ranks: Sequence[int], protocol: str, message_bytes: float
) -> NDArray[np.float64]:
    """``Comm(i, j) = latency + bytes / bandwidth`` (Eq. 5.3) between all of ``ranks``: ``[n, n]`` seconds.

    Raises:
        ValueError: a pair of ranks without a link in this protocol, or a link whose numbers make no sense.
    """
    known: dict[tuple[int, int], float] = {}
    for link in links:
        if link.protocol != protocol:
            continue
        if not (link.latency_seconds >= 0 and math.isfinite(link.latency_seconds) and link.bytes_per_second > 0):
            raise ValueError(
                f"{protocol} link between ranks {link.ranks[0]} and {link.ranks[1]}: latency "
                f"{link.latency_seconds} s must be at least 0, and {link.bytes_per_second} bytes/s above 0"
            )
        known[link.ranks[0], link.ranks[1]] = link.latency_seconds + message_bytes / link.bytes_per_second
    seconds = np.zeros((len(ranks), len(ranks)))
    for i, a in enumerate(ranks):
        for j, b in enumerate(ranks):
            if i == j:
                continue
            there = known.get((a, b), known.get((b, a)))
            if there is None:
                raise ValueError(
                    f"no {protocol} link between ranks {min(a, b)} and {max(a, b)}; "
                    "measure that pair, or leave one of them out"
                )
            seconds[i, j] = there
    return seconds


def longest_edge(seconds: NDArray[np.float64], ring: Sequence[int]) -> float:
    """Seconds of the slowest hop of a ring of indices into ``seconds [n, n]``; 0 for one device."""
    return max(_edges(seconds, ring), default=0.0)


def total_seconds(seconds: NDArray[np.float64], ring: Sequence[int]) -> float:
    """Seconds of all hops of a ring, one after the other."""
    return math.fsum(_edges(seconds, ring))


def _edges(seconds: NDArray[np.float64], ring: Sequence[int]) -> list[float]:
    if len(ring) < 2:
        return []
    return [float(seconds[a, b]) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]


def ring_order(seconds: NDArray[np.float64]) -> tuple[int, ...]:
    """The ring with the shortest longest edge, then with the least total time; it begins with index 0.

    ``seconds [n, n]`` is directed: ``seconds[i, j]`` from i to j. Exact by dynamic programming over subsets (Held and
    Karp) up to ``EXACT_DEVICES`` devices. Beyond, a local search: nearest neighbors from every start among edges as
    short as a threshold, then 2-opt moves and relocations that replace the longest edge by shorter ones; the result
    may not be the best.
    """
    count = len(seconds)
    if seconds.shape != (count, count):
        raise ValueError(f"seconds has shape {seconds.shape}; give one row and one column per device")
    if count <= 3 and np.array_equal(seconds, seconds.T):
        return tuple(range(count))
    if count <= EXACT_DEVICES:
        # A tour of the least longest edge, then the shortest one that uses no longer edge: the pair is not a sum, and
        # the two in one pass would throw away a short beginning whose longest edge another edge exceeds later anyway.
        bottleneck = longest_edge(seconds, _held_karp(seconds, np.maximum))
        allowed = np.where(seconds <= bottleneck, seconds, np.inf)
        return _held_karp(allowed, np.add)
    return _local_search(seconds)


def _held_karp(seconds: NDArray[np.float64], combine: np.ufunc) -> tuple[int, ...]:
    """The tour from 0 with the least combination of its edges: over all sets of the others and the last of each."""
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
    """Moves that remove the longest edge, as long as one makes (longest edge, total) less."""

    def cost(ring: NDArray[np.int64]) -> tuple[float, float]:
        hops = seconds[ring, np.roll(ring, -1)]
        return float(hops.max()), float(hops.sum())

    ring = np.array(tour)
    found = cost(ring)
    while True:
        hops = seconds[ring, np.roll(ring, -1)]
        # The longest edge comes to the end, between the last device and the first.
        ring = np.roll(ring, -(int(hops.argmax()) + 1))
        moves = [np.concatenate([ring[:cut][::-1], ring[cut:]]) for cut in range(2, len(ring) - 1)]
        for moved, rest in ((ring[0], ring[1:]), (ring[-1], ring[:-1])):
            moves += [np.insert(rest, place, moved) for place in range(1, len(rest))]
        nearest = min(moves, key=cost)
        improved = cost(nearest)
        if not (improved[0] < found[0] or (improved[0] == found[0] and improved[1] < found[1] * (1 - ROUNDING))):
            return found, ring.tolist()
        ring, found = nearest, improved
