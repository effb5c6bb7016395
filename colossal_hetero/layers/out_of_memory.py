"""Tell a lack of memory from other errors."""

from __future__ import annotations

import torch

__all__ = ["is_out_of_memory"]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a tensor could not be allocated, on a GPU or the host."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)
