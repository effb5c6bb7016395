"""Makes 3D plans: how much of each kind of parallelism, which devices in which pipeline, which layers on which device.

AutoHet, Algorithm 1, extended: all tensor-parallel degrees, micro-batches and numbers of pipelines are tried in the
order of a lower bound on their time, until the rest cannot be better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from ...io.text import count, duration
from ..candidates.draft import Draft, DraftBuilder, simulated_seconds, write_plan
from ..chunks.arrangements import MAX_GROUPS, all_arrangements
from ..chunks.chunked_plans import DIVISION_METHODS, Candidate, ChunkedPlans
from ..chunks.ranking import merged_by_time, ranked_by_time
from ..cluster.topology import Topology
from ..plans.launch_order import compare_with_launch_order
from ..plans.plan import Plan
from ..plans.ranked_plan import RankedPlan
from ..profile.as_profiled import as_profiled
from ..profile.layer_profile import ModelProfile
from ..schedules.pass_order import CHUNKED, SCHEDULES, Schedule
from ..slots.placement import NodeLinks, SlotPool
from ..slots.tp_groups import divisors, slot_kinds, tensor_parallel_degrees
from ..stages.rules import uniform_bounds
from ..stages.split_methods import METHODS
from .plan_search import PlanSearch

__all__ = ["make_plans"]


SIMULATED = 8
"""Plans of the method ``simulated``, and of ``exact``, that are simulated to find the best one."""
MAX_DEVICES = 16
"""Up to so many, each degree and micro-batch has a search of its own for pipelines to divide over chunks."""
MAX_NUMBERS_OF_STAGES = 8
"""Numbers of stages for which pipelines to divide over chunks are searched, the smallest ones."""
MAX_SAMPLES = 10**9
"""In a global batch: its divisors are looked for one by one."""
ROUNDING = 1e-9
"""Differences of times that are a smaller share of an iteration come from rounding."""


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
    all_devices: bool = False,
    keep: int = 5,
    compare: bool = False,
    cluster_file: str = "",
    profile_file: str = "",
) -> list[RankedPlan]:
    """The plans with the shortest predicted iteration, best first.

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
        runnable: Only plans that the plugin can run, see :mod:`~colossal_hetero.planner.plans.runnable`. False: also
            plans whose replicas have unequal stages.
        all_devices: Only plans that use every device. Needed if one rank is started per device of ``topology``.
        keep: How many plans to return, at most.
        compare: Whether the best plan also says what uniform stages would take (``uniform_seconds``), which takes a
            second search, and what Colossal-AI's own order of ranks would take (``notes``).
        cluster_file: Name of the cluster file, for the plans' ``cluster`` field.
        profile_file: Name of the profile file, for the plans' ``profile`` field.

    Raises:
        ValueError: There is no such plan. The message says why, and what to change.
    """
    topology = as_profiled(topology, profile)
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
    _check_schedules(schedules, model_chunks, method)
    sizes = _micro_batches(profile, global_batch, micro_batches)
    pools = _pools(topology, profile, global_batch, sizes, _degrees(topology, profile, tensor_parallel))

    def search_by(method: str) -> PlanSearch:
        builder = DraftBuilder(topology, method)
        return PlanSearch(topology, pools, builder, stages, runnable=runnable, all_devices=all_devices)

    uniform = search_by("uniform") if compare and method != "uniform" else None
    uniform_drafts = uniform.run(1) if uniform else []
    search = search_by(method)
    seconds_of: Callable[[Draft], float] = attrgetter("seconds")
    if method == "simulated":
        # The search compares plans by the closed form, and other plans can be faster in the simulation.
        seconds_of = simulated_seconds
        others = search_by("exact").run(SIMULATED)
        drafts = sorted([*search.run(max(keep, SIMULATED)), *others], key=seconds_of)[:keep]
    else:
        drafts = search.run(keep, uniform_drafts if method == "exact" else ())
    chunked: list[RankedPlan] = []
    if set(schedules) != {"1f1b"}:
        with_chunks = [each for each in schedules if each != "1f1b"]
        makes = ChunkedPlans(topology, profile, with_chunks, model_chunks, global_batch=global_batch, method=method)
        pipelines = _pipelines_to_divide(search)
        chunked = ranked_by_time(makes.plans(pipelines), keep)
        if not chunked and "1f1b" not in schedules:
            raise ValueError(_why_no_chunks(schedules, makes))
    if "1f1b" not in schedules:
        drafts = []
    if not drafts and not chunked:
        raise ValueError(_why_nothing(topology, profile, search))
    ranked = [
        RankedPlan(
            write_plan(draft, topology, profile, method, _notes(search) if draft is drafts[0] else ()),
            _reason(draft, drafts[0], search, seconds_of),
        )
        for draft in drafts
    ]
    if chunked:
        ranked = merged_by_time(ranked, chunked, keep)
    changes: dict[str, Any] = {"cluster": cluster_file, "profile": profile_file}
    best = ranked[0].plan
    if compare:
        notes = list(best.notes)
        if method != "uniform":
            # A plan in the list can have uniform stages in an order that the method "uniform" does not try.
            one_chunk = [each.plan for each in ranked if each.plan.schedule == "1f1b"]
            seconds = [plan.iteration_seconds for plan in one_chunk if _has_uniform_stages(plan)]
            seconds += [draft.seconds for draft in uniform_drafts]
            if uniform and not seconds:
                notes.append(f"no plan with uniform stages: {_why_nothing(topology, profile, uniform)}")
            best = best.model_copy(update={"uniform_seconds": min(seconds, default=None)})
        launch_order = compare_with_launch_order(topology, profile, best)
        best = best.model_copy(update={"notes": (*notes, launch_order) if launch_order else tuple(notes)})
    plans = [best, *(each.plan for each in ranked[1:])]
    return [RankedPlan(plan.model_copy(update=changes), each.reason) for plan, each in zip(plans, ranked, strict=True)]


def _check_schedules(schedules: Sequence[Schedule], model_chunks: Sequence[int], method: str) -> None:
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {schedule!r}: valid are {', '.join(SCHEDULES)}")
        if schedule in CHUNKED and method not in DIVISION_METHODS:
            raise ValueError(
                f"the method {method!r} splits pipelines of the schedule 1f1b only; for {schedule} use "
                f"{', '.join(DIVISION_METHODS)}"
            )
    if not schedules:
        raise ValueError(f"no schedule to try; give at least one of {', '.join(SCHEDULES)}")
    for chunks in model_chunks:
        if chunks < 2:
            raise ValueError(f"model_chunks={chunks}: the interleaved schedule needs at least 2 chunks per stage")
    if not model_chunks:
        raise ValueError("model_chunks is empty; give at least one number of chunks per stage, such as 2")


def _pipelines_to_divide(search: PlanSearch) -> list[Candidate]:
    """Pipelines that are alike, whose blocks can be divided over chunks: all of a few slots, else the best of 1F1B.

    Args:
        search: Has been run.
    """
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
            part = PlanSearch(search.topology, pools, builder, [number], runnable=True, all_devices=search.all_devices)
            part.run(1)
            drafts += part.found()
    candidates: list[Candidate] = []
    for draft in sorted(drafts, key=lambda each: each.seconds):
        if len({cut.bounds for cut in draft.splits}) == 1 and len(set(draft.micro_batches)) == 1:
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


def _has_uniform_stages(plan: Plan) -> bool:
    return all(
        [stage.blocks for stage in replica.stages] == list(pairwise(uniform_bounds(plan.blocks, len(replica.stages))))
        for replica in plan.replicas
    )


def _micro_batches(profile: ModelProfile, global_batch: int, sizes: Sequence[int] | None) -> list[int]:
    if global_batch < 1:
        raise ValueError(f"global_batch={global_batch}: must be at least 1")
    if global_batch > MAX_SAMPLES:
        raise ValueError(f"global_batch={global_batch}: must be at most {MAX_SAMPLES}")
    for size in sizes or ():
        if size < 1 or global_batch % size:
            raise ValueError(
                f"global_batch={global_batch} is not divisible by micro_batch={size}; "
                f"its divisors are {', '.join(map(str, divisors(global_batch)))}"
            )
    if sizes:
        return sorted(set(sizes))
    measured = sorted({times.micro_batch for times in profile.times})
    usable = [size for size in measured if global_batch % size == 0]
    if not usable:
        raise ValueError(
            f"global_batch={global_batch} is not divisible by any micro_batch that was measured "
            f"({', '.join(map(str, measured))})"
        )
    return usable


def _degrees(topology: Topology, profile: ModelProfile, wanted: Sequence[int] | None) -> list[int]:
    measured = sorted({times.device for times in profile.times})
    for kind in sorted({device.kind.name for device in topology.devices}):
        if kind not in measured:
            raise ValueError(f"the profile has no times for kind {kind}; it has those of {', '.join(measured)}")
    degrees = tensor_parallel_degrees(topology, profile)
    for degree in wanted or ():
        if degree not in degrees:
            raise ValueError(
                f"tensor_parallel={degree} is not possible: the degrees that were measured and fit into a node are "
                f"{', '.join(map(str, degrees))}"
            )
    return sorted(set(wanted)) if wanted else degrees


def _pools(
    topology: Topology, profile: ModelProfile, global_batch: int, sizes: Sequence[int], degrees: Sequence[int]
) -> list[SlotPool]:
    pools = []
    for degree in degrees:
        for size in sizes:
            kinds = slot_kinds(topology, profile, degree, size)
            if kinds:
                message = float(np.max(kinds[0].costs.output_bytes))
                pools.append(SlotPool(degree, size, tuple(kinds), global_batch // size, NodeLinks(topology, message)))
    if not pools:
        measured = ", ".join(
            f"{device} with tensor parallelism {degree}: {', '.join(map(str, profile.micro_batches(device, degree)))}"
            for device in profile.devices
            for degree in profile.tensor_parallel_degrees(device)
        )
        raise ValueError(f"micro_batch={', '.join(map(str, sizes))} was not measured on any device; {measured} were")
    return pools


# In words ---------------------------------------------------------------------------------------------------------


def _notes(search: PlanSearch) -> list[str]:
    """The tensor-parallel degrees that are not possible, and why."""
    # A degree with neither a draft nor a problem was skipped because of a lower bound on its time.
    problems = search.problems | dict.fromkeys(search.rows.too_large, "the model does not fit")
    possible = {draft.pool.tensor_parallel for draft in search.drafts.values()}
    return [
        f"tensor parallelism {degree} is not possible: {problem}"
        for degree, problem in sorted(problems.items())
        if degree not in possible
    ]


def _reason(draft: Draft, best: Draft, search: PlanSearch, seconds_of: Callable[[Draft], float]) -> str:
    """Why the best plan is the best; of another plan, how much slower it is and what most of that comes from."""
    if draft is best and seconds_of is simulated_seconds:
        return "the shortest simulated iteration of the plans with the shortest predicted ones"
    if draft is best:
        return f"the shortest predicted iteration of the {count(len(search.drafts), 'plan')} that were worked out"
    slower = f"{100 * (seconds_of(draft) / seconds_of(best) - 1):.1f} % slower"
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
    idle = sum(len(kind.slots) for kind in draft.pool.kinds) - sum(len(places) for places in draft.places)
    if idle:
        return f"{slower}: {idle * draft.pool.tensor_parallel} devices are idle"
    number_of = count(draft.micro_batches[number], "micro-batch")
    return f"{slower}: replica {number} needs {duration(steady)} for {number_of} in {text}"


def _parts(draft: Draft) -> tuple[float, float, float]:
    """Seconds of the slowest pipeline in steady state, of filling and emptying it, and of synchronization."""
    number = _slowest(draft)
    cost = draft.costs[number]
    steady = draft.micro_batches[number] * max(cost.stage_seconds)
    return steady, cost.seconds - steady, draft.synchronization_seconds


def _slowest(draft: Draft) -> int:
    return int(np.argmax([cost.seconds for cost in draft.costs]))


def _why_no_chunks(schedules: Sequence[Schedule], makes: ChunkedPlans) -> str:
    """Why there is no plan of these schedules, and what to change."""
    reasons = "; ".join(f"{schedule}: {problem}" for schedule, problem in makes.problems.items())
    return f"no plan of the schedule {' or '.join(schedules)} is possible: " + (
        reasons
        or "no pipeline of at least 2 stages has a number of micro-batches that is a multiple of its number of stages, "
        "and blocks for every chunk; use another global batch, or also the schedule 1f1b"
    )


def _why_nothing(topology: Topology, profile: ModelProfile, search: PlanSearch) -> str:
    """Why there is no plan, and what to change."""
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
