"""The effect of balancing: the times of an iteration as it was, and as it would have been without balancing."""

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
    """The time of an iteration of a tensor-parallel group, as it was and as it would have been. In seconds."""

    waiting_seconds: float
    """The time that a rank waited for slower ranks, mean over the ranks."""
    balanced_seconds: float
    """The iteration as it was: the slowest rank's work plus the communication without waiting."""
    unbalanced_seconds: float
    """The iteration without balancing: the same if every rank computed its full share."""
    homogeneous_seconds: float
    """The iteration if all ranks were as fast as the fastest."""
    bound_seconds: float
    """The iteration with nothing pruned and the products divided over the ranks optimally, without any cost."""

    @property
    def saved_seconds(self) -> float:
        """The time that balancing saved; negative if it cost more than it saved."""
        return self.unbalanced_seconds - self.balanced_seconds


@dataclass(frozen=True)
class RankSummary:
    """A rank's medians over the measured iterations. Times are in seconds, shares and scores in [0, 1]."""

    rank: int
    work_seconds: float
    matmul_seconds: float
    wait_seconds: float
    resized: float
    migrated: float
    resharded: float
    received: float
    relative_score: float
    """The time of the fastest rank of the tensor-parallel group for the same work, divided by this rank's time."""
    own_score: float
    """This rank's shortest time so far for the same work, divided by its present time."""


@dataclass(frozen=True)
class BalanceReport(WhatIf):
    """Medians over the measured iterations of one tensor-parallel group."""

    iterations: int
    ranks: tuple[RankSummary, ...]
    changes: int
    """The number of changes of the plan."""
    notes: tuple[str, ...]
    """The notes of the plans, each once, the latest last."""


def lossless_seconds(other_seconds: Sequence[float], matmul_seconds: Sequence[float]) -> float:
    """The shortest time in which the ranks together can do all products, with nothing pruned (docs/algorithms.md, 1.7).

    ``other_seconds`` is each rank's time for work that cannot be moved, ``matmul_seconds`` its time for an equal share
    of the products. The result is the smallest ``t`` with ``Σ_i max(0, t − other_i) / matmul_i = e``. If other times
    are equal and one rank is χ times slower, it is ``other + e / (e − 1 + 1/χ)`` times the homogeneous matmul time.
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
    """``T_ideal / T_homogeneous`` of the matmul part for known ``slowdowns`` (χ by rank): ``e / Σ_i 1/χ_i``."""
    return ranks / sum(1.0 / slowdowns.get(rank, 1.0) for rank in range(ranks))


def what_if(record: IterationRecord, group: Sequence[int]) -> WhatIf:
    """Seconds of an iteration of the tensor-parallel ``group`` (global ranks), as it was and as it would have been."""
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
    """Summarize ``records`` by rank, and iteration times of the tensor-parallel ``group``; None without records."""
    if not records:
        return None
    ranks = tuple(
        RankSummary(rank, **_medians([record.ranks[rank] for record in records], RankSummary, exclude=("rank",)))
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


def _medians(values: Sequence[Any], kind: type, exclude: Sequence[str] = ()) -> dict[str, float]:
    """The medians over ``values`` of the fields of ``kind``."""
    names = [field.name for field in fields(kind) if field.name not in exclude]
    return {name: median(getattr(value, name) for value in values) for name in names}
