"""Colossal-AI on a CPU: a quiet import, and the parts of its CPU accelerator that are missing.

Importing this module imports Colossal-AI without its import-time noise and, where no GPU or NPU is present,
registers :class:`HeteroCpuAccelerator` through ``colossalai.accelerator.set_accelerator``. Every module of this
package that needs Colossal-AI imports this one first; nothing else in the package knows that a CPU is special.
"""

from __future__ import annotations

import logging
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psutil
import torch

__all__ = ["HeteroCpuAccelerator", "quiet_import"]


@contextmanager
def quiet_import() -> Iterator[None]:
    """Hide what Colossal-AI and its dependencies print while they are imported, and nothing else.

    The noise is a handful of ``UserWarning`` about optional packages (apex, tensornvme, xformers kernels),
    deprecations inside dependencies, and bitsandbytes' log line about its missing 4-bit CPU kernel.
    """
    bitsandbytes = logging.getLogger("bitsandbytes")
    level = bitsandbytes.level
    bitsandbytes.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(apex|tensornvme|flash.?attn|xformers|kernel).*")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        bitsandbytes.setLevel(level)


with quiet_import():
    import colossalai  # noqa: F401  (its import has side effects that later imports rely on)
    from colossalai.accelerator import CpuAccelerator, get_accelerator, set_accelerator


class HeteroCpuAccelerator(CpuAccelerator):
    """Colossal-AI's CPU accelerator, completed: one device, program order, resident memory as device memory."""

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device | int | None = None) -> None:
        """There is one CPU device; choosing it changes nothing."""

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: torch.device | int | None = None) -> str:
        return "cpu"

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """CPU work is in program order; there is nothing to wait for."""

    # Random state ---------------------------------------------------------------------------------------

    def get_rng_state(self, device: torch.device | int | str | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        torch.set_rng_state(new_states[0])

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def seed(self) -> None:
        torch.seed()

    def seed_all(self) -> None:
        torch.seed()

    def initial_seed(self) -> int:
        return torch.initial_seed()

    # Memory: bytes of this process's resident set ---------------------------------------------------------

    def empty_cache(self) -> None:
        """The CPU allocator keeps no cache of its own."""

    def memory_allocated(self, device: Any = None) -> int:
        return psutil.Process().memory_info().rss

    def max_memory_allocated(self, device: Any = None) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def max_memory_reserved(self, device: Any = None) -> int:
        return self.max_memory_allocated(device)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """The kernel's peak of a process's resident set cannot be reset without privileges."""

    def reset_max_memory_allocated(self, device: Any = None) -> None:
        """See :meth:`reset_peak_memory_stats`."""

    # Streams: CPU work is in program order, so they are stand-ins -----------------------------------------

    def Stream(self, device: Any = None, priority: int = 0, **kwargs: Any) -> torch.cpu.Stream:
        return torch.cpu.Stream()

    def current_stream(self, device: Any = None) -> torch.cpu.Stream:
        return torch.cpu.current_stream()

    def default_stream(self, device: Any = None) -> torch.cpu.Stream:
        return torch.cpu.current_stream()

    def set_stream(self, stream_: Any) -> None:
        """There is one stream."""

    def stream(self, stream_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def autocast(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


if get_accelerator().name == "cpu" and not isinstance(get_accelerator(), HeteroCpuAccelerator):
    set_accelerator(HeteroCpuAccelerator())
