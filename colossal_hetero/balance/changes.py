"""Sentences about plans: which ranks are slow, where their work goes, and what that does to an iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from ..common.text import duration, spans
from .plan import BalancePlan, RankTimes

SETTLED_AFTER = 4
"""Iterations with a plan from whose times it is judged; the first one allocates memory."""
KEPT = 16
NOTABLE = 0.05
"""A plan is news if a rank's work differs from that in the last sentence by more than this share of its own."""


class ChangeTeller:
    """Says once for each change of the plan what it has done to the time of an iteration.

    Args:
        ranks: the tensor-parallel group, as global ranks.
        say: what to do with a sentence.
    """

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
