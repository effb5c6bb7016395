"""Lack of memory: told from other errors, and foreseen on a GPU."""

from __future__ import annotations

import torch

__all__ = ["check_room", "is_out_of_memory"]


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if memory could not be allocated: a tensor on a GPU or the host, or by NCCL, which has memory of its own."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "out of memory")
    )


def check_room(device: torch.device, more_bytes: int, more_work: float) -> None:
    """Raise ``RuntimeError`` if a GPU, in its next iteration, would need more memory than there is.

    Between iterations most memory is free, so an allocation there shows little. In an iteration a rank needs its peak
    so far, ``more_bytes``, and activations for ``more_work``, a share of its own work.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    # torch tells the fraction that was set from version 2.7 on.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    limit = min(free + torch.cuda.memory_reserved(device), int(fraction * total))
    peak = torch.cuda.max_memory_allocated(device)
    activations = peak - torch.cuda.memory_allocated(device)
    needed = peak + more_bytes + int(more_work * activations)
    if needed > limit:
        raise RuntimeError(f"can't allocate memory: an iteration would need {needed} bytes, the GPU has {limit}")
