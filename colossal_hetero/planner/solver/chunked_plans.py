"""Best plans of the interleaved and the zero-bubble schedule for given pipelines, the most promising first."""

from __future__ import annotations

from collections.abc import Sequence

from ..cost.chunked_price import Ranks, price_chunks, stage_slots, summing_seconds
from ..cost.pass_order import Schedule, why_not_schedulable
from ..cost.plan import Plan
from ..cost.price import look
from .problem import Problem

MAX_TRIED = 64  # pipelines whose blocks are divided, for each schedule and number of chunks
CERTAIN = 0.95  # share of a pipeline's estimated work that must be below the best time; the estimate is nearly a bound

Candidate = tuple[Ranks, int]
"""Pipelines whose stages run the same blocks, and the samples of a micro-batch."""


class ChunkedPlans:
    """Maker of plans of some schedules, and of reasons for those that cannot be made."""

    def __init__(self, problem: Problem) -> None:
        self.topology, self.profile = problem.topology, problem.profile
        self.global_batch, self.method = problem.global_batch, problem.method
        self.kinds: list[tuple[Schedule, int]] = [
            (schedule, number)
            for schedule in problem.schedules
            for number in {"1f1b": (), "interleaved": problem.model_chunks, "zbv": (2,)}[schedule]
        ]
        self.problems: dict[Schedule, str] = {}

    def plans(self, candidates: Sequence[Candidate]) -> list[Plan]:
        distinct = {(look(self.topology, ranks), size): (ranks, size) for ranks, size in reversed(candidates)}
        estimates = [(*self._estimate(each), each) for each in reversed(distinct.values())]
        estimated = sorted(estimates, key=lambda each: each[0])
        found: list[Plan] = []
        for schedule, chunks in self.kinds:
            best, tried = float("inf"), 0
            for _, work, candidate in estimated:
                if tried >= MAX_TRIED:
                    break
                if work * CERTAIN >= best or not self._can_be_divided(candidate, schedule, chunks):
                    continue
                tried += 1
                plan = self._make(candidate, schedule, chunks)
                if plan is not None:
                    found.append(plan)
                    best = min(best, plan.iteration_seconds)
        return sorted(found, key=lambda plan: plan.iteration_seconds)

    def _estimate(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds of work, half of the waiting of 1F1B, and sums of gradients; and of work without any waiting, if
        every stage is as fast as its slowest replica."""
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
        return work * (1 + (stages - 1) / (2 * micro_batches)) + summing, work

    def _can_be_divided(self, candidate: Candidate, schedule: Schedule, chunks: int) -> bool:
        ranks, size = candidate
        micro_batches, left = divmod(self.global_batch, size * len(ranks))
        stages = len(ranks[0])
        if left or not micro_batches or stages * chunks > self.profile.blocks:
            return False
        return why_not_schedulable(schedule, stages, micro_batches) is None

    def _make(self, candidate: Candidate, schedule: Schedule, chunks: int) -> Plan | None:
        ranks, size = candidate
        try:
            return price_chunks(
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
            return None
