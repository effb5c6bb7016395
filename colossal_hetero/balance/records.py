"""What happened in an iteration, on every rank: plain data for reports and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["IterationRecord", "LocalRecord", "RankRecord", "merge_records"]


@dataclass(frozen=True)
class LocalRecord:
    """One iteration as one rank saw it. Seconds; shares in [0, 1]."""

    iteration: int
    work_seconds: float
    matmul_seconds: float
    communication_seconds: float
    equal_work_seconds: float
    """What ``work_seconds`` would be at the rank's full share (the T of Eq. 1)."""
    equal_matmul_seconds: float
    """What ``matmul_seconds`` would be at the rank's full share (the M of Eq. 1)."""
    resized: float
    """Share of its columns that the rank pruned."""
    exchanged: bool
    """Whether the group exchanged times at the end of this iteration."""
    plan_changed: bool
    """Whether the plan of the iterations after this one is another."""


@dataclass(frozen=True)
class RankRecord:
    """A rank's part of an iteration. Seconds; shares in [0, 1]."""

    rank: int
    work_seconds: float
    matmul_seconds: float
    wait_seconds: float
    """Time in collectives beyond that of the rank of its tensor-parallel group that spent least there: the time from
    its own arrival until the last rank's."""
    communication_seconds: float
    equal_work_seconds: float
    equal_matmul_seconds: float
    resized: float
    migrated: float = 0.0
    received: float = 0.0


@dataclass(frozen=True)
class IterationRecord:
    """One iteration on all ranks."""

    iteration: int
    ranks: tuple[RankRecord, ...]
    exchanged: bool
    plan_changed: bool


def merge_records(per_rank: Sequence[Sequence[LocalRecord]], groups: Sequence[Sequence[int]]) -> list[IterationRecord]:
    """All ranks' views of the same iterations as one record each, by iteration.

    ``per_rank`` is by global rank, ``groups`` the tensor-parallel groups as lists of global ranks. Iterations that some
    rank has not read yet are left out.
    """
    by_iteration = [{record.iteration: record for record in records} for records in per_rank]
    known = set(by_iteration[0]).intersection(*by_iteration[1:])
    least: dict[tuple[int, int], float] = {}
    for iteration in known:
        for group in groups:
            shortest = min(by_iteration[rank][iteration].communication_seconds for rank in group)
            least.update({(iteration, rank): shortest for rank in group})
    merged = []
    for iteration in sorted(known):
        views = [records[iteration] for records in by_iteration]
        ranks = tuple(
            RankRecord(
                rank=rank,
                work_seconds=view.work_seconds,
                matmul_seconds=view.matmul_seconds,
                wait_seconds=view.communication_seconds - least[iteration, rank],
                communication_seconds=view.communication_seconds,
                equal_work_seconds=view.equal_work_seconds,
                equal_matmul_seconds=view.equal_matmul_seconds,
                resized=view.resized,
            )
            for rank, view in enumerate(views)
        )
        merged.append(
            IterationRecord(
                iteration, ranks, any(view.exchanged for view in views), any(view.plan_changed for view in views)
            )
        )
    return merged
