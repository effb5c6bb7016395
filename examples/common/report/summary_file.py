"""Values and files that all summaries share."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch.distributed as dist

from colossal_hetero.colossalai_support.accelerator import get_accelerator
from colossal_hetero.common.atomic_files import replacing

__all__ = ["finite", "peak_memory_by_rank", "quantiles", "warmup_iterations", "write_json"]

WARMUP_ITERATIONS = 5


def warmup_iterations(iterations: int) -> int:
    """First iterations that do not count in medians (allocation, caches, no plan yet): at most a quarter of the run."""
    return min(WARMUP_ITERATIONS, iterations // 4)


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and first and last decile."""
    deciles = {name: float(np.percentile(seconds, percent)) for name, percent in (("p10", 10), ("p90", 90))}
    return {"median": median(seconds), **deciles}


def peak_memory_by_rank() -> list[int]:
    """The most bytes that each rank's process has allocated so far. Collective over all ranks."""
    peaks = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, int(get_accelerator().max_memory_allocated()))
    return peaks


def finite(value: float) -> float | None:
    """``value``, or None if it is infinite or not a number, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def write_json(value: Any, path: Path, indent: int | None = 2) -> None:
    """Write ``value`` to ``path`` at once: a reader sees the old file or the complete new one."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(value, indent=indent) + "\n")
