"""Records of iterations on every rank: plain data for reports and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["IterationRecord", "LocalRecord", "RankRecord", "merge_records"]


@dataclass(frozen=True)
class LocalRecord:
    """One iteration as measured by one rank. Times are in seconds, shares in [0, 1]."""

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
    """Whether the group decided on a plan at the end of this iteration."""
    plan_changed: bool
    """Whether another plan applies from the iteration after this one on."""
    migrated: float = 0.0
    """Share of its work that other ranks did, for which it sent them weights."""
    resharded: float = 0.0
    """Share of its work that the rank has given away for good."""
    received: float = 0.0
    """Work of others that the rank took on, as a share of its own."""
    block_seconds: float = 0.0
    """The part of ``work_seconds`` between the products of a block."""
    own_score: float = 1.0
    """The rank's shortest ``equal_work_seconds`` so far, divided by those of this iteration."""
    note: str = ""
    """The note of the plan that applies in this iteration, for example why nothing is migrated."""


@dataclass(frozen=True)
class RankRecord:
    """A rank's part of an iteration. Times are in seconds, shares and scores in [0, 1]."""

    rank: int
    work_seconds: float
    matmul_seconds: float
    wait_seconds: float
    """Time spent waiting in collectives: the rank's time there minus the shortest time there of any rank of its
    tensor-parallel group."""
    communication_seconds: float
    equal_work_seconds: float
    equal_matmul_seconds: float
    resized: float
    migrated: float = 0.0
    resharded: float = 0.0
    received: float = 0.0
    block_seconds: float = 0.0
    relative_score: float = 1.0
    """The shortest ``equal_work_seconds`` in its tensor-parallel group, divided by this rank's."""
    own_score: float = 1.0
    """This rank's shortest ``equal_work_seconds`` so far, divided by its present ones."""


@dataclass(frozen=True)
class IterationRecord:
    """One iteration on all ranks."""

    iteration: int
    ranks: tuple[RankRecord, ...]
    exchanged: bool
    plan_changed: bool
    note: str = ""
    """The note of the plan, for example why nothing is migrated; empty if there is none."""


def merge_records(per_rank: Sequence[Sequence[LocalRecord]], groups: Sequence[Sequence[int]]) -> list[IterationRecord]:
    """Merge all ranks' records of the same iteration into one, in the order of iterations.

    ``per_rank`` is by global rank, ``groups`` the tensor-parallel groups as lists of global ranks. Iterations that some
    rank has not read yet are left out.
    """
    by_iteration = [{record.iteration: record for record in records} for records in per_rank]
    known = set(by_iteration[0]).intersection(*by_iteration[1:])
    group_of = {rank: group for group in groups for rank in group}
    merged = []
    for iteration in sorted(known):
        views = [records[iteration] for records in by_iteration]
        merged.append(
            IterationRecord(
                iteration=iteration,
                ranks=tuple(
                    _rank_record(rank, view, [views[other] for other in group_of[rank]])
                    for rank, view in enumerate(views)
                ),
                exchanged=any(view.exchanged for view in views),
                plan_changed=any(view.plan_changed for view in views),
                note=next((view.note for view in views if view.note), ""),
            )
        )
    return merged


def _rank_record(rank: int, view: LocalRecord, group: Sequence[LocalRecord]) -> RankRecord:
    return RankRecord(
        rank=rank,
        work_seconds=view.work_seconds,
        matmul_seconds=view.matmul_seconds,
        wait_seconds=view.communication_seconds - min(other.communication_seconds for other in group),
        communication_seconds=view.communication_seconds,
        equal_work_seconds=view.equal_work_seconds,
        equal_matmul_seconds=view.equal_matmul_seconds,
        resized=view.resized,
        migrated=view.migrated,
        resharded=view.resharded,
        received=view.received,
        block_seconds=view.block_seconds,
        relative_score=min(other.equal_work_seconds for other in group) / view.equal_work_seconds,
        own_score=view.own_score,
    )
