"""Makes 3D plans: how much of each kind of parallelism, which devices in which pipeline, which layers on which device.

AutoHet, Algorithm 1, extended; what is tried is in :mod:`.plan_search`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

from ..bounds.gap_goal import PLAIN, Effort, GapGoal
from ..bounds.iteration_bound import IterationBound
from ..bounds.relaxed_pools import relaxed_pools
from ..bounds.work_bound import WorkBound
from ..candidates.draft import Draft, DraftBuilder, simulated_seconds, write_plan
from ..chunks.chunked_plans import ChunkedPlans
from ..chunks.ranking import merged_by_time, ranked_by_time
from ..cluster.topology import Topology
from ..plans.launch_order import compare_with_launch_order
from ..plans.plan import Plan
from ..plans.prediction_error import prediction_error, ties_resolved
from ..plans.ranked_plan import MIN_WIDER_GAIN, RankedPlan, ranking_seconds
from ..plans.runnable import NoPlanError
from ..profile.layer_profile import ModelProfile
from ..profile.on_links import on_links
from ..schedules.pass_order import Schedule
from ..slots.placement import SlotPool
from ..slots.search_space import SIMPLE, SearchSpace
from ..stages.rules import uniform_bounds
from ..stages.split_methods import METHODS
from .explanations import against_equal_replicas, impossible_degrees, reason, why_no_chunks, why_nothing
from .pipelines_to_divide import pipelines_to_divide
from .plan_search import PlanSearch
from .settings import MAX_FORMED_DEVICES, check_schedules, slots_to_try, wider_pools

__all__ = ["make_plans"]


MAX_SEARCHED_POOLS, MAX_POOLS_OF_A_NUMBER = 8, 4
"""Pools of a part of a wider search in which improvements are looked for, those with the fastest plans at first sight;
so many of them have one number of pipelines."""
NEAR_AT_SIGHT, NEAR_OF_MIXTURES = 1.03, 1.1
"""Plans at first sight of these pools take at most so many times as long as the fastest; the second one is for slots of
several forms, of which improvements gain more."""
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
    """The plans with the shortest predicted iteration, best first; of plans that the times of the profile cannot tell
    from the fastest, the simplest comes first (see ``plans/prediction_error.py``).

    Args:
        topology: Machines. If the profile was taken on them, each device has the times that were measured on it.
        profile: Times and sizes of the model's layers on the kinds of devices in ``topology``.
        global_batch: Samples per iteration.
        micro_batches: Sizes to try, in samples. None: all sizes in the profile that divide the global batch.
        tensor_parallel: Degrees to try. None: all degrees in the profile.
        stages: Numbers of stages to try. None: all.
        schedules: Schedules of pipelines to try, ``1f1b``, ``interleaved`` or ``zbv``: Colossal-AI's ``pp_style``.
            Plans without a pipeline belong to ``1f1b``.
        model_chunks: Numbers of chunks per stage to try with ``interleaved``, each at least 2.
        method: How the layers of a pipeline are split into stages, one of
            :data:`~colossal_hetero.planner.stages.split_methods.METHODS`.
        runnable: Only plans that the plugin can run: no replica has more stages than micro-batches, see
            :mod:`~colossal_hetero.planner.plans.runnable`.
        unequal: Also plans whose replicas are not alike, in their stages or their batches. They come before equal
            replicas if they are faster by
            :data:`~colossal_hetero.planner.plans.ranked_plan.MIN_UNEQUAL_GAIN` at least.
        all_devices: Only plans that use every device. Needed if one rank is started per device of ``topology``.
        keep: How many plans to return, at most.
        compare: Whether the best plan also says what equal replicas of uniform stages would take
            (``uniform_seconds``), which takes a second search, and what other equal replicas and Colossal-AI's own
            order of ranks would take (``notes``).
        overlap: Whether communication between replicas overlaps with passes, as with ZeRO stage 1 and Colossal-AI's
            options ``overlap_communication`` and ``overlap_allgather``; only for ``1f1b``. See
            :func:`~colossal_hetero.planner.plans.overlap.exposed_seconds`.
        space: Which forms stages may have; see :class:`~colossal_hetero.planner.slots.search_space.SearchSpace`. Wider
            spaces than the simple one are for the schedule ``1f1b``.
        prefer_simple: Whether plans of the simple space come before others that are faster by less than
            :data:`~colossal_hetero.planner.plans.ranked_plan.MIN_WIDER_GAIN`.
        effort: How much is done to find a plan, and to prove how good it is: with a gap that is wanted the search ends
            early. Bounds are tightest for the schedule ``1f1b`` without ``overlap``, if all stages have one form.
        cluster_file: Name of the cluster file, for the plans' ``cluster`` field.
        profile_file: Name of the profile file, for the plans' ``profile`` field.

    Raises:
        NoPlanError: There is no such plan for these machines. The message says why, and what to change.
        ValueError: An argument is not possible.
    """
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
                # Most further parts have no faster plan.
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
    """The first of each that differ only by which devices of a kind they use, or by ZeRO stage 1 that gains nothing;
    pools of several searches can have them all."""
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
