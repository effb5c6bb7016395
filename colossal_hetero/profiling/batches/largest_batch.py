"""The largest micro-batch that a device holds, found in few trials (Poplar, Algorithm 1, with its loop mended)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LargestBatch", "largest_batch"]

Estimate = Callable[[], int | None]

GUIDED = 2
"""Trials that an estimate places: it and one of its neighbors prove an estimate that is exact."""

# [Note: trials]
# Let L be the largest batch that fits and k = ⌊log2 L⌋. Doubling takes k + 1 trials that fit and one that does not, and
# leaves at most 2^k − 1 sizes open; halving needs k trials for these, wherever the guided ones before it have cut them.
# That is at most 2k + 2 + GUIDED ≤ 2·log2 L + 4, with a good estimate k + 4.


@dataclass(frozen=True)
class LargestBatch:
    """What a search has found, and how."""

    largest: int
    """The largest batch that ran; 0 if not even one sample did."""
    tried: tuple[tuple[int, bool], ...]
    """Every trial in its order: a batch, and whether it fitted."""


def largest_batch(
    fits: Callable[[int], bool], cap: int, estimate: Estimate | None = None, *, may_exceed_estimate: bool = True
) -> LargestBatch:
    """Find the largest batch in 1..``cap`` that fits, in at most ``2·log2(largest) + 4`` trials.

    Args:
        fits: runs a batch of that many samples; whether it could. Where it says yes, it does so for smaller ones too.
        cap: no larger batch is of interest.
        estimate: the largest batch to be expected after the trials so far, None if there is no telling. It is asked
            anew before each trial. It decides where the search looks first, not what it finds: a wrong one costs two
            trials.
        may_exceed_estimate: False where trying too large a batch ends the process. Then no batch above the estimate
            is tried (one sample always is), and what is found is the largest that the estimate permits.

    Raises:
        ValueError: ``cap`` is below 1.
    """
    if cap < 1:
        raise ValueError(f"the largest batch of interest is {cap}; it must be at least 1")
    tried: list[tuple[int, bool]] = []
    largest, failed = 0, cap + 1

    def expected() -> int | None:
        return None if estimate is None else estimate()

    def permitted(batch: int) -> int:
        """``batch``, or less where it must not exceed the estimate; at most ``largest`` if nothing may be tried."""
        room = None if may_exceed_estimate or largest == 0 else expected()
        return batch if room is None else min(batch, room)

    def attempt(batch: int) -> None:
        nonlocal largest, failed
        fitted = fits(batch)
        tried.append((batch, fitted))
        if fitted:
            largest = batch
        else:
            failed = batch

    held_back = 0
    while failed > cap and largest < cap:
        double = min(max(2 * largest, 1), cap)
        batch = permitted(double)
        # An estimate that grows with every trial would let the search creep: two trials less than double are enough.
        held_back += batch < double
        if batch <= largest or held_back > 2:
            return LargestBatch(largest, tuple(tried))
        attempt(batch)

    guided = 0
    while failed - largest > 1 and largest > 0:
        guess = expected() if guided < GUIDED else None
        if guess is None:
            batch = (largest + failed) // 2
        else:
            guided += 1
            batch = min(max(guess, largest + 1), failed - 1)
        batch = permitted(batch)
        if batch <= largest:
            break
        attempt(batch)
    return LargestBatch(largest, tuple(tried))
