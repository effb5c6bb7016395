"""Colossal-AI on a CPU: a quiet import, and the missing parts of its CPU accelerator. What a lack of memory looks like.

Importing this module imports Colossal-AI without warnings and applies :mod:`.corrections`; without a GPU or NPU, also
:class:`HeteroCpuAccelerator` and :mod:`.cpu`. Every module of this package that uses Colossal-AI must import this one
first; no other module treats a CPU specially.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import torch


def _is_not_kernel_notice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")


@contextmanager
def quiet_import() -> Iterator[None]:
    """Hide the warnings that Colossal-AI and its dependencies print at import, and no others: about optional packages,
    the spelling ``torch.cuda.amp.custom_fwd``, a missing 4-bit CPU kernel, and ``DeprecationWarning``."""
    bitsandbytes = logging.getLogger("bitsandbytes.backends.cpu.ops")
    bitsandbytes.addFilter(_is_not_kernel_notice)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Please install apex from source", UserWarning)
            warnings.filterwarnings("ignore", "Please install the latest tensornvme", UserWarning)
            warnings.filterwarnings("ignore", r"`torch\.cuda\.amp\.custom_(fwd|bwd)", FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        bitsandbytes.removeFilter(_is_not_kernel_notice)


# Colossal-AI's fp8 module compiles functions at import, for which torch would start one process per core in every rank.
# They take seconds and half a gigabyte each even if nothing is compiled, so start them on demand.
os.environ.setdefault("TORCH_WARM_POOL", "0")

# Migrated work has a communicator of its own. NCCL may deadlock if ranks run operations of two communicators in
# different orders. All ranks launch them in one order, which NCCL keeps on the device from version 2.26 on; before,
# CUDA_DEVICE_MAX_CONNECTIONS=1, which Colossal-AI sets, has that effect.
os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

SET_CONNECTIONS_LATE = torch.cuda.is_initialized() and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
"""True if CUDA was initialized before Colossal-AI has set that variable, which then has no effect."""

with quiet_import():
    import colossalai
    import colossalai.booster.plugin
    import colossalai.moe._operation
    import colossalai.shardformer.policies.auto_policy  # noqa: F401  (policies are imported later; their warnings are hidden here)
    from colossalai.accelerator import CpuAccelerator, get_accelerator, set_accelerator

    from ..common.ranks import destroy_without_lock
    from .corrections import correct_colossalai

_PROCESS_STATUS = Path("/proc/self/status")
_PROCESS_CLEAR_REFS = Path("/proc/self/clear_refs")


class HostStream(torch.cpu.Stream):
    """The CPU's only stream, in program order: all earlier work is done."""

    def synchronize(self) -> None:
        """Return at once: nothing is pending."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: nothing is pending."""

    def wait_event(self, event: Any) -> None:
        """Return at once: nothing is pending."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = HostEvent() if event is None else event
        event.record()
        return event

    def query(self) -> bool:
        return True


class HostEvent:
    """A moment in the CPU's program order, with the methods of ``torch.cuda.Event``."""

    _seconds: float

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once: work in program order is done when it is recorded."""

    def synchronize(self) -> None:
        """Return at once: work in program order is done when it is recorded."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        return (end_event._seconds - self._seconds) * 1e3


_HOST_STREAM = HostStream()


class HeteroCpuAccelerator(CpuAccelerator):
    """Colossal-AI's CPU accelerator, with what Colossal-AI asks of one: one device, work in program order, resident
    memory as device memory. What else a GPU has is refused by its parent."""

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device | int | None = None) -> None:
        """Do nothing: there is only one CPU device."""

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: torch.device | int | None = None) -> str:
        return "cpu"

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Return at once: CPU work is in program order."""

    def get_rng_state(self, device: torch.device | int | str | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def empty_cache(self) -> None:
        """Do nothing: the CPU allocator has no cache."""

    def memory_allocated(self, device: Any = None) -> int:
        return psutil.Process().memory_info().rss

    def max_memory_allocated(self, device: Any = None) -> int:
        """The peak of the resident set in bytes, on Linux since the last :meth:`reset_peak_memory_stats`."""
        with suppress(OSError):
            for line in _PROCESS_STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Set the peak to the current resident set, if the kernel supports and permits it."""
        with suppress(OSError):
            _PROCESS_CLEAR_REFS.write_text("5")  # proc(5): 5 resets the peak resident set size, VmHWM

    def Stream(self, device: Any = None, priority: int = 0, **kwargs: Any) -> HostStream:
        return HostStream()

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> HostEvent:
        return HostEvent()

    def current_stream(self, device: Any = None) -> HostStream:
        return _HOST_STREAM

    def stream(self, stream_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def autocast(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def recorded_event() -> Any:
    """An event that marks this moment in the order of the current device's work, so that the host does not wait."""
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def _set_up_cpu() -> None:
    """Register the CPU accelerator and patch Colossal-AI, if there is no GPU or NPU. A plain ``CpuAccelerator`` that
    was chosen before is replaced; its users call ``get_accelerator`` each time."""
    if get_accelerator().name != "cpu":
        return
    if not isinstance(get_accelerator(), HeteroCpuAccelerator):
        set_accelerator(HeteroCpuAccelerator())
    from .cpu import patch_colossalai

    patch_colossalai()


_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "unable to allocate",
    "std::bad_alloc",
    "bad allocation",
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED and its relatives of cuDNN, cuSPARSE and cuSOLVER
    # oneDNN gives no reason; if one sample ran before, the reason is missing memory.
    "could not create a memory",
    "could not create a primitive",
    "could not execute a primitive",
    "ncclsystemerror: cuda error: out",
)
"""Parts of the out-of-memory messages of libraries without an exception type for it, in lower case."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, its cause or context, and so on; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if ``error`` or its cause is an out-of-memory error, of any of the types and messages of allocators."""
    return any(
        isinstance(each, (MemoryError, torch.cuda.OutOfMemoryError))
        or (isinstance(each, OSError) and each.errno == errno.ENOMEM)
        or (isinstance(each, RuntimeError) and any(words in str(each).lower() for words in _MESSAGES))
        for each in causes(error)
    )


correct_colossalai()
destroy_without_lock()
_set_up_cpu()
