"""How far the measurement of layers is, and how long it still takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..progress_display import in_words

__all__ = ["MIN_ROUNDS", "WARM_UP_ROUNDS", "LayerProgress", "seconds_left"]

MIN_ROUNDS = 5
"""Smallest number of rounds that are measured."""
WARM_UP_ROUNDS = 2
"""Number of rounds before the measured ones."""


@dataclass(frozen=True)
class LayerProgress:
    """Progress of one rank."""

    micro_batch: int
    """Samples of the micro-batch that is measured now."""
    index: int
    """Index of this size."""
    sizes: int
    """Number of sizes."""
    rounds: int
    """Number of rounds measured so far with this size; 0 also while it warms up."""
    seconds_left: float | None
    """About how long the measurement of this and the other sizes still takes; None before the first round."""

    def __str__(self) -> str:
        which = f" ({self.index + 1} of {self.sizes})" if self.sizes > 1 else ""
        samples = f"{self.micro_batch} sample{'' if self.micro_batch == 1 else 's'}"
        text = f"measuring micro-batches of {samples}{which}"
        return text if self.seconds_left is None else f"{text}, {in_words(self.seconds_left)} left"


def seconds_left(
    sizes: Sequence[int], index: int, rounds: int, measured_seconds: float, round_seconds: float, min_seconds: float
) -> float:
    """About how long the measurement still takes, if a round takes time in proportion to its micro-batch.

    Args:
        sizes: micro-batches, in the order in which they are measured.
        index: index of the size that is measured now.
        rounds: rounds of this size so far, with those that warm up.
        measured_seconds: how long this size has been measured, without the warm-up.
        round_seconds: time of a round of this size.
        min_seconds: shortest measurement of each size.
    """
    fewest = MIN_ROUNDS if min_seconds > 0 else 1
    ahead = max(WARM_UP_ROUNDS + fewest - rounds, 0) * round_seconds
    warming_up = max(WARM_UP_ROUNDS - rounds, 0) * round_seconds
    total = max(ahead, warming_up + min_seconds - measured_seconds)
    for size in sizes[index + 1 :]:
        each = round_seconds * size / sizes[index]
        total += WARM_UP_ROUNDS * each + max(fewest * each, min_seconds)
    return total
