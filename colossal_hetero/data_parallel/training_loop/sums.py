"""Sums of numbers over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...accelerator import get_accelerator

__all__ = ["sum_over_ranks"]


def sum_over_ranks(*values: float) -> list[float]:
    """The sum of each value over all ranks, in double precision. All ranks call it with equally many values."""
    sums = torch.tensor(values, dtype=torch.float64, device=get_accelerator().get_current_device())
    dist.all_reduce(sums)
    return sums.tolist()
