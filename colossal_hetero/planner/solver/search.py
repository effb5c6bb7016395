"""The search for plans: degrees, devices of pipelines, layers of devices (AutoHet, Algorithm 1, extended).

``search(Problem(...))`` returns the plans with the shortest predicted iterations, best first. A plan whose replicas are
not alike, or one with recomputation or ZeRO stage 1, comes before simpler ones only if it is faster by 1 %.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...common.methods import without_collections
from ...common.text import duration
from ..cost.draft import Draft, DraftBuilder, write_plan
from ..cost.placement import Place, SlotPool
from ..cost.plan import Plan
from ..cost.ranked_plan import RankedPlan, prediction_error, ranking_of, ties_resolved
from ..cost.runnable import NoPlanError
from ..stages.split_methods import uniform_bounds
from .chunked_plans import Candidate, ChunkedPlans
from .explanations import impossible_degrees, reason, why_no_chunks, why_nothing
from .iteration_bound import IterationBound
from .pipeline_bounds import RelaxedPool
from .plan_search import MAX_GROUPS, PlanSearch, arrangements
from .problem import Problem
from .starts import MAX_ROWS, expected_seconds, some_numbers


@dataclass(frozen=True)
class Answer:
    """Plans with the shortest predicted iteration, best first, each with the reason for its place."""

    plans: tuple[RankedPlan, ...]

    @property
    def best(self) -> Plan:
        return self.plans[0].plan

    def of_files(self, cluster: Path, profile: Path) -> Answer:
        names = {"cluster": cluster.name, "profile": profile.name}
        return replace(self, plans=tuple(_changed(each, **names) for each in self.plans))


@without_collections
def search(
    problem: Problem, *, keep: int = 5, compare: bool = False, bound_seconds: float = 0.0, gap: float | None = None
) -> Answer:
    """The best plans for a problem, best first; of those within the error of the profile, the simplest first.

    Args:
        keep: number of plans.
        compare: the best plan also says what it gains over uniform stages and over equal replicas.
        bound_seconds: time limit for a lower bound; 0: none is looked for.
        gap: the search ends when no plan can be faster by more than this share (0.03: 3 %), or once there is a plan
            after ``bound_seconds``; None: it does not end early.

    Raises:
        NoPlanError: if no plan fits; the message says why, and what would make one possible.
        ValueError: if the problem asks for what no machines can do.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: must be at least 1")
    method, uniform = problem.method, None
    if compare and method != "uniform":
        builder = DraftBuilder(problem.topology, "uniform", overlap=problem.overlap)
        uniform = PlanSearch(replace(problem, unequal=False), problem.pools, builder)
        uniform.run()
    goal = _goal(problem, bound_seconds, gap)
    searches, drafts = _drafts(problem, goal)
    if method == "exact" and uniform is not None:
        drafts += [draft for draft in uniform.found()[:1] if all(draft.seconds < each.seconds for each in drafts)]
    drafts = _different(drafts, keep) if "1f1b" in problem.schedules else []
    chunked: list[Plan] = []
    if set(problem.schedules) != {"1f1b"}:
        makes = ChunkedPlans(problem)
        chunked = makes.plans(_pipelines_to_divide(problem, searches))
        if not chunked and "1f1b" not in problem.schedules:
            raise NoPlanError(why_no_chunks(problem.schedules, makes))
    if not drafts and not chunked:
        raise NoPlanError(why_nothing(problem, searches))
    plans = [write_plan(draft, problem.topology, problem.profile, method) for draft in drafts] + chunked[:keep]
    plans = sorted(plans, key=ranking_of)[:keep]
    tried = sum(len(each.drafts) for each in searches) + len(chunked)
    ranked = [RankedPlan(plan, reason(plan, plans, tried)) for plan in plans]
    ranked = ties_resolved(ranked, problem.profile)
    bound = goal.lower_bound(min(each.plan.iteration_seconds for each in ranked)) if goal is not None else None
    found = [draft for each in searches for draft in each.found()]
    best = ranked[0].plan.model_copy(update={"notes": tuple(impossible_degrees(searches))})
    if compare:
        best = _compared(problem, best, [each.plan for each in ranked], uniform, found)
    ranked = [replace(ranked[0], plan=best), *ranked[1:]]
    return Answer(
        tuple(
            _changed(each, bound_seconds=bound, relative_error=prediction_error(each.plan, problem.profile) or None)
            for each in ranked
        )
    )


def _changed(ranked: RankedPlan, **changes: Any) -> RankedPlan:
    return replace(ranked, plan=ranked.plan.model_copy(update=changes))


def _goal(problem: Problem, bound_seconds: float, gap: float | None) -> _Goal | None:
    """The bound of a search; None if none is looked for, or none is known for these plans."""
    is_known = set(problem.schedules) == {"1f1b"} and not problem.overlap
    for name, value in (("bound_seconds", bound_seconds), ("gap", gap)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name}={value}: must be at least 0")
    if gap is not None and bound_seconds == 0:
        raise ValueError(f"gap={gap} without time to find a bound; give bound_seconds, such as 5")
    if gap is not None and not is_known:
        raise ValueError(
            "a gap is proved for the schedule 1f1b without overlap only; leave the gap out, or the other schedules"
        )
    if bound_seconds == 0 or not is_known:
        return None
    return _Goal(IterationBound([RelaxedPool(problem, pool) for pool in problem.pools]), bound_seconds, gap)


@dataclass(eq=False)
class _Goal:
    """Lower bound of one search, which is looked for only as far as needed."""

    bound: IterationBound
    limit_seconds: float
    gap: float | None
    _begin: float = field(default_factory=time.monotonic)
    _spent: float = 0.0

    def is_enough(self, seconds: float) -> bool:
        """True if a search that has found a plan of so many seconds may end."""
        if self.gap is None:
            return False
        if time.monotonic() - self._begin > self.limit_seconds:
            return True
        enough = seconds / (1.0 + self.gap)
        return self.lower_bound(seconds, enough) >= enough

    def lower_bound(self, seconds: float, enough: float = math.inf) -> float:
        """Seconds that no plan is below, at most ``seconds``, the time of the fastest plan that was found."""
        begin = time.monotonic()
        left = max(self.limit_seconds - self._spent, 0.0)
        found = self.bound.seconds(seconds, enough=enough, time_limit_seconds=left)
        self._spent += time.monotonic() - begin
        return found


def _drafts(problem: Problem, goal: _Goal | None) -> tuple[list[PlanSearch], list[Draft]]:
    """Searches of simple plans, then with recomputation, then with ZeRO stage 1; and the plans of all."""
    builder = DraftBuilder(problem.topology, problem.method, overlap=problem.overlap)
    is_enough = goal.is_enough if goal is not None else None
    searches: list[PlanSearch] = []
    drafts: list[Draft] = []

    def known() -> list[Draft]:
        found = itertools.chain.from_iterable(each.found() for each in searches)
        return sorted(found, key=lambda draft: draft.ranking_seconds)

    for pools in _families(problem, known):
        if searches and is_enough is not None and (best := known()) and is_enough(min(each.seconds for each in best)):
            break
        if pools:
            searches.append(PlanSearch(problem, pools, builder, known()))
            drafts += searches[-1].run(is_enough)
    return searches, drafts


def _families(problem: Problem, known: Callable[[], list[Draft]]) -> Iterator[list[SlotPool]]:
    """Pools that are searched one after the other, with the plans that are known by then."""
    if 0 in problem.zero_stages:
        yield problem.pools
        if problem.recompute:
            scarce = [(each.tensor_parallel, each.micro_batch) for each in problem.pools if _is_scarce(each)]
            yield [pool for form in scarce if (pool := problem.pool(*form, recompute=True)) is not None]
    if 1 in problem.zero_stages:
        yield _sharded(problem, known())


def _is_scarce(pool: SlotPool) -> bool:
    """True if the memory of some slot may not hold the model and the activations of as many stages as blocks."""
    in_flight = min(pool.total_micro_batches, len(pool.kinds[0].costs.state_bytes))
    return any(
        kind.memory_in_pipeline(stages)
        < float(kind.costs.cumulative.state_bytes[-1] + in_flight * kind.costs.cumulative.activation_bytes[-1])
        for kind in pool.kinds
        for stages in (1, 2)
    )


def _sharded(problem: Problem, known: Sequence[Draft]) -> list[SlotPool]:
    """Pools with ZeRO stage 1 of the best plans that are known, and those that are expected to have shorter ones."""
    below = known[0].ranking_seconds if known else math.inf
    of_known = {(draft.pool.tensor_parallel, draft.pool.micro_batch, len(draft.rows)) for draft in known[:MAX_ROWS]}
    fastest = max(channel.bytes_per_second for node in problem.topology.nodes for channel in (node.inside, *node.nics))
    found: list[tuple[float, int, SlotPool]] = []
    for plain in problem.pools:
        gains = _is_scarce(plain) or any(kind.costs.update_seconds.any() for kind in plain.kinds)
        if not gains and 0 in problem.zero_stages:
            continue
        most = min(plain.slots, plain.total_micro_batches)
        numbers = {*some_numbers(most), *(number for *_, number in of_known)}
        for pipelines in sorted(number for number in numbers if 2 <= number <= most):
            pool = problem.pool(
                plain.tensor_parallel, plain.micro_batch, recompute=problem.recompute, pipelines=pipelines
            )
            assert pool is not None, "these slots were measured"
            is_known = (plain.tensor_parallel, plain.micro_batch, pipelines) in of_known
            # Optimizer steps, and sums of gradients over a fast network.
            gradients = min(float(kind.costs.gradient_bytes.sum()) for kind in pool.kinds)
            update = min(float(kind.costs.update_seconds.sum()) for kind in pool.kinds)
            last = (update * pipelines + 2 * (pipelines - 1) * gradients / fastest) / pool.slots
            seconds = 0.0 if is_known else expected_seconds(pool) + last
            if seconds < below:
                found.append((seconds, len(found), pool))
    return [pool for *_, pool in sorted(found)[:MAX_ROWS]]


def _different(drafts: Sequence[Draft], keep: int) -> list[Draft]:
    """Best plans of each degree, number of pipelines and devices in use, then the best others; of those that differ
    only by devices of a kind, or by ZeRO stage 1 that gains nothing, the first."""
    kept: dict[object, Draft] = {}
    forms: dict[object, Draft] = {}
    for draft in sorted(drafts, key=lambda draft: draft.ranking_seconds):
        look = f"{draft.seconds:.6g}", draft.pool.tensor_parallel, tuple(draft.bounds), tuple(draft.micro_batches)
        if kept.setdefault(look, draft) is draft:
            forms.setdefault((draft.pool.tensor_parallel, len(draft.rows), *draft.used), draft)
    shown = [*dict.fromkeys([*forms.values(), *kept.values()])][:keep]
    return sorted(shown, key=lambda draft: draft.ranking_seconds)


def _compared(
    problem: Problem, best: Plan, ranked: Sequence[Plan], uniform: PlanSearch | None, found: Sequence[Draft]
) -> Plan:
    notes = list(best.notes)
    if uniform is not None:
        # A plan in the list can have uniform stages in an order that the method "uniform" does not try.
        seconds = [draft.seconds for draft in uniform.found()[:1]]
        for plan in (each for each in ranked if each.schedule == "1f1b" and each.symmetric):
            stages = plan.replicas[0].stages
            if [each.blocks for each in stages] == list(pairwise(uniform_bounds(plan.blocks, len(stages)))):
                seconds.append(plan.iteration_seconds)
        if not seconds:
            notes.append(f"no plan with uniform stages: {why_nothing(problem, [uniform])}")
        best = best.model_copy(update={"uniform_seconds": min(seconds, default=None)})
    if not best.symmetric:
        seconds = [draft.seconds for draft in found if draft.is_equal]
        ratio = min(seconds, default=0.0) / best.iteration_seconds
        notes.append(
            f"{ratio:.2f} × as fast as the best plan with equal replicas ({duration(min(seconds))})"
            if seconds
            else "no plan with equal replicas is possible"
        )
    if len(problem.topology.devices) == 1:
        notes.append("there is one device, so there is nothing to divide: only the micro-batches were chosen")
    return best.model_copy(update={"notes": tuple(notes)})


def _pipelines_to_divide(problem: Problem, searches: Sequence[PlanSearch]) -> list[Candidate]:
    """Pipelines that are alike, whose blocks can be divided over chunks: all of a few slots, else the best of 1F1B."""
    most = max(pool.slots for pool in problem.pools)
    numbers = set(range(2, min(most, problem.profile.blocks // 2) + 1))
    numbers &= numbers if problem.stages is None else set(problem.stages)
    drafts = [draft for each in searches for draft in each.found()]
    if most > MAX_GROUPS and numbers:
        several = replace(problem, stages=sorted(numbers), unequal=False)
        drafts += PlanSearch(several, problem.pools, DraftBuilder(problem.topology, "exact")).run()
    equal = [draft for draft in sorted(drafts, key=lambda each: each.seconds) if draft.is_equal]
    rows: list[tuple[SlotPool, Sequence[Sequence[Place]]]] = [(draft.pool, draft.rows) for draft in equal]
    for pool in problem.pools:
        if pool.slots <= MAX_GROUPS:
            rows += [(pool, each) for each in arrangements(pool.places) if len(set(map(len, each))) == 1]
    least = len(problem.topology.devices) if problem.all_devices else 0
    return [
        (tuple(tuple(pool.kinds[kind].slots[slot] for kind, slot in row) for row in each), pool.micro_batch)
        for pool, each in rows
        if len(each[0]) in numbers and len(each) * len(each[0]) * pool.tensor_parallel >= least
    ]
