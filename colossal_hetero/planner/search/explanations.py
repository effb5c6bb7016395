"""Reasons in words for the best plan, for slower ones, and for no plan at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ...common.text import count, duration
from ..cluster.topology import Topology
from ..cost.draft import Draft, simulated_seconds
from ..cost.pass_order import Schedule
from ..cost.placement import SlotPool
from ..cost.plan import Plan
from ..cost.ranked_plan import MIN_WIDER_GAIN, ROUNDING, compared
from ..profile.layer_profile import ModelProfile
from .chunked_plans import ChunkedPlans
from .plan_search import PlanSearch

__all__ = ["against_equal_replicas", "impossible_degrees", "reason", "why_no_chunks", "why_nothing"]


def impossible_degrees(searches: Sequence[PlanSearch]) -> list[str]:
    """Tensor-parallel degrees that are not possible in any of the searches, with the reason in the first one."""
    # A degree with neither a draft nor a problem was skipped because of a lower bound on its time.
    problems = searches[0].problems | dict.fromkeys(searches[0].rows.too_large, "the model does not fit")
    drafts = [draft for search in searches for draft in search.drafts.values()]
    possible = {kind.tensor_parallel for draft in drafts for kind in draft.pool.kinds}
    return [
        f"tensor parallelism {degree} is not possible: {problem}"
        for degree, problem in sorted(problems.items())
        if degree not in possible
    ]


def against_equal_replicas(plan: Plan, found: Sequence[Draft]) -> str:
    """Gain of ``plan``, whose replicas are not alike, over the best of these plans with equal replicas."""
    seconds = min((draft.seconds for draft in found if draft.is_equal), default=None)
    if seconds is None:
        return "no plan with equal replicas is possible"
    ratio = seconds / plan.iteration_seconds
    return f"{ratio:.2f} × as fast as the best plan with equal replicas ({duration(seconds)})"


def reason(draft: Draft, best: Draft, worked_out: int, seconds_of: Callable[[Draft], float]) -> str:
    """Reason for the best plan; of another plan, how much slower it is and the largest cause."""
    if draft is best and seconds_of is simulated_seconds:
        return "the shortest simulated iteration of the plans with the shortest predicted ones"
    if draft is best:
        return f"the shortest predicted iteration of the {count(worked_out, 'plan')} that were worked out"
    slower = compared(seconds_of(draft), seconds_of(best))
    if seconds_of(draft) < seconds_of(best):
        if not draft.is_equal:
            return slower
        return compared(seconds_of(draft), seconds_of(best), what=_beyond_simple(draft), gain=MIN_WIDER_GAIN)
    steady, fill, _ = _parts(draft)
    more = [here - there for here, there in zip(_parts(draft), _parts(best), strict=True)]
    cause = int(np.argmax(more))
    if more[cause] <= ROUNDING * best.seconds:
        return slower
    if cause == 2:
        return f"{slower}: synchronizing gradients takes {duration(draft.synchronization_seconds)}"
    number = _slowest(draft)
    cost, cut = draft.costs[number], draft.splits[number]
    if cause == 1:
        return f"{slower}: filling a pipeline of {len(cut.order)} stages takes {duration(fill)}"
    times = cost.stage_seconds
    stage = int(np.argmax(times))
    kind, _ = draft.places[number][cut.order[stage]]
    start, stop = cut.bounds[stage], cut.bounds[stage + 1]
    text = f"stage {stage} ({draft.pool.kinds[kind].device}, blocks {start} to {stop - 1})"
    waits = 1 - float(np.mean(times)) / times[stage]
    if len(times) > 1 and waits > 0.01:
        return f"{slower}: the others wait for {text}, {100 * waits:.0f} % of the time on average"
    idle = draft.pool.devices - draft.devices
    if idle:
        return f"{slower}: {idle} devices are idle"
    number_of = count(draft.micro_batches[number], "micro-batch")
    return f"{slower}: replica {number} needs {duration(steady)} for {number_of} in {text}"


def _beyond_simple(draft: Draft) -> str:
    if draft.pool.pipelines is not None:
        return "a plan with ZeRO stage 1"
    return "a plan with recomputation" if draft.pool.has_one_form else "stages of several forms"


def _parts(draft: Draft) -> tuple[float, float, float]:
    """Seconds of the slowest pipeline in steady state, of filling and emptying it, and of synchronization."""
    number = _slowest(draft)
    cost = draft.costs[number]
    steady = draft.micro_batches[number] * max(cost.stage_seconds)
    return steady, cost.seconds - steady, draft.synchronization_seconds


def _slowest(draft: Draft) -> int:
    return int(np.argmax([cost.seconds for cost in draft.costs]))


def why_no_chunks(schedules: Sequence[Schedule], makes: ChunkedPlans) -> str:
    reasons = "; ".join(f"{schedule}: {problem}" for schedule, problem in makes.problems.items())
    return f"no plan of the schedule {' or '.join(schedules)} is possible: " + (
        reasons
        or "no pipeline of at least 2 stages has a number of micro-batches that is a multiple of its number of stages, "
        "and blocks for every chunk; use another global batch, or also the schedule 1f1b"
    )


def why_nothing(topology: Topology, profile: ModelProfile, search: PlanSearch) -> str:
    pools, problems = search.pools, search.problems
    max_slots = max(sum(len(kind.slots) for kind in pool.kinds) for pool in pools)
    if search.stages and min(search.stages) > max_slots:
        return (
            f"stages={', '.join(map(str, search.stages))}: the devices make at most {max_slots} tensor-parallel "
            f"groups, one per stage; use at most {min(max_slots, profile.blocks)} stages"
        )
    if search.drafts:
        fastest = min(search.drafts.values(), key=lambda draft: draft.seconds)
        return (
            f"no plan uses all {count(len(topology.devices), 'device')}; the fastest plan uses {fastest.devices}; "
            "change the global batch or the micro-batches, or plan for fewer devices"
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
    max_stages = min(max_slots, blocks, max(search.stages or (blocks,)))

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
    if search.runnable:
        parts.append("a plan that can be run has no more stages than a replica has micro-batches")
    return "; ".join([*parts, remedy])
