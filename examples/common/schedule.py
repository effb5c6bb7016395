"""The learning rate of the examples."""

from __future__ import annotations

import math

__all__ = ["rise_and_fall"]

WARMUP_SHARE = 0.1
"""Share of all iterations in which the learning rate rises to its peak; it falls in a cosine after that."""


def rise_and_fall(iteration: int, total: int) -> float:
    """The learning rate's factor: a linear rise, then a cosine that ends near zero."""
    warmup = max(1, round(WARMUP_SHARE * total))
    if iteration < warmup:
        return (iteration + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (iteration - warmup) / max(1, total - warmup)))
