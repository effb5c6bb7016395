"""3D plans: degrees of parallelism, devices of pipelines, layers of devices (AutoHet, Algorithm 1, extended)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

from ..cluster.topology import Topology
from ..cost.draft import Draft, DraftBuilder, simulated_seconds, write_plan
from ..cost.layout import compare_with_launch_order
from ..cost.pass_order import Schedule
from ..cost.placement import SlotPool
from ..cost.plan import Plan
from ..cost.predict_chunked import MAX_GROUPS, all_arrangements
from ..cost.ranked_plan import MIN_WIDER_GAIN, RankedPlan, prediction_error, ranking_seconds, ties_resolved
from ..cost.runnable import NoPlanError
from ..cost.tp_groups import SIMPLE, SearchSpace
from ..profile.fitted_profiles import on_links
from ..profile.layer_profile import ModelProfile
from ..stages.rules import uniform_bounds
from ..stages.split_methods import METHODS
from .chunked_plans import Candidate, ChunkedPlans, merged_by_time, ranked_by_time
from .explanations import against_equal_replicas, impossible_degrees, reason, why_no_chunks, why_nothing
from .gap_goal import PLAIN, Effort, GapGoal, WorkBound
from .iteration_bound import IterationBound
from .pipeline_bounds import relaxed_pools
from .plan_search import PlanSearch
from .settings import MAX_FORMED_DEVICES, check_schedules, slots_to_try, wider_pools

__all__ = ["make_plans", "pipelines_to_divide", "plans_of_profiles"]


# Pipelines to divide -------------------------------------------------------------------------------------------------


MAX_DEVICES = 16
"""Most devices for which each degree and micro-batch has a search of its own for pipelines to divide."""
MAX_NUMBERS_OF_STAGES = 8
"""Smallest numbers of stages for which pipelines to divide over chunks are searched."""


def pipelines_to_divide(search: PlanSearch) -> list[Candidate]:
    """Pipelines that are alike, whose blocks can be divided over chunks: all of a few slots, else the best of 1F1B."""
    world = len(search.topology.devices)
    max_slots = max(pool.slots for pool in search.pools)
    blocks = len(search.pools[0].kinds[0].costs.forward_seconds)
    max_stages = min(max_slots, blocks // 2)
    numbers = [number for number in range(2, max_stages + 1) if search.stages is None or number in search.stages]
    drafts = search.found()
    if max_slots > MAX_GROUPS:
        builder = DraftBuilder(search.topology, "exact")
        parts = [[pool] for pool in search.pools] if world <= MAX_DEVICES else [search.pools]
        for number, pools in itertools.product(numbers[:MAX_NUMBERS_OF_STAGES], parts):
            part = PlanSearch(search.topology, pools, builder, [number], unequal=False, all_devices=search.all_devices)
            part.run(1)
            drafts += part.found()
    candidates: list[Candidate] = []
    for draft in sorted(drafts, key=lambda each: each.seconds):
        if draft.is_equal:
            slots = [tuple(draft.pool.kinds[kind].slots[slot] for kind, slot in row) for row in draft.rows]
            candidates.append((tuple(slots), draft.pool.micro_batch))
    for pool in search.pools:
        if pool.slots <= MAX_GROUPS:
            groups = [ranks for kind in pool.kinds for ranks in kind.slots]
            candidates += [(ranks, pool.micro_batch) for ranks in all_arrangements(groups)]
    devices = world if search.all_devices else 0
    return [
        (ranks, size)
        for ranks, size in candidates
        if len(ranks[0]) in numbers and len(ranks) * len(ranks[0]) * len(ranks[0][0]) >= devices
    ]


MAX_SEARCHED_POOLS, MAX_POOLS_OF_A_NUMBER = 8, 4
"""Pools of a wider search that are improved, in all and with one number of pipelines: the fastest at first sight."""
NEAR_AT_SIGHT, NEAR_OF_MIXTURES = 1.03, 1.1
"""Most times the fastest at first sight, for pools of one form and of several, which improve more."""
SIMULATED = 8
"""Plans of the method ``simulated``, and of each of some others, that are simulated to find the best one."""


def make_plans(
    topology: Topology,
    profile: ModelProfile,
    *,
    global_batch: int,
    micro_batches: Sequence[int] | None = None,
    tensor_parallel: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
    schedules: Sequence[Schedule] = ("1f1b",),
    model_chunks: Sequence[int] = (2,),
    method: str = "exact",
    runnable: bool = True,
    unequal: bool = True,
    all_devices: bool = False,
    keep: int = 5,
    compare: bool = False,
    overlap: bool = False,
    space: SearchSpace = SIMPLE,
    prefer_simple: bool = False,
    effort: Effort = PLAIN,
    cluster_file: str = "",
    profile_file: str = "",
) -> list[RankedPlan]:
    """Plans with the shortest predicted iteration, best first; of those within the error, the simplest first."""
    profile = on_links(profile, topology)
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: valid are {', '.join(METHODS)}")
    if keep < 1:
        raise ValueError(f"keep={keep}: must be at least 1")
    for number in stages or ():
        if not 1 <= number <= profile.blocks:
            raise ValueError(
                f"stages={number}: {profile.name} has {profile.blocks} blocks and each stage holds at least one; "
                f"use 1 to {profile.blocks} stages"
            )
    check_schedules(schedules, model_chunks, method)
    if overlap and set(schedules) != {"1f1b"}:
        raise ValueError(f"overlap is predicted for the schedule 1f1b only, not for {', '.join(schedules)}")
    if space != SIMPLE and set(schedules) != {"1f1b"}:
        raise ValueError(f"a wider search space is for the schedule 1f1b only, not for {', '.join(schedules)}")
    tried = slots_to_try(topology, profile, global_batch, micro_batches, tensor_parallel)
    topology, pools = tried.topology, tried.pools

    def search_by(
        method: str,
        unequal: bool = unequal,
        pools: Sequence[SlotPool] = pools,
        quick: bool = effort.quick,
        **options: Any,
    ) -> PlanSearch:
        builder = DraftBuilder(topology, method, overlap=overlap, runnable=runnable, quick=quick)
        return PlanSearch(
            topology,
            pools,
            builder,
            stages,
            unequal=unequal,
            all_devices=all_devices,
            quick=quick,
            **options,
        )

    uniform = search_by("uniform", unequal=False) if compare and method != "uniform" else None
    uniform_drafts = uniform.run(1) if uniform else []
    search = search_by(method)
    goal = None
    if effort.bound_seconds > 0:
        if set(schedules) == {"1f1b"} and not overlap and not space.mixed_degrees:
            relaxed = relaxed_pools(topology, profile, pools, space)
            goal = GapGoal(IterationBound(topology, relaxed, runnable=runnable), effort)
        else:
            goal = GapGoal(WorkBound(topology, profile, tried.degrees, global_batch), effort)
    # The search compares plans by the closed form, and other plans can be faster in the simulation.
    seconds_of: Callable[[Draft], float] = simulated_seconds if method == "simulated" else attrgetter("seconds")

    def ranked_by(draft: Draft) -> float:
        return ranking_seconds(seconds_of(draft), equal=draft.is_equal)

    if method == "simulated":
        drafts = search.run(max(keep, SIMULATED))
        for other in ("exact", "uniform", "autohet"):
            drafts += search_by(other).run(SIMULATED)
        drafts = sorted(drafts, key=ranked_by)[:keep]
    else:
        known = uniform_drafts if method == "exact" else ()
        drafts = search.run(keep, known, goal.is_enough if goal else None)
    searches = [search]
    if space != SIMPLE:
        drafts = simple = drafts if 0 in space.zero_stages else []
        few = len(topology.devices) <= MAX_FORMED_DEVICES
        below = min((draft.ranking_seconds for draft in drafts), default=math.inf)
        for part in wider_pools(topology, profile, global_batch, tried.micro_batches, tried.degrees, space, below):
            below = min((draft.ranking_seconds for draft in drafts), default=math.inf)
            if goal is not None and drafts and goal.is_enough(min(draft.seconds for draft in drafts)):
                break
            promising = list(itertools.chain.from_iterable(part))
            if drafts and not few:
                seen = [
                    each
                    for pools in part
                    for each in search_by(method, pools=pools, below=below).promising_pools(MAX_POOLS_OF_A_NUMBER)
                ]
                seen = sorted(seen, key=lambda each: each[0])[:MAX_SEARCHED_POOLS]
                near = NEAR_AT_SIGHT if all(pool.has_one_form for _, pool in seen) else NEAR_OF_MIXTURES
                promising = [pool for seconds, pool in seen if seconds <= near * seen[0][0]]
            if promising:
                quick = effort.quick or (bool(drafts) and not few)
                searches.append(search_by(method, pools=promising, quick=quick, below=below, all_formations=few))
                found = searches[-1].run(max(keep, SIMULATED) if method == "simulated" else keep)
                drafts = sorted([*drafts, *found], key=ranked_by)
        if prefer_simple and simple and ranked_by(simple[0]) <= MIN_WIDER_GAIN * ranked_by(drafts[0]):
            drafts = [simple[0], *(draft for draft in drafts if draft is not simple[0])]
        drafts = _different(drafts)[:keep]
    chunked: list[RankedPlan] = []
    if set(schedules) != {"1f1b"}:
        with_chunks = [each for each in schedules if each != "1f1b"]
        makes = ChunkedPlans(topology, profile, with_chunks, model_chunks, global_batch=global_batch, method=method)
        pipelines = pipelines_to_divide(search)
        chunked = ranked_by_time(makes.plans(pipelines), keep)
        if not chunked and "1f1b" not in schedules:
            raise NoPlanError(why_no_chunks(schedules, makes))
    if "1f1b" not in schedules:
        drafts = []
    if not drafts and not chunked:
        raise NoPlanError(why_nothing(topology, profile, search))
    ranked = [
        RankedPlan(
            write_plan(draft, topology, profile, method, impossible_degrees(searches) if draft is drafts[0] else ()),
            reason(draft, drafts[0], sum(len(each.drafts) for each in searches), seconds_of),
        )
        for draft in drafts
    ]
    if chunked:
        ranked = merged_by_time(ranked, chunked, keep)
    ranked = ties_resolved(ranked, profile)
    changes: dict[str, Any] = {"cluster": cluster_file, "profile": profile_file}
    if goal is not None:
        changes["bound_seconds"] = goal.lower_bound(min(each.plan.iteration_seconds for each in ranked))
    best = ranked[0].plan
    if compare:
        notes = list(best.notes)
        if method != "uniform":
            # A plan in the list can have uniform stages in an order that the method "uniform" does not try.
            one_chunk = [each.plan for each in ranked if each.plan.schedule == "1f1b" and each.plan.symmetric]
            seconds = [plan.iteration_seconds for plan in one_chunk if _has_uniform_stages(plan)]
            seconds += [draft.seconds for draft in uniform_drafts]
            if uniform and not seconds:
                notes.append(f"no plan with uniform stages: {why_nothing(topology, profile, uniform)}")
            best = best.model_copy(update={"uniform_seconds": min(seconds, default=None)})
        if not best.symmetric:
            notes.append(against_equal_replicas(best, [draft for each in searches for draft in each.found()]))
        launch_order = compare_with_launch_order(topology, profile, best, overlap=overlap)
        best = best.model_copy(update={"notes": (*notes, launch_order) if launch_order else tuple(notes)})
    plans = [best, *(each.plan for each in ranked[1:])]
    return [
        RankedPlan(plan.model_copy(update=changes | {"relative_error": prediction_error(plan, profile) or None}), why)
        for plan, why in zip(plans, (each.reason for each in ranked), strict=True)
    ]


def _different(drafts: Sequence[Draft]) -> list[Draft]:
    """First of plans that differ only by devices of a kind, or by ZeRO stage 1 that gains nothing."""
    kept: dict[object, Draft] = {}
    for draft in drafts:
        look = f"{draft.seconds:.6g}", draft.pool.tensor_parallel, tuple(cut.bounds for cut in draft.splits)
        kept.setdefault((*look, tuple(draft.micro_batches)), draft)
    return list(kept.values())


def _has_uniform_stages(plan: Plan) -> bool:
    return all(
        [stage.blocks for stage in replica.stages] == list(pairwise(uniform_bounds(plan.blocks, len(replica.stages))))
        for replica in plan.replicas
    )


# Several profiles ----------------------------------------------------------------------------------------------------


def plans_of_profiles(
    topology: Topology, profiles: Sequence[tuple[str, ModelProfile]], *, keep: int, **options: Any
) -> list[RankedPlan]:
    """Plans with the shortest predicted iteration over all profiles, best first."""
    (first, model), *others = profiles
    seen = {model.precision: first}
    for name, other in others:
        if other.blocks != model.blocks:
            raise ValueError(f"{first} has {model.blocks} blocks and {name} {other.blocks}; give profiles of one model")
        if other.precision in seen:
            raise ValueError(
                f"{seen[other.precision]} and {name} both have the precision {other.precision}; give one profile for "
                "each precision"
            )
        seen[other.precision] = name
    ranked: list[RankedPlan] = []
    bounds: list[float | None] = []
    problems: list[NoPlanError] = []
    for name, each in profiles:
        try:
            found = make_plans(topology, each, keep=keep, profile_file=name, **options)
        except NoPlanError as problem:
            problems.append(problem)
            continue
        ranked = merged_by_time(ranked, found, keep) if ranked else found
        bounds.append(found[0].plan.bound_seconds)
    if not ranked:
        raise problems[0]
    # The lowest bound holds for the plans of every profile.
    lowest = min((bound for bound in bounds if bound is not None), default=None) if None not in bounds else None
    return [replace(each, plan=each.plan.model_copy(update={"bound_seconds": lowest})) for each in ranked]
