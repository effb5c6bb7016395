"""Probe the devices of all ranks: their kinds, their speed, and the links between them."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..common.ranks import of_every_rank, on_every_rank
from ..planner.cluster.group_networks import ETHERNET
from ..planner.cluster.topology import MeasuredLink, Topology
from .rank_facts import Nic, RankFacts, make_topology, pairs_to_measure

_ETHERNET_TYPE = "1"  # of /sys/class/net/*/type, as in linux/if_arp.h


def probe_this_rank(device: torch.device) -> RankFacts:
    """The facts of this rank. It measures the device for one to two seconds and calls no collective."""
    from ..profiling.device_profiler import sustained_flops
    from ..profiling.memory import memory_limit, used_bytes

    flops = sustained_flops(device, torch.float32 if device.type == "cpu" else torch.float16, windows=5)
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    machine = ""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return RankFacts(
        host=socket.gethostname(),
        machine=machine,
        device=name,
        memory_bytes=memory_limit(device).bytes,
        flops=flops,
        nics=find_nics(),
        used_bytes=used_bytes(device),
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def find_nics(root: Path = Path("/sys/class")) -> tuple[Nic, ...]:
    """The machine's network cards that are active: InfiniBand and RoCE (by their link layer), and Ethernet."""
    nics = []
    for port in sorted(root.glob("infiniband/*/ports/*")):
        if "ACTIVE" not in _read(port / "state"):
            continue
        rate = re.match(r"([\d.]+) *Gb/sec", _read(port / "rate"))
        kind = "InfiniBand" if _read(port / "link_layer") == "InfiniBand" else "RoCE"
        nics.append(Nic(kind, float(rate[1]) * 1e9 / 8 if rate else None))
    for card in sorted(root.glob("net/*")):
        # Loopback, bridges and other virtual interfaces have no device.
        if _read(card / "type") != _ETHERNET_TYPE or not (card / "device").exists():
            continue
        if _read(card / "operstate") in ("up", "unknown"):
            megabits = _read(card / "speed")
            known = megabits.isdigit() and int(megabits) > 0
            nics.append(Nic(ETHERNET, int(megabits) * 1e6 / 8 if known else None))
    return tuple(nics)


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


SMALL_BYTES = 8
FIRST_BYTES = 1 << 20
MAX_BYTES = 1 << 28
AIM_SECONDS = 0.02  # aimed time of the large message in one direction; it is long enough to make the latency negligible
SMALL_TRIPS, LARGE_TRIPS = 30, 7


def measure_links(
    rounds: Sequence[Sequence[tuple[int, int]]],
    protocol: str,
    device: torch.device,
    group: Any = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[MeasuredLink]:
    """The links of these pairs of ranks, on every rank. Collective over all ranks. ``latency + bytes / bandwidth`` is
    fitted to a message of 8 bytes and one of some milliseconds."""
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
    return [MeasuredLink.model_validate(link) for links in of_every_rank(measured) for link in links]


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


def probe_ranks(
    device: torch.device,
    cluster_of: Sequence[tuple[str, str]] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Topology, tuple[int, ...], list[MeasuredLink]]:
    """The topology of all machines, the measured rank of each of its ranks, and the measured links. Collective."""
    say(f"measuring {dist.get_world_size()} devices")
    facts = on_every_rank(lambda: probe_this_rank(device), "probing")
    rounds = pairs_to_measure(facts)
    own = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    groups = {"gloo": (torch.device("cpu"), own)}
    if all(fact.device != "cpu" for fact in facts):
        groups["nccl"] = (device, None if dist.get_backend() == "nccl" else dist.new_group(backend="nccl"))
    links: list[MeasuredLink] = []
    for protocol, (at, group) in groups.items():

        def show(number: int, count: int, protocol: str = protocol) -> None:
            if number == 0 or (number + 1) * 10 // count > number * 10 // count:
                say(f"measuring links over {protocol}: {number + 1} of {count}")

        links += measure_links(rounds, protocol, at, group, show)
    topology, order = make_topology(facts, links, cluster_of)
    return topology, order, links
