"""What balancing did and what it left: an iteration as it was, and what it would have been otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import Any

import numpy as np

from .records import IterationRecord

__all__ = ["BalanceReport", "RankSummary", "WhatIf", "ideal_ratio", "lossless_seconds", "report", "what_if"]


@dataclass(frozen=True)
class WhatIf:
    """What an iteration took a tensor-parallel group, and what it would have taken. Seconds."""

    waiting_seconds: float
    """What a rank waited for slower ones, mean over the ranks."""
    balanced_seconds: float
    """An iteration as it was: the slowest rank's work and the communication that is not waiting."""
    unbalanced_seconds: float
    """An iteration without balancing: the same with every rank's full share."""
    homogeneous_seconds: float
    """An iteration if all ranks were as fast as the fastest."""
    bound_seconds: float
    """An iteration with nothing pruned and the products spread over the ranks in the best way, at no cost."""

    @property
    def saved_seconds(self) -> float:
        """What balancing brought; negative where it cost more than it brought."""
        return self.unbalanced_seconds - self.balanced_seconds


@dataclass(frozen=True)
class RankSummary:
    """A rank's medians over the measured iterations. Seconds; shares and scores in [0, 1]."""

    rank: int
    work_seconds: float
    matmul_seconds: float
    wait_seconds: float
    resized: float
    migrated: float
    received: float
    relative_score: float
    """The fastest rank's time for the same work, of those of its tensor-parallel group, / this rank's."""
    own_score: float
    """This rank's best time so far for the same work / its present one."""


@dataclass(frozen=True)
class BalanceReport(WhatIf):
    """Medians over the measured iterations of one tensor-parallel group."""

    iterations: int
    ranks: tuple[RankSummary, ...]
    changes: int
    """How often the plan changed."""
    notes: tuple[str, ...]
    """What decisions had to say, each once, the latest last."""


def lossless_seconds(other_seconds: Sequence[float], matmul_seconds: Sequence[float]) -> float:
    """The least time in which ranks do all products among them, nothing pruned (ALGORITHMS: the bound of SEMI).

    ``other_seconds`` cannot be moved; ``matmul_seconds`` is what each rank's equal share of the products takes it. The
    least ``t`` with ``Σ_i max(0, t − other_i) / matmul_i = e``. With equal other times and one rank χ times slower
    this is ``other + e / (e − 1 + 1/χ)`` of the homogeneous matmul time.
    """
    order = np.argsort(other_seconds)
    other = np.asarray(other_seconds, dtype=float)[order]
    matmul = np.asarray(matmul_seconds, dtype=float)[order]
    if (matmul <= 0).any():
        return float(other.max())
    best = np.inf
    for count in range(1, len(other) + 1):
        speed = 1.0 / matmul[:count]
        best = min(best, (len(other) + float((other[:count] * speed).sum())) / float(speed.sum()))
    return max(best, float(other.max()))


def ideal_ratio(slowdowns: Mapping[int, float], ranks: int) -> float:
    """``T_ideal / T_homogeneous`` of the matmul part when ``slowdowns`` (χ by rank) are known: ``e / Σ_i 1/χ_i``."""
    return ranks / sum(1.0 / slowdowns.get(rank, 1.0) for rank in range(ranks))


def what_if(record: IterationRecord, group: Sequence[int]) -> WhatIf:
    """What the iteration took the tensor-parallel ``group`` of global ranks, and what it would have taken."""
    views = [record.ranks[rank] for rank in group]
    communication = min(view.communication_seconds for view in views)
    other = [view.equal_work_seconds - view.equal_matmul_seconds for view in views]
    return WhatIf(
        waiting_seconds=fmean(view.wait_seconds for view in views),
        balanced_seconds=communication + max(view.work_seconds for view in views),
        unbalanced_seconds=communication + max(view.equal_work_seconds for view in views),
        homogeneous_seconds=communication + min(view.equal_work_seconds for view in views),
        bound_seconds=communication + lossless_seconds(other, [view.equal_matmul_seconds for view in views]),
    )


def report(records: Sequence[IterationRecord], group: Sequence[int]) -> BalanceReport | None:
    """Summarise ``records`` by rank, and what an iteration takes the tensor-parallel ``group``; None if empty."""
    if not records:
        return None
    ranks = tuple(
        RankSummary(rank, **_medians([record.ranks[rank] for record in records], RankSummary, but=("rank",)))
        for rank in range(len(records[0].ranks))
    )
    notes = [record.note for record in records if record.note]
    return BalanceReport(
        **_medians([what_if(record, group) for record in records], WhatIf),
        iterations=len(records),
        ranks=ranks,
        changes=sum(record.plan_changed for record in records),
        notes=tuple(reversed(dict.fromkeys(reversed(notes)))),
    )


def _medians(values: Sequence[Any], kind: type, but: Sequence[str] = ()) -> dict[str, float]:
    """The medians over ``values`` of the fields that a ``kind`` has."""
    names = [field.name for field in fields(kind) if field.name not in but]
    return {name: median(getattr(value, name) for value in values) for name in names}
