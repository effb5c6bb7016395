"""Latency and bandwidth between ranks, by ping-pong. Effects: the network and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..planner.cluster.link import MeasuredLink

__all__ = ["measure_links"]

SMALL_BYTES = 8
FIRST_BYTES = 1 << 20
MAX_BYTES = 1 << 28
AIM_SECONDS = 0.02
"""One way of the large message is to take about that long, so that its latency does not count."""
SMALL_TRIPS, LARGE_TRIPS = 30, 7


def measure_links(
    rounds: Sequence[Sequence[tuple[int, int]]],
    protocol: str,
    device: torch.device,
    group: Any = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[MeasuredLink]:
    """What it costs pairs of ranks to send each other a message: ``latency + bytes / bandwidth`` through a message of
    8 bytes and one of some milliseconds (the medians of several round trips, halved).

    Args:
        rounds: pairs of ranks; those of a round are disjoint and measured at the same time. The same on all ranks.
        protocol: for :class:`MeasuredLink`, "gloo" or "nccl".
        device: of the messages, this rank's GPU for NCCL.
        group: of all ranks, of that protocol; None is the default one, which must work on CPUs.
        on_progress: called with the number of the round and of all rounds.

    Returns:
        The links of all pairs, on every rank.
    """
    rank = dist.get_rank()
    own: list[dict[str, Any]] = []
    for number, pairs in enumerate(rounds):
        if on_progress is not None:
            on_progress(number, len(rounds))
        for a, b in pairs:
            if rank == a:
                own.append(_measure(a, b, protocol, device, group).model_dump())
            elif rank == b:
                _answer(a, device, group)
        dist.barrier()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return [MeasuredLink.model_validate(link) for links in everyone for link in links]


def _measure(rank: int, other: int, protocol: str, device: torch.device, group: Any) -> MeasuredLink:
    small = _trips(other, SMALL_BYTES, SMALL_TRIPS, device, group)
    first = _trips(other, FIRST_BYTES, 2, device, group)
    size = min(max(FIRST_BYTES, int(FIRST_BYTES * AIM_SECONDS / first)), MAX_BYTES)
    dist.send(torch.tensor([size], device=device), other, group=group)
    large = _trips(other, size, LARGE_TRIPS, device, group)
    # Where noise hides the difference, the large message as a whole says what is reached at least.
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
    """Seconds one way: half of the median round trip, of which the first, which connects, does not count."""
    message = torch.ones(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(trips + 1):
        _synchronize(device)
        start = time.perf_counter()
        dist.send(message, other, group=group)
        dist.recv(message, other, group=group)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:]) / 2


def _echo(other: int, size: int, trips: int, device: torch.device, group: Any) -> None:
    message = torch.empty(size, dtype=torch.uint8, device=device)
    for _ in range(trips + 1):
        dist.recv(message, other, group=group)
        dist.send(message, other, group=group)
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
