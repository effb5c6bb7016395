"""The effect of balancing: the times of an iteration as it was, and as it would have been without balancing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..common.tables import make_table, number_column, word_column
from ..common.text import duration, numbers_of

# Records -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkRecord:
    """A rank's part of an iteration as it measured it. Times are in seconds, shares and scores in [0, 1]."""

    work_seconds: float
    matmul_seconds: float
    communication_seconds: float
    equal_work_seconds: float
    """``work_seconds`` at the rank's full share (the T of Eq. 1)."""
    equal_matmul_seconds: float
    """``matmul_seconds`` at the rank's full share (the M of Eq. 1)."""
    resized: float
    migrated: float = 0.0
    """Share of its work that other ranks did, for which it sent them weights."""
    resharded: float = 0.0
    received: float = 0.0
    """Work of others that the rank took on, as a share of its own."""
    own_score: float = 1.0
    """The rank's shortest ``equal_work_seconds`` so far, divided by those of this iteration."""


@dataclass(frozen=True, kw_only=True)
class LocalRecord(WorkRecord):
    """One iteration as measured by one rank."""

    iteration: int
    plan_changed: bool = False
    """True if another plan applies from the iteration after this one on."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RankRecord(WorkRecord):
    """A rank's part of an iteration, or its medians over several, compared with the other ranks."""

    rank: int
    wait_seconds: float
    """Time spent in collectives beyond the shortest time there of any rank of its tensor-parallel group."""
    relative_score: float = 1.0
    """The shortest ``equal_work_seconds`` in its tensor-parallel group, divided by this rank's."""


@dataclass(frozen=True)
class IterationRecord:
    iteration: int
    ranks: tuple[RankRecord, ...]
    plan_changed: bool
    note: str = ""


def merge_records(per_rank: Sequence[Sequence[LocalRecord]], groups: Sequence[Sequence[int]]) -> list[IterationRecord]:
    """Merge all ranks' records of the same iteration into one, in the order of iterations, without those that some rank
    has not read yet. ``per_rank`` is by global rank, ``groups`` the tensor-parallel groups as lists of global ranks."""
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
                plan_changed=any(view.plan_changed for view in views),
                note=next((view.note for view in views if view.note), ""),
            )
        )
    return merged


def _rank_record(rank: int, view: LocalRecord, group: Sequence[LocalRecord]) -> RankRecord:
    return RankRecord(
        rank=rank,
        wait_seconds=view.communication_seconds - min(other.communication_seconds for other in group),
        relative_score=min(other.equal_work_seconds for other in group) / view.equal_work_seconds,
        **{field.name: getattr(view, field.name) for field in fields(WorkRecord)},
    )


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
class BalanceReport(WhatIf):
    """Medians over the measured iterations of one tensor-parallel group."""

    iterations: int
    ranks: tuple[RankRecord, ...]
    """Medians of each rank."""
    changes: int
    notes: tuple[str, ...]
    """Notes of the plans, each once, the latest last."""
    mode: str = "auto"
    """The balance mode."""

    def shown(self) -> Iterator[RenderableType]:
        """The table of ranks, and what an iteration took and would have taken."""
        yield rank_table(self)
        yield Text(
            f"An iteration took {self.balanced_seconds * 1e3:.0f} ms (median, without loading data), of which ranks "
            f"waited {self.waiting_seconds * 1e3:.0f} ms for slower ones (mean over ranks)."
        )
        yield Text(comparison_text(self, balanced=self.mode != "off"))
        if self.notes and not any(rank.migrated + rank.resharded + rank.resized for rank in self.ranks):
            yield Text(f"Nothing is moved: {self.notes[-1].rstrip('.')}.")

    def numbers(self) -> dict[str, float]:
        """All numbers by flat names, such as ``rank1/work_seconds``."""
        found = numbers_of(self) | {"saved_seconds": self.saved_seconds}
        for rank in self.ranks:
            found |= numbers_of(rank, f"rank{rank.rank}/")
        return found


def lossless_seconds(other_seconds: Sequence[float], matmul_seconds: Sequence[float]) -> float:
    """The shortest time in which the ranks together can do all products, with nothing pruned (docs/algorithms.md, 1.7):
    the smallest ``t`` with ``Σ_i max(0, t − other_i) / matmul_i = e``, where ``other_seconds`` is each rank's time for
    work that cannot be moved, and ``matmul_seconds`` its time for an equal share of the products."""
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
        RankRecord(rank=rank, **_medians([record.ranks[rank] for record in records], RankRecord, exclude=("rank",)))
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


def _medians(values: Sequence[Any], kind: type, exclude: Sequence[str] = ()) -> dict[str, Any]:
    names = [field.name for field in fields(kind) if field.name not in exclude]
    return {name: median(getattr(value, name) for value in values) for name in names}


# Table ---------------------------------------------------------------------------------------------------------------

MOVED = ("resized", "migrated", "resharded", "received")
"""Fields of a rank that say which share of its work balancing moved."""


def moved_shares(resized: float, migrated: float, received: float, resharded: float = 0.0) -> str:
    """Effect of balancing on a rank in words, such as "resized 40%, migrated 37%"; the arguments are in [0, 1]."""
    shares = zip(MOVED, (resized, migrated, resharded, received), strict=True)
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share > 0)


def rank_table(report: BalanceReport, slowdowns: Mapping[int, float] | None = None) -> Table:
    """A row per rank: medians of times in ms, shares moved, and speed: the fastest rank's time for the same work over
    this rank's (``vs fastest``), and this rank's best time so far over its present one (``vs own best``)."""
    # Up to ten columns have to fit in 80 characters.
    moved = [name for name in MOVED if any(getattr(rank, name) for rank in report.ranks)]
    slowed = ["slowed"] if slowdowns is not None else []
    titles = (*slowed, "work", "matmul", "wait", *moved, "vs fastest", "vs own best")
    columns = [word_column("rank"), *map(number_column, titles)]
    lines = []
    for rank in report.ranks:
        slowdown = 1.0 if slowdowns is None else slowdowns.get(rank.rank, 1.0)
        cells = [str(rank.rank), *([f"× {slowdown:g}" if slowdown > 1 else ""] if slowed else [])]
        cells += [f"{seconds * 1e3:.0f}" for seconds in (rank.work_seconds, rank.matmul_seconds, rank.wait_seconds)]
        cells += [f"{getattr(rank, name):.0%}" for name in moved]
        lines.append([*cells, f"{rank.relative_score:.2f}", f"{rank.own_score:.2f}"])
    return make_table(columns, lines, title="An iteration, by rank (medians, times in ms)")


def comparison_text(report: BalanceReport, balanced: bool) -> str:
    """Sentences about an iteration without balancing, with equal ranks, and with ideally spread work."""
    text = ""
    if balanced:
        saved = report.saved_seconds * 1e3
        text = (
            f"Unbalanced it would have taken {report.unbalanced_seconds * 1e3:.0f} ms "
            f"({report.unbalanced_seconds / report.balanced_seconds:.1f} times as long: balancing "
            f"{'saved' if saved >= 0 else 'cost'} {abs(saved):.0f} ms). "
        )
    return text + (
        f"With all ranks as fast as the fastest it would have taken {report.homogeneous_seconds * 1e3:.0f} ms; "
        f"with nothing pruned and the work spread ideally, {report.bound_seconds * 1e3:.0f} ms."
    )


NOTABLE = 0.1
"""Share of an iteration that balancing could save at best, from which mode "off" says so."""


def bound_in_words(report: BalanceReport) -> str:
    """What balancing could bring where nothing is balanced; empty if that is little."""
    if report.bound_seconds > (1.0 - NOTABLE) * report.balanced_seconds:
        return ""
    slowest = min(report.ranks, key=lambda rank: rank.relative_score)
    return (
        f"rank {slowest.rank} takes {1.0 / slowest.relative_score:.1f} times as long as the fastest rank of its "
        "tensor-parallel group, and nothing is balanced. With the work spread ideally, an iteration would take "
        f"{duration(report.bound_seconds)} instead of {duration(report.balanced_seconds)}: "
        'balance=BalanceConfig(mode="auto") comes close, and does not change the result'
    )
