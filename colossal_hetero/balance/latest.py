"""What a user is told while training: the latest iterations of all ranks, exchanged now and then without waiting, so
that a report needs no collective; and sentences about plans: which ranks are slow, where their work goes, and what that
does to an iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..common.text import duration, spans
from .plan import BalancePlan, RankTimes
from .report import BalanceReport, LocalRecord, WorkRecord, merge_records, report

FIRST = 4
"""Iterations before the first exchange; until the interval is reached, each next one comes after twice as many."""
FEW = 4  # iterations that are kept even if they are older than the interval
NAMES = [each.name for each in fields(WorkRecord)]


class LatestIterations:
    """Medians of every rank of ``group`` (all ranks, over Gloo) over its latest iterations with the same plan, at most
    ``interval`` of them, which is also how many lie between two exchanges."""

    def __init__(self, group: dist.ProcessGroup, tensor_parallel: Sequence[Sequence[int]], interval: int) -> None:
        self._group, self._tensor_parallel, self._interval = group, tensor_parallel, interval
        self._own: deque[LocalRecord] = deque(maxlen=interval)
        self._changes = 0
        self._changed_at = -1
        self._pending: tuple[Any, torch.Tensor, int] | None = None
        self._rows: dict[int, list[float]] = {}
        self._has_news = False
        self.done = 0  # iterations that were done when the latest exchange began whose numbers have arrived

    def add(self, record: LocalRecord) -> None:
        if record.iteration > self._changed_at:
            self._own.append(record)

    def plan_changed(self, iteration: int) -> None:
        """Another plan is used from the iteration after ``iteration`` on."""
        self._changes += 1
        self._changed_at = iteration
        self._own.clear()

    def end_iteration(self, done: int) -> bool:
        """Begin an exchange if one is due after ``done`` iterations, which is equal on all ranks. Returns whether
        numbers have arrived. Called by all ranks."""
        self._take()
        has_news, self._has_news = self._has_news, False
        while len(self._own) > FEW and self._own[0].iteration < done - self._interval:
            self._own.popleft()  # few iterations are measured while nothing changes
        is_early = FIRST <= done < self._interval and done & (done - 1) == 0
        if is_early or done % self._interval == 0:
            row = [float(len(self._own)), float(self._changes)]
            row += [median(getattr(each, name) for each in self._own) if self._own else 0.0 for name in NAMES]
            table = torch.zeros(self._group.size(), len(row), dtype=torch.float64)
            table[self._group.rank()] = torch.tensor(row, dtype=torch.float64)
            self._pending = dist.all_reduce(table, group=self._group, async_op=True), table, done
        return has_news

    def report(self) -> BalanceReport | None:
        """Times of the tensor-parallel group whose iterations take longest; None before the first exchange."""
        if self._pending is not None and self._pending[0].is_completed():
            with suppress(RuntimeError):  # a rank that has ended since then
                self._take()
        if len(self._rows) < self._group.size():
            return None
        rows = [self._rows[rank] for rank in range(self._group.size())]
        medians: list[dict[str, Any]] = [dict(zip(NAMES, values, strict=True)) for _, _, *values in rows]
        records = merge_records([[LocalRecord(iteration=0, **each)] for each in medians], self._tensor_parallel)
        found = (
            replace(each, iterations=int(min(rows[rank][0] for rank in group)), changes=int(rows[group[0]][1]))
            for group in self._tensor_parallel
            if (each := report(records, group)) is not None
        )
        return max(found, key=lambda each: each.balanced_seconds)

    def _take(self) -> None:
        if self._pending is None:
            return
        (work, table, self.done), self._pending = self._pending, None
        work.wait()
        # A rank that has measured nothing since its plan changed is shown as before.
        self._rows |= {rank: row for rank, row in enumerate(table.tolist()) if row[0] or rank not in self._rows}
        self._rows = {rank: row for rank, row in self._rows.items() if row[0]}
        self._has_news = True


# Changes of plans ----------------------------------------------------------------------------------------------------


SETTLED_AFTER = 4  # iterations with a plan from whose times it is judged; the first one allocates memory
KEPT = 16
NOTABLE = 0.05
"""A plan is news if a rank's work differs from that in the last sentence by more than this share of its own."""


class ChangeTeller:
    """Says once for each change of the plan of a group of global ``ranks`` what it has done to an iteration's time."""

    def __init__(self, ranks: Sequence[int], say: Callable[[str], None]) -> None:
        self._ranks, self._say = ranks, say
        self._told = BalancePlan.idle(len(ranks))
        self._words: str | None = None
        self._before = 0.0
        self._first = 0
        self._seconds: deque[float] = deque(maxlen=KEPT)

    def changed(self, iteration: int, plan: BalancePlan, times: Sequence[RankTimes] | None) -> None:
        """Another plan is used from the iteration after ``iteration`` on. Ranks take these ``times``, if known."""
        if self._words is None:
            if not is_notable(self._told, plan):
                return
            # Only what took time since the last change; before, another plan was used.
            self._before = median(self._seconds) if self._seconds else 0.0
        self._words, self._first = plan_in_words(plan, times, self._ranks), iteration + 2
        self._told = plan
        self._seconds.clear()

    def took(self, iteration: int, seconds: float) -> None:
        """The time of an iteration has become known."""
        if iteration < self._first:
            return
        self._seconds.append(seconds)
        if self._words is None or len(self._seconds) < SETTLED_AFTER:
            return
        words, self._words = self._words, None
        now = median(self._seconds)
        times = f"{duration(self._before)} → {duration(now)}" if self._before else duration(now)
        self._say(f"{words}; iteration {times}")


def is_notable(before: BalancePlan, after: BalancePlan) -> bool:
    shares = zip(
        (*before.resize, *before.migrate, *before.receive), (*after.resize, *after.migrate, *after.receive), strict=True
    )
    return any(abs(new - old) > NOTABLE or (new > 0) != (old > 0) for old, new in shares)


def plan_in_words(plan: BalancePlan, times: Sequence[RankTimes] | None, ranks: Sequence[int]) -> str:
    """For example "rank 1 takes 6.1 times as long as the fastest; 68 % of its units now run on rank 0"."""
    takers = [rank for rank, share in zip(ranks, plan.receive, strict=True) if share > 0]
    on = f"rank{'s' if len(takers) > 1 else ''} {spans(takers)}"
    sentences = []
    for place, (rank, pruned, given) in enumerate(zip(ranks, plan.resize, plan.migrate, strict=True)):
        if pruned + given == 0:
            continue
        parts = [f"{given:.0%} of its work now runs on {on}"] if given else []
        parts += [f"{pruned:.0%} of its work is skipped, which costs accuracy"] if pruned else []
        who = f"rank {rank}"
        if times is not None:
            slower = times[place].work_seconds / min(time.work_seconds for time in times)
            who += f" takes {slower:.1f} times as long as the fastest for the same layers"
        sentences.append(f"{who}: {' and '.join(parts)}")
    return "; ".join(sentences) or f"ranks {spans(ranks)}: each does its own work again"
