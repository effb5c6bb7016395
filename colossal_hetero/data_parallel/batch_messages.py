"""What rank 0 says about the division of global batches."""

from __future__ import annotations

from collections.abc import Sequence

from ..planner.batches.allocation import Allocation

__all__ = ["changes_in_words", "division_in_words", "slow_data_in_words"]


def division_in_words(allocation: Allocation, devices: Sequence[str]) -> str:
    """Each rank's samples of a global batch, in words; consecutive ranks with the same device and part are grouped."""
    groups: list[tuple[int, int]] = []
    for rank, (share, device) in enumerate(zip(allocation.shares, devices, strict=True)):
        if groups and (share, device) == (allocation.shares[groups[-1][0]], devices[groups[-1][0]]):
            groups[-1] = groups[-1][0], rank
        else:
            groups.append((rank, rank))
    parts = []
    for first, last in groups:
        share = allocation.shares[first]
        names = f"rank {first}" if first == last else f"ranks {first}-{last}"
        steps = "" if share.steps == 1 else f" in {share.steps} micro-batches of at most {share.micro_batch}"
        parts.append(f"{names} ({devices[first]}) {share.samples}{steps}")
    return f"of each global batch of {allocation.global_batch_size}: {'; '.join(parts)}"


def changes_in_words(
    before: Allocation, after: Allocation, moves: Sequence[float], devices: Sequence[str]
) -> str | None:
    """What changed from one division to the next; None if every rank keeps its samples.

    Args:
        before, after: the divisions.
        moves: by rank, how many times as long as before it takes for its former samples.
        devices: by rank.
    """
    changes = [
        f"rank {rank} ({devices[rank]}) takes {move:.2f} times as long as before: {old.samples} → {new.samples} samples"
        for rank, (move, old, new) in enumerate(zip(moves, before.shares, after.shares, strict=True))
        if old.samples != new.samples
    ]
    return f"global batches of {before.global_batch_size} are divided again: {'; '.join(changes)}" if changes else None


def slow_data_in_words(rank: int, data_seconds: float, workers: int) -> str:
    """That a rank waits for its data, and what would help.

    Args:
        rank: the rank.
        data_seconds: seconds per global batch in which its loop waits for data.
        workers: ``num_workers`` of its data loader.
    """
    return (
        f"rank {rank} waits {data_seconds:.2g} s per global batch for its data: more workers would help "
        f"(num_workers={workers})"
    )
