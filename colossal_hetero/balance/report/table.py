"""A balance report for the terminal: a table of the ranks, and sentences that compare iteration times."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .summary import BalanceReport

__all__ = ["comparison_text", "moved_shares", "rank_table"]

MOVED = ("resized", "migrated", "resharded", "received")
"""Fields of a rank that say which share of its work balancing moved."""


def moved_shares(resized: float, migrated: float, received: float, resharded: float = 0.0) -> str:
    """What balancing does to a rank, in words, for example "resized 40%, migrated 37%"; empty if nothing.

    The arguments are shares of the rank's own work, in [0, 1].
    """
    shares = zip(MOVED, (resized, migrated, resharded, received), strict=True)
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share > 0)


def rank_table(report: BalanceReport, slowdowns: Mapping[int, float] | None = None) -> Table:
    """A row per rank: medians of times in ms, shares moved, and speed.

    ``vs fastest`` is the fastest rank's time for the same work / this rank's, ``vs own best`` this rank's best time
    for the same work so far / its present one. Columns in which every share is 0 are left out.

    Args:
        report: what to show.
        slowdowns: factors by rank by which ranks were made slower on purpose; shown in a column of its own.
    """
    # Up to ten columns have to fit in 80 characters.
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, title_justify="left")
    table.title = "An iteration, by rank (medians, times in ms)"
    moved = [name for name in MOVED if any(getattr(rank, name) for rank in report.ranks)]
    slowed = ["slowed"] if slowdowns is not None else []
    table.add_column("rank")
    for heading in (*slowed, "work", "matmul", "wait", *moved, "vs fastest", "vs own best"):
        table.add_column(heading, justify="right")
    for rank in report.ranks:
        slowdown = 1.0 if slowdowns is None else slowdowns.get(rank.rank, 1.0)
        table.add_row(
            str(rank.rank),
            *([f"× {slowdown:g}" if slowdown > 1 else ""] if slowed else []),
            *(f"{seconds * 1e3:.0f}" for seconds in (rank.work_seconds, rank.matmul_seconds, rank.wait_seconds)),
            *(f"{getattr(rank, name):.0%}" for name in moved),
            *(f"{score:.2f}" for score in (rank.relative_score, rank.own_score)),
        )
    return table


def comparison_text(report: BalanceReport, balanced: bool) -> str:
    """What an iteration would have taken without balancing, with equal ranks, and with ideally spread work.

    Args:
        report: what was measured.
        balanced: whether balancing was on; without it there is no unbalanced run to compare with.
    """
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
