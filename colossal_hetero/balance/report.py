"""What balancing did and what it left: medians over a run's iterations, and what would have been without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from .records import IterationRecord

__all__ = ["BalanceReport", "RankSummary", "ideal_ratio", "lossless_seconds", "report"]


@dataclass(frozen=True)
class RankSummary:
    """A rank's medians over the measured iterations. Seconds; shares in [0, 1]."""

    rank: int
    work_seconds: float
    matmul_seconds: float
    wait_seconds: float
    resized: float
    migrated: float
    received: float


@dataclass(frozen=True)
class BalanceReport:
    """Medians over the measured iterations, in seconds, of the tensor-parallel group that takes longest."""

    iterations: int
    ranks: tuple[RankSummary, ...]
    balanced_seconds: float
    """An iteration as it was: the slowest rank's work and the communication that is not waiting."""
    unbalanced_seconds: float
    """An iteration without balancing: the same with every rank's full share."""
    bound_seconds: float
    """An iteration with nothing pruned and the products spread over the ranks in the best way, at no cost."""
    homogeneous_seconds: float
    """An iteration if all ranks were as fast as the fastest."""
    changes: int
    """How often the plan changed."""


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


def report(records: Sequence[IterationRecord], group: Sequence[int]) -> BalanceReport | None:
    """Summarise ``records`` by rank, and what an iteration takes the tensor-parallel ``group``; None if empty."""
    if not records:
        return None
    ranks = tuple(
        RankSummary(
            rank=rank,
            **{
                name: median(getattr(record.ranks[rank], name) for record in records)
                for name in ("work_seconds", "matmul_seconds", "wait_seconds", "resized", "migrated", "received")
            },
        )
        for rank in range(len(records[0].ranks))
    )
    balanced, unbalanced, bound, homogeneous = [], [], [], []
    for record in records:
        views = [record.ranks[rank] for rank in group]
        communication = min(view.communication_seconds for view in views)
        balanced.append(communication + max(view.work_seconds for view in views))
        unbalanced.append(communication + max(view.equal_work_seconds for view in views))
        homogeneous.append(communication + min(view.equal_work_seconds for view in views))
        other = [view.equal_work_seconds - view.equal_matmul_seconds for view in views]
        bound.append(communication + lossless_seconds(other, [view.equal_matmul_seconds for view in views]))
    return BalanceReport(
        iterations=len(records),
        ranks=ranks,
        balanced_seconds=median(balanced),
        unbalanced_seconds=median(unbalanced),
        bound_seconds=median(bound),
        homogeneous_seconds=median(homogeneous),
        changes=sum(record.plan_changed for record in records),
    )
