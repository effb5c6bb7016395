"""Memory of a device: its limit, its use, and recovery from running out of it. If only the machine's memory limits a
CPU process, using too much raises no error, but the kernel ends the process: such a limit is not hard, and a search for
the largest batch must stay below it."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ..colossalai_support.accelerator import causes, get_accelerator

MARGIN = 0.1  # if the limit is not hard, this share of the machine's available memory is left to other processes


# glibc keeps freed memory as long as memory above it is in use; malloc_trim returns such pages to the system. It is
# looked up at import, because the lookup itself needs memory.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class MemoryLimit:
    bytes: int  # including memory that the process already uses
    is_hard: bool  # True if an allocation beyond the limit raises an error; False if the kernel may end the process
    source: str


def memory_limit(device: torch.device) -> MemoryLimit:
    """The memory of ``device`` that this process may use, including memory that it already uses.

    On a GPU it is the card's memory less that of other processes, limited by ``set_per_process_memory_fraction``. On a
    CPU it is the limit of the address space (``RLIMIT_AS``), in mapped bytes; without one, in resident bytes, this
    rank's equal part of 90 % of what the control group or machine has available (``LOCAL_WORLD_SIZE``; if not set, of
    all ranks)."""
    if device.type == "cuda":
        return _limit_of_gpu(device)
    if device.type != "cpu":
        accelerator = getattr(torch, device.type)
        return MemoryLimit(int(accelerator.mem_get_info(device)[0] + used_bytes(device)), True, "the device")
    address_space = _address_space_limit()
    if address_space is not None:
        return MemoryLimit(address_space, True, "the limit of the address space (RLIMIT_AS)")
    available, source = psutil.virtual_memory().available, "the machine's available memory"
    left = _left_in_control_group()
    if left is not None and left < available:
        available, source = left, "the control group's memory limit"
    part = int(available * (1 - MARGIN)) // _ranks_on_this_machine()
    return MemoryLimit(used_bytes(device) + part, False, source)


def used_bytes(device: torch.device) -> int:
    """Bytes in use now, counted as in :func:`memory_limit`."""
    if device.type == "cpu":
        memory = psutil.Process().memory_info()
        return int(memory.rss if _address_space_limit() is None else memory.vms)
    return int(get_accelerator().memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Start measuring the peak. With an address-space limit it cannot be reset and counts from the process start."""
    get_accelerator().reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Largest number of bytes used since :func:`reset_peak`, counted as in :func:`memory_limit`."""
    if device.type == "cpu" and _address_space_limit() is not None:
        return _status_bytes("VmPeak") or used_bytes(device)
    return int(get_accelerator().max_memory_allocated(device))


def counts_bytes(device: torch.device) -> bool:
    """True if the device's allocator counts the bytes of each tensor exactly."""
    return device.type == "cuda"


def outside_bytes(device: torch.device) -> int | None:
    """Bytes in use on a GPU, but not by torch's allocator: the context, libraries, and other processes. None for other
    devices."""
    if not counts_bytes(device):
        return None
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device), 0)


def recover(error: BaseException | None = None) -> None:
    """Release the memory of a failed step: variables in frames, its graph, and allocators' caches."""
    for each in causes(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
    gc.collect()
    get_accelerator().empty_cache()
    if _malloc_trim is not None:
        _malloc_trim(0)


@contextmanager
def reserved_memory(size_bytes: int, device: torch.device) -> Iterator[None]:
    """In the block, hold ``size_bytes`` of ``device``, so that later allocations of that size fit, if they fit now."""
    # The memory is written, because the kernel counts a page of a CPU process only after its first use.
    held = torch.empty(max(size_bytes, 0), dtype=torch.uint8, device=device).fill_(1)
    try:
        yield
    finally:
        del held


def _limit_of_gpu(device: torch.device) -> MemoryLimit:
    free, total = torch.cuda.mem_get_info(device)
    # torch reports the fraction from version 2.7 on; with older versions the trials find the limit themselves.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    reachable = free + torch.cuda.memory_reserved(device)
    if fraction * total <= reachable:
        source = "the card's memory" if fraction == 1.0 else f"{fraction:.0%} of the card's memory, as was set"
        return MemoryLimit(int(fraction * total), True, source)
    return MemoryLimit(int(reachable), True, "what other processes leave of the card's memory")


def _address_space_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _status_bytes(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _left_in_control_group(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the process may use in addition by its control group and the groups above it; None without a limit."""
    left: list[int] = []
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers == "":
                top, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                top, cache = root / "memory", "total_inactive_file"
                limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            group = top / name.lstrip("/")
            for folder in [group, *group.parents][: len(group.parts) - len(top.parts) + 1]:
                with suppress(OSError, ValueError):  # no such file; "max"
                    maximum, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                    counts = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                    left.append(maximum - used + int(counts.get(cache, 0)))
    return max(min(left), 0) if left else None


def _ranks_on_this_machine() -> int:
    with suppress(KeyError, ValueError):
        return max(int(os.environ["LOCAL_WORLD_SIZE"]), 1)
    return dist.get_world_size() if dist.is_initialized() else 1
