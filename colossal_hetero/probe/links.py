"""Measure latency and bandwidth between ranks with round trips of messages. Effects: the network and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..planner.cluster.link import MeasuredLink
from .this_machine import synchronize

__all__ = ["measure_links"]

SMALL_BYTES = 8
FIRST_BYTES = 1 << 20
MAX_BYTES = 1 << 28
AIM_SECONDS = 0.02
"""Aimed time of the large message in one direction; it is long enough to make the latency negligible."""
SMALL_TRIPS, LARGE_TRIPS = 30, 7
"""Number of round trips of each message."""


def measure_links(
    rounds: Sequence[Sequence[tuple[int, int]]],
    protocol: str,
    device: torch.device,
    group: Any = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[MeasuredLink]:
    """Measure the links of pairs of ranks. Collective over all ranks.

    The time ``latency + bytes / bandwidth`` is fitted to a message of 8 bytes and one of some milliseconds; each time
    is half of the median of several round trips.

    Args:
        rounds: pairs of ranks, the same on all ranks; pairs of a round are disjoint and measured at the same time.
        protocol: "gloo" or "nccl".
        device: device of the messages; this rank's GPU for NCCL.
        group: process group of all ranks with that protocol; None is the default group, which must support CPUs.
        on_progress: called before each round with its index and the number of rounds.

    Returns:
        The links of all pairs, on every rank.
    """
    rank = dist.get_rank()
    measured: list[dict[str, Any]] = []
    for number, pairs in enumerate(rounds):
        if on_progress is not None:
            on_progress(number, len(rounds))
        for a, b in pairs:
            if rank == a:
                measured.append(_measure(a, b, protocol, device, group).model_dump())
            elif rank == b:
                _answer(a, device, group)
        dist.barrier()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measured)
    return [MeasuredLink.model_validate(link) for links in everyone for link in links]


def _measure(rank: int, other: int, protocol: str, device: torch.device, group: Any) -> MeasuredLink:
    small = _trips(other, SMALL_BYTES, SMALL_TRIPS, device, group)
    first = _trips(other, FIRST_BYTES, 2, device, group)
    size = min(max(FIRST_BYTES, int(FIRST_BYTES * AIM_SECONDS / first)), MAX_BYTES)
    dist.send(torch.tensor([size], device=device), other, group=group)
    large = _trips(other, size, LARGE_TRIPS, device, group)
    # If the difference is small compared with the noise, use a lower bound of the bandwidth instead.
    bandwidth = (size - SMALL_BYTES) / (large - small) if large > 2 * small else size / large
    latency = max(small - SMALL_BYTES / bandwidth, 0.0)
    return MeasuredLink(ranks=(rank, other), protocol=protocol, latency_seconds=latency, bytes_per_second=bandwidth)


def _answer(other: int, device: torch.device, group: Any) -> None:
    """The other side of :func:`_measure`."""
    _echo(other, SMALL_BYTES, SMALL_TRIPS, device, group)
    _echo(other, FIRST_BYTES, 2, device, group)
    size = torch.zeros(1, dtype=torch.long, device=device)
    dist.recv(size, other, group=group)
    _echo(other, int(size.item()), LARGE_TRIPS, device, group)


def _trips(other: int, size: int, trips: int, device: torch.device, group: Any) -> float:
    """Seconds in one direction: half of the median round trip, without the first one, which also connects."""
    message = torch.ones(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(trips + 1):
        synchronize(device)
        start = time.perf_counter()
        dist.send(message, other, group=group)
        dist.recv(message, other, group=group)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:]) / 2


def _echo(other: int, size: int, trips: int, device: torch.device, group: Any) -> None:
    message = torch.empty(size, dtype=torch.uint8, device=device)
    for _ in range(trips + 1):
        dist.recv(message, other, group=group)
        dist.send(message, other, group=group)
    synchronize(device)
