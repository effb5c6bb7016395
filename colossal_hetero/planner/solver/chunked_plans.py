"""Best plans of the interleaved and the zero-bubble schedule for given pipelines, the most promising first, with stages
exchanged, because the places of the first and the last blocks depend on the schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..cost.chunked_price import Ranks, price_chunks, stage_slots, summing_seconds
from ..cost.pass_order import Schedule, why_not_schedulable
from ..cost.plan import Plan
from ..cost.price import look
from ..cost.ranked_plan import RankedPlan, compared, ranking_seconds
from .problem import Problem

MAX_TRIED = 64
"""Pipelines whose blocks are divided, for each schedule and number of chunks."""
MAX_EXCHANGED = 2
MAX_EXCHANGES = 24
CERTAIN = 0.95
"""Share of a pipeline's estimated work that must be below the best time; the estimate is nearly a bound."""

Candidate = tuple[Ranks, int]
"""Pipelines whose stages run the same blocks, and the samples of a micro-batch."""


class _Estimate(NamedTuple):
    work_seconds: float
    """Work without any waiting, if every stage is as fast as its slowest replica."""
    seconds: float
    """Work, half of the waiting of 1F1B, and sums of gradients."""


class ChunkedPlans:
    """Maker of plans of some schedules, and of reasons for those that cannot be made."""

    def __init__(self, problem: Problem) -> None:
        self.topology, self.profile = problem.topology, problem.profile
        self.global_batch, self.method = problem.global_batch, problem.method
        self.kinds: list[tuple[Schedule, int]] = []
        """Schedules with numbers of chunks per stage."""
        for schedule in problem.schedules:
            if schedule != "1f1b":
                chunks = problem.model_chunks if schedule == "interleaved" else (2,)
                self.kinds += [(schedule, number) for number in chunks]
        self.problems: dict[Schedule, str] = {}

    def plans(self, candidates: Sequence[Candidate]) -> list[Plan]:
        distinct = {(look(self.topology, ranks), size): (ranks, size) for ranks, size in reversed(candidates)}
        estimates = [(self._estimate(each), each) for each in reversed(distinct.values())]
        estimated = sorted(estimates, key=lambda each: each[0].seconds)
        found: list[Plan] = []
        for schedule, chunks in self.kinds:
            made: dict[object, Plan | None] = {}
            best, tried = float("inf"), 0
            for estimate, candidate in estimated:
                if tried >= MAX_TRIED:
                    break
                if estimate.work_seconds * CERTAIN >= best or not self._can_be_divided(candidate, schedule, chunks):
                    continue
                tried += 1
                plan = self._make(candidate, schedule, chunks, made)
                best = min(best, plan.iteration_seconds) if plan is not None else best
            for plan in _by_time(made.values())[:MAX_EXCHANGED]:
                self._exchange(plan, schedule, chunks, made)
            found += _by_time(made.values())
        return _by_time(found)

    def _estimate(self, candidate: Candidate) -> _Estimate:
        ranks, size = candidate
        slots = [stage_slots(self.topology, self.profile, groups, len(groups[0]), size) for groups in ranks]
        rows = [
            [float((each.costs.forward_seconds + each.costs.backward_seconds).sum()) for each in row] for row in slots
        ]
        slowest = [max([*stage, 1e-30]) for stage in zip(*rows, strict=True)]
        micro_batches, stages = self.global_batch / (size * len(ranks)), len(slowest)
        work = float(micro_batches / sum(1.0 / seconds for seconds in slowest))
        try:
            gradients = float(slots[0][0].costs.gradient_bytes.sum()) / stages
            summing = summing_seconds(self.topology, ranks, [gradients] * stages)
        except ValueError:
            summing = float("inf")
        return _Estimate(work, work * (1 + (stages - 1) / (2 * micro_batches)) + summing)

    def _can_be_divided(self, candidate: Candidate, schedule: Schedule, chunks: int) -> bool:
        ranks, size = candidate
        micro_batches, left = divmod(self.global_batch, size * len(ranks))
        stages = len(ranks[0])
        if left or not micro_batches or stages * chunks > self.profile.blocks:
            return False
        return why_not_schedulable(schedule, stages, micro_batches) is None

    def _make(
        self, candidate: Candidate, schedule: Schedule, chunks: int, made: dict[object, Plan | None]
    ) -> Plan | None:
        ranks, size = candidate
        key = look(self.topology, ranks), size
        if key not in made:
            made[key] = None
            try:
                made[key] = price_chunks(
                    self.topology,
                    self.profile,
                    ranks,
                    schedule=schedule,
                    chunks=chunks,
                    micro_batch=size,
                    global_batch=self.global_batch,
                    method=self.method,
                )
            except ValueError as error:
                self.problems.setdefault(schedule, str(error))
        return made[key]

    def _exchange(self, plan: Plan, schedule: Schedule, chunks: int, made: dict[object, Plan | None]) -> None:
        """Try exchanges of two stages in all replicas; go on from the first one that is faster."""
        left, better = MAX_EXCHANGES, True
        while better:
            better = False
            for ranks in _exchanged(plan.rank_order):
                if (look(self.topology, ranks), plan.micro_batch) in made:
                    continue
                if not left:
                    return
                left -= 1
                other = self._make((ranks, plan.micro_batch), schedule, chunks, made)
                if other is not None and other.iteration_seconds < plan.iteration_seconds * (1 - 1e-9):
                    plan, better = other, True
                    break


def _by_time(plans: Iterable[Plan | None]) -> list[Plan]:
    return sorted((plan for plan in plans if plan is not None), key=lambda plan: plan.iteration_seconds)


def _exchanged(ranks: Ranks) -> Iterator[Ranks]:
    for one, other in itertools.combinations(range(len(ranks[0])), 2):
        places = list(range(len(ranks[0])))
        places[one], places[other] = other, one
        yield tuple(tuple(replica[place] for place in places) for replica in ranks)


# Ranking -------------------------------------------------------------------------------------------------------------


def ranked_by_time(plans: Sequence[Plan], keep: int) -> list[RankedPlan]:
    """Best ``keep`` of these plans, which are in the order of their times, each with a reason."""
    return [
        RankedPlan(plan, _reason(plan, plans[0], f"the shortest simulated iteration of {len(plans)} plans"))
        for plan in plans[:keep]
    ]


def merged_by_time(one: Sequence[RankedPlan], other: Sequence[RankedPlan], keep: int) -> list[RankedPlan]:
    """Best ``keep`` of both lists. Where the best of a list is not the best of all, reasons are made anew."""
    both = sorted(
        [*one, *other],
        key=lambda each: ranking_seconds(each.plan.iteration_seconds, equal=each.plan.symmetric, plain=each.plan.plain),
    )[:keep]
    best = both[0]
    kept = one if best in one else other
    return [each if each in kept else replace(each, reason=_reason(each.plan, best.plan, "")) for each in both]


def _reason(plan: Plan, best: Plan, of_best: str) -> str:
    if plan is best:
        return of_best
    slower = compared(plan.iteration_seconds, best.iteration_seconds)
    waits = [share for replica in plan.replicas for share in replica.bubble_shares]
    return f"{slower}: stages wait {100 * sum(waits) / len(waits):.0f} % of the time on average"
