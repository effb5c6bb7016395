"""Find the largest micro-batch that a device holds in few trials (Poplar, Algorithm 1, with its loop corrected)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LargestBatch", "largest_batch"]

Estimate = Callable[[], int | None]

GUIDED = 2
"""Number of trials at the estimate; if it is exact, trying it and one neighbor proves that."""

# [Note: trials]
# Let L be the largest batch that fits and k = ⌊log2 L⌋. Doubling takes k + 1 trials that fit and one that does not, and
# leaves at most 2^k − 1 candidates. Bisection needs at most k trials for these, also after trials at an estimate. In
# total there are at most 2k + 2 + GUIDED ≤ 2·log2 L + 4 trials, and k + 4 with a good estimate.


@dataclass(frozen=True)
class LargestBatch:
    """The result of a search and its trials."""

    largest: int
    """Samples of the largest batch that ran; 0 if not even the smallest fits."""
    tried: tuple[tuple[int, bool], ...]
    """All trials in order: the batch, and whether it fits."""


def largest_batch(
    fits: Callable[[int], bool],
    cap: int,
    estimate: Estimate | None = None,
    *,
    smallest: int = 1,
    may_exceed_estimate: bool = True,
) -> LargestBatch:
    """Find the largest batch in ``smallest``..``cap`` that fits, in at most ``2·log2(largest) + 4`` trials.

    Args:
        fits: runs a batch of that many samples and returns whether it fits. If a batch fits, smaller ones must too.
        cap: upper limit of the search.
        estimate: returns the largest batch expected from the trials so far, or None if unknown; called before each
            trial. It only sets which batches are tried first and does not change the result; a wrong estimate costs two
            trials.
        smallest: the first batch that is tried, the smallest that can be run at all.
        may_exceed_estimate: False if trying too large a batch would end the process. Then no batch above the estimate
            is tried, except the smallest, and the result is the largest batch that the estimate permits.

    Raises:
        ValueError: ``smallest`` is below 1, or ``cap`` is below ``smallest``.
    """
    if not 1 <= smallest <= cap:
        raise ValueError(f"smallest={smallest} and cap={cap} must be at least 1 sample, and cap not below smallest")
    tried: list[tuple[int, bool]] = []
    largest, failed = 0, cap + 1

    def expected() -> int | None:
        return None if estimate is None else estimate()

    def permitted(batch: int) -> int:
        """``batch``, limited to the estimate if it must not be exceeded; at most ``largest`` if no trial is allowed."""
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
        double = min(max(2 * largest, smallest), cap)
        batch = permitted(double)
        # If the estimate grows a little with every trial, the search would take many trials; end it after two trials
        # below double.
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
