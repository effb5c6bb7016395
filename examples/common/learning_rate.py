"""The learning-rate schedule of the examples."""

from __future__ import annotations

import math

WARMUP_SHARE = 0.1
"""Share of all iterations in which the learning rate rises to its peak; after that it falls along a cosine."""


def warm_up_and_decay(iteration: int, total: int) -> float:
    """The factor of the peak learning rate in an iteration: a linear rise, then a cosine that ends near zero."""
    warmup = max(1, round(WARMUP_SHARE * total))
    if iteration < warmup:
        return (iteration + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (iteration - warmup) / max(1, total - warmup)))
