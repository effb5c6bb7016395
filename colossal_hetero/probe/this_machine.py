"""Collect the facts of one rank: its machine, network cards and device. Effects: system files, clock, device."""

from __future__ import annotations

import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from ..planner.cluster.group_networks import ETHERNET
from .rank_facts import Nic, RankFacts

__all__ = ["find_nics", "probe_this_rank", "sustained_flops"]

WINDOW_SECONDS = 0.3
"""Length of a window. It is longer than the period of a CPU quota, because a throttled CPU is fast in some short
products and stopped in others."""
WINDOWS = 5
"""Number of windows, of which the median counts."""

_ETHERNET_TYPE = "1"  # of /sys/class/net/*/type, as in linux/if_arp.h


def probe_this_rank(device: torch.device) -> RankFacts:
    """The facts of this rank. It measures the device for one to two seconds and calls no collective."""
    from ..profiling.memory import memory_limit, used_bytes

    flops = sustained_flops(device)
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


def sustained_flops(device: torch.device) -> float:
    """FLOP/s of a matrix product over some time: in half precision on a GPU, in single precision on a CPU."""
    on_cpu = device.type == "cpu"
    size = 512 if on_cpu else 8192
    factor = torch.ones(size, size, device=device, dtype=torch.float32 if on_cpu else torch.float16)
    result = torch.empty_like(factor)
    torch.mm(factor, factor, out=result)
    rates = []
    for _ in range(WINDOWS):
        synchronize(device)
        products, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < WINDOW_SECONDS:
            torch.mm(factor, factor, out=result)
            synchronize(device)
            products += 1
        rates.append(2 * size**3 * products / passed)
    return median(rates)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
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
    """The text of a file; empty if it does not exist or the driver refuses to read it."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""
