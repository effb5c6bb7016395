"""A device's memory: what the process may use, what it uses, running out of it, and recovering from that.

Where nothing but the machine limits a CPU process, too much memory does not raise: the kernel ends the process. Such a
limit is not hard, and whoever searches for the largest batch stays below it.
"""

from __future__ import annotations

import ctypes
import errno
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

from ..accelerator import get_accelerator

__all__ = [
    "MemoryLimit",
    "is_out_of_memory",
    "memory_limit",
    "peak_bytes",
    "recover",
    "reserved_memory",
    "reset_peak",
    "used_bytes",
]

MARGIN = 0.1
"""The share of what a machine has available that is left to others where the limit is not hard."""

_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "unable to allocate",
    "std::bad_alloc",
    "bad allocation",
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED and its relatives of cuDNN, cuSPARSE and cuSOLVER
    # oneDNN, which gives no reason; where the first sample ran, it is this one.
    "could not create a memory",
    "could not create a primitive",
    "could not execute a primitive",
    "ncclsystemerror: cuda error: out",
)
"""How libraries say it, in lower case, where their exception is not one of its own kind."""


# glibc keeps freed memory as long as something lives above it; pages in between can be given back. Looked up here,
# because that needs memory itself.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class MemoryLimit:
    """What this process may use of a device."""

    bytes: int
    is_hard: bool
    """True: an allocation beyond it raises. False: the process is killed, so stay below."""
    source: str
    """What sets it, in words."""


def memory_limit(device: torch.device) -> MemoryLimit:
    """What this process may use of ``device``, including what it uses already.

    On a GPU this is the card's memory, or less with ``set_per_process_memory_fraction`` or where others use it. On a
    CPU it is the limit of the address space (``RLIMIT_AS``) if there is one, which counts mapped bytes; else it is in
    resident bytes what this process uses plus its part of what the control group or the machine has available, less a
    tenth. Ranks on a machine have equal parts (``LOCAL_WORLD_SIZE``; unless that is set, all ranks are counted).
    """
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
    """What this process uses of ``device`` now, in the unit of :func:`memory_limit`."""
    if device.type == "cpu":
        memory = psutil.Process().memory_info()
        return int(memory.rss if _address_space_limit() is None else memory.vms)
    return int(get_accelerator().memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Begin to measure a peak. The peak of an address space cannot be reset: it is that since the process started."""
    get_accelerator().reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most that was used since :func:`reset_peak`, in the unit of :func:`memory_limit`."""
    if device.type == "cpu" and _address_space_limit() is not None:
        return _status_bytes("VmPeak") or used_bytes(device)
    return int(get_accelerator().max_memory_allocated(device))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether ``error``, or one that it follows from, says that memory did not suffice.

    That is said by torch's allocators for CPU and GPU, Python, C++, the operating system and the libraries that torch
    calls, in as many ways.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def recover(error: BaseException | None = None) -> None:
    """Release what a failed step holds: the local variables of its frames, its graph, and what allocators keep.

    ``error`` loses its traceback, which holds the frames.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()
    get_accelerator().empty_cache()
    if _malloc_trim is not None:
        _malloc_trim(0)


@contextmanager
def reserved_memory(size_bytes: int, device: torch.device) -> Iterator[None]:
    """Hold ``size_bytes`` of ``device``, written to, so that something else that is yet to come will have room.

    Raises whatever allocation raises if there is no room; :func:`is_out_of_memory` knows it.
    """
    # Written, because the kernel counts a page of a CPU process only when it is first used.
    held = torch.empty(max(size_bytes, 0), dtype=torch.uint8, device=device).fill_(1)
    try:
        yield
    finally:
        del held


def _limit_of_gpu(device: torch.device) -> MemoryLimit:
    free, total = torch.cuda.mem_get_info(device)
    # torch tells the fraction that was set from version 2.7 on; before, trials find the limit without an estimate.
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
    """A field of ``/proc/self/status`` that is in kB; None where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _left_in_control_group(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the process's control group, and those above it, let it use in addition; None without a limit."""
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
                    most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                    counts = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                    left.append(most - used + int(counts.get(cache, 0)))
    return max(min(left), 0) if left else None


def _ranks_on_this_machine() -> int:
    with suppress(KeyError, ValueError):
        return max(int(os.environ["LOCAL_WORLD_SIZE"]), 1)
    return dist.get_world_size() if dist.is_initialized() else 1
