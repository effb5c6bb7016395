"""Reasons in words for the best plan, for slower ones, and for no plan at all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...common.text import count, duration
from ..cost.evaluate import LONGEST, slowest_replica, time_parts
from ..cost.pass_order import Schedule
from ..cost.placement import SlotPool
from ..cost.plan import Plan
from ..cost.ranked_plan import ROUNDING, compared
from .chunked_plans import ChunkedPlans
from .plan_search import PlanSearch
from .problem import Problem


def impossible_degrees(searches: Sequence[PlanSearch]) -> list[str]:
    """Tensor-parallel degrees that are not possible in any of the searches, with the reason in the first one."""
    if not searches:
        return []
    first = searches[0]
    possible = {draft.pool.tensor_parallel for search in searches for draft in search.drafts.values()}
    others = {pool.tensor_parallel for pool in first.pools} - possible
    # A degree with neither a draft nor a problem was skipped because of a lower bound on its time.
    problems = first.problems | {each: "the model does not fit" for each in others if not first.rows.holds(each)}
    return [
        f"tensor parallelism {degree} is not possible: {problem}"
        for degree, problem in sorted(problems.items())
        if degree not in possible
    ]


def reason(plan: Plan, ranked: Sequence[Plan], worked_out: int) -> str:
    """Reason for the best plan; of another plan, how much slower it is and the largest cause."""
    best = ranked[0]
    if plan is best:
        plans = f"of the {count(worked_out, 'plan')} that were worked out"
        is_fastest = min(each.iteration_seconds for each in ranked) >= best.iteration_seconds * (1 - ROUNDING)
        return f"the shortest predicted iteration {plans}" if is_fastest else f"the simplest within 1 % {plans}"
    less_simple = "it uses ZeRO stage 1" if plan.zero_stage else "it recomputes"
    less_simple = less_simple if plan.symmetric else "its replicas are not alike"
    slower = compared(plan.iteration_seconds, best.iteration_seconds, less_simple)
    parts, best_parts = time_parts(plan), time_parts(best)
    more = {cause: parts[cause] - best_parts[cause] for cause in parts}
    cause = max(more, key=lambda each: more[each])
    if plan.iteration_seconds < best.iteration_seconds or more[cause] <= ROUNDING * best.iteration_seconds:
        return slower
    what = cause
    if cause == LONGEST:
        replica = slowest_replica(plan)
        number, stage = max(enumerate(replica.stages), key=lambda each: each[1].micro_batch_seconds)
        blocks = " + ".join(f"{start} to {stop - 1}" for start, stop in stage.block_ranges)
        what = f"{count(replica.micro_batches, 'micro-batch')} in stage {number} ({stage.device}, blocks {blocks})"
    return f"{slower}: {what}, {duration(parts[cause])} instead of {duration(best_parts[cause])}"


def why_no_chunks(schedules: Sequence[Schedule], makes: ChunkedPlans) -> str:
    reasons = "; ".join(f"{schedule}: {problem}" for schedule, problem in makes.problems.items())
    return f"no plan of the schedule {' or '.join(schedules)} is possible: " + (
        reasons
        or "no pipeline of at least 2 stages has a number of micro-batches that is a multiple of its number of stages, "
        "and blocks for every chunk; use another global batch, or also the schedule 1f1b"
    )


def why_nothing(problem: Problem, searches: Sequence[PlanSearch]) -> str:
    if not searches:
        return "ZeRO stage 1 is for several replicas, and these devices hold only one; also allow stage 0"
    profile, pools = problem.profile, searches[-1].pools
    problems = {degree: text for each in reversed(searches) for degree, text in each.problems.items()}
    max_slots = max(sum(len(kind.slots) for kind in pool.kinds) for pool in pools)
    if problem.stages and min(problem.stages) > max_slots:
        return (
            f"stages={', '.join(map(str, problem.stages))}: the devices make at most {max_slots} tensor-parallel "
            f"groups, one per stage; use at most {min(max_slots, profile.blocks)} stages"
        )
    drafts = [draft for each in searches for draft in each.drafts.values()]
    if drafts:
        fastest = min(drafts, key=lambda draft: draft.seconds)
        return (
            f"no plan uses all {count(len(problem.topology.devices), 'device')}; the fastest plan uses "
            f"{fastest.devices}; change the global batch or the micro-batches, or plan for fewer devices"
        )
    needs = []
    for pool in pools:
        costs = pool.kinds[0].costs
        needed = costs.state_bytes + costs.activation_bytes
        block = int(np.argmax(needed))
        roomiest = max(pool.kinds, key=lambda kind: kind.memory_bytes)
        needs.append((needed[block] - roomiest.memory_bytes, needed[block], block, roomiest, pool))
    over, needed, block, roomiest, pool = min(needs, key=lambda each: each[0])
    remedy = "use smaller micro-batches, more tensor parallelism, or devices with more memory"
    if over > 0:
        return (
            f"no device can hold block {block}: it needs {needed / 1e9:.3g} GB with tensor parallelism "
            f"{pool.tensor_parallel} and micro-batches of {pool.micro_batch}, and {roomiest.device} has "
            f"{roomiest.memory_bytes / 1e9:.3g} GB for layers, beside its reserve and what a backward pass needs for a "
            f"moment; {remedy}"
        )

    blocks = profile.blocks
    max_stages = min(max_slots, blocks, max(problem.stages or (blocks,)))

    def share(pool: SlotPool) -> tuple[float, float, float]:
        """Bytes that the model needs by bytes that the devices have, and both."""
        costs = pool.kinds[0].costs
        available = sum(kind.memory_bytes * len(kind.slots) for kind in pool.kinds) * pool.tensor_parallel
        whole = float(costs.state_bytes.sum() + costs.activation_bytes.sum()) * pool.tensor_parallel
        return whole / available if available else math.inf, whole, available

    pool = min(pools, key=share)
    part, whole, available = share(pool)
    text = (
        f"no plan fits into memory: with tensor parallelism {pool.tensor_parallel} and micro-batches of "
        f"{pool.micro_batch} the model needs at least {whole / 1e9:.4g} GB, the devices have {available / 1e9:.4g} GB"
    )
    if part <= 1 and max_stages == 1:
        buckets = pool.kinds[0].costs.bucket_bytes * pool.tensor_parallel
        text += (
            f", but in a plan of one stage each tensor-parallel group holds all of it, and {buckets / 1e9:.3g} GB for "
            "a copy of the gradients in buckets"
        )
    elif part <= 1 and max_slots > blocks:
        text += f", but a pipeline of {blocks} blocks has at most {blocks} stages"
    elif part <= 1:
        text += ", but the first stages of a pipeline need more: they keep several micro-batches in flight"
    parts = [text, *(f"with tensor parallelism {degree}, {problem}" for degree, problem in sorted(problems.items()))]
    parts.append("a pipeline has no more stages than micro-batches")
    return "; ".join([*parts, remedy])
