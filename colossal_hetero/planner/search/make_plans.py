"""3D plans: how much of each kind of parallelism, which devices in which pipeline, which layers on which device.

AutoHet, Algorithm 1, and beyond it: all tensor-parallel degrees, micro-batches and numbers of pipelines are looked at,
in the order of a lower bound on their time, until what is left cannot be better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster.topology import Topology
from ..plans.plan import Plan
from ..profile.layer_profile import ModelProfile
from ..stages.pipeline import PipelineCost
from ..stages.split_methods import METHODS
from .draft import Assembler, Draft, Offer, write_plan
from .placement import Links
from .plan_search import PlanSearch
from .tp_groups import divisors, slot_kinds, tensor_parallel_degrees

__all__ = ["Candidate", "make_plans"]


MAX_SAMPLES = 10**9
"""In a global batch: its divisors are looked for one by one."""


@dataclass(frozen=True)
class Candidate:
    """A plan, and what is to be said about it."""

    plan: Plan
    reason: str
    """Why it is the best, or what it would take."""


def make_plans(
    topology: Topology,
    profile: ModelProfile,
    *,
    global_batch: int,
    micro_batches: Sequence[int] | None = None,
    tensor_parallel: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
    method: str = "exact",
    symmetric: bool = False,
    keep: int = 5,
) -> list[Candidate]:
    """The plans with the least predicted iteration time, best first.

    Args:
        topology: Machines.
        profile: The model's layers on the kinds of devices there are.
        global_batch: Samples per iteration.
        micro_batches: Sizes to try, in samples; None for all that were measured and divide the global batch.
        tensor_parallel: Degrees to try; None for all that were measured.
        stages: Numbers of stages to try; None for all.
        method: How stages are split, one of :data:`~colossal_hetero.planner.stages.split_methods.METHODS`.
        symmetric: Only plans whose pipelines are all alike, which is what the plugin can run.
        keep: How many plans.

    Raises:
        ValueError: there is no plan; the message says why, and what would help.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: valid are {', '.join(METHODS)}")
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one plan is to be kept")
    for count in stages or ():
        if not 1 <= count <= profile.blocks:
            raise ValueError(
                f"stages={count}: {profile.name} has {profile.blocks} blocks and each stage holds at least one; "
                f"use 1 to {profile.blocks} stages"
            )
    sizes = _micro_batches(profile, global_batch, micro_batches)
    offers = _offers(topology, profile, global_batch, sizes, _degrees(topology, profile, tensor_parallel))
    search = PlanSearch(topology, offers, Assembler(topology, method), symmetric, stages)
    drafts = search.run(keep)
    if not drafts:
        most = max(sum(len(kind.slots) for kind in offer.kinds) for offer in offers)
        if stages and min(stages) > most:
            raise ValueError(
                f"stages={', '.join(map(str, stages))}: the devices make at most {most} tensor-parallel groups, one "
                f"per stage; use at most {min(most, profile.blocks)} stages"
            )
        raise ValueError(_why_nothing(offers, search.problems))
    best = drafts[0]
    # Degrees with neither a draft nor a problem were left because of a bound on their time.
    problems = search.problems | dict.fromkeys(search.too_large, "the model does not fit")
    notes = [
        f"tensor parallelism {degree} is no way: {problem}"
        for degree, problem in sorted(problems.items())
        if degree not in _degrees_of(search.drafts)
    ]
    first = f"the least predicted time of {len(search.drafts)} plans that were worked out"
    return [
        Candidate(
            write_plan(draft, topology, profile, method, notes if draft is best else ()),
            first if draft is best else _compared(draft, best),
        )
        for draft in drafts
    ]


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
                f"tensor_parallel={degree} cannot be: the degrees that were measured and fit into a node are "
                f"{', '.join(map(str, degrees))}"
            )
    return sorted(set(wanted)) if wanted else degrees


def _offers(
    topology: Topology, profile: ModelProfile, global_batch: int, sizes: Sequence[int], degrees: Sequence[int]
) -> list[Offer]:
    offers = []
    for degree in degrees:
        for size in sizes:
            kinds = slot_kinds(topology, profile, degree, size)
            if kinds:
                message = float(np.max(kinds[0].costs.output_bytes))
                offers.append(Offer(degree, size, tuple(kinds), global_batch // size, Links(topology, message)))
    if not offers:
        measured = ", ".join(
            f"{device} with tensor parallelism {degree}: {', '.join(map(str, profile.micro_batches(device, degree)))}"
            for device in profile.devices
            for degree in profile.tensor_parallel_degrees(device)
        )
        raise ValueError(f"micro_batch={', '.join(map(str, sizes))} was not measured on any device; {measured} were")
    return offers


# In words ---------------------------------------------------------------------------------------------------------


def _degrees_of(drafts: Mapping[object, Draft]) -> set[int]:
    return {draft.offer.tensor_parallel for draft in drafts.values()}


def _compared(draft: Draft, best: Draft) -> str:
    """How much slower a plan is, and what most of that comes from."""
    slower = f"{100 * (draft.seconds / best.seconds - 1):.1f} % slower"
    steady, fill, _ = _parts(draft)
    more = [here - there for here, there in zip(_parts(draft), _parts(best), strict=True)]
    cause = int(np.argmax(more))
    if more[cause] <= 0:
        return slower
    if cause == 2:
        return f"{slower}: summing gradients takes {draft.synchronization_seconds:.3g} s"
    number = _slowest(draft)
    cost, cut = draft.costs[number], draft.splits[number]
    if cause == 1:
        return f"{slower}: filling a pipeline of {len(cut.order)} stages takes {fill:.3g} s"
    times = _stage_seconds(cost)
    stage = int(np.argmax(times))
    kind, _ = draft.places[number][cut.order[stage]]
    start, stop = cut.bounds[stage], cut.bounds[stage + 1]
    text = f"stage {stage} ({draft.offer.kinds[kind].device}, blocks {start} to {stop - 1})"
    waits = 1 - float(np.mean(times)) / times[stage]
    if len(times) > 1 and waits > 0.01:
        return f"{slower}: the others wait for {text}, {100 * waits:.0f} % of the time on average"
    idle = sum(len(kind.slots) for kind in draft.offer.kinds) - sum(len(places) for places in draft.places)
    if idle:
        return f"{slower}: {idle * draft.offer.tensor_parallel} devices are idle"
    return f"{slower}: {draft.micro_batches[number]} micro-batches take {steady:.3g} s in {text}"


def _parts(draft: Draft) -> tuple[float, float, float]:
    """Seconds of the slowest pipeline in steady state, of filling it, and of synchronization."""
    number = _slowest(draft)
    cost = draft.costs[number]
    steady = draft.micro_batches[number] * max(_stage_seconds(cost))
    return steady, cost.seconds - steady, draft.synchronization_seconds


def _slowest(draft: Draft) -> int:
    return int(np.argmax([cost.seconds for cost in draft.costs]))


def _stage_seconds(cost: PipelineCost) -> list[float]:
    return [sum(each) for each in zip(cost.forward_seconds, cost.backward_seconds, cost.transfer_seconds, strict=True)]


def _why_nothing(offers: Sequence[Offer], problems: Mapping[int, str]) -> str:
    """Why no plan fits, and what would help."""
    needs = []
    for offer in offers:
        costs = offer.kinds[0].costs
        needed = costs.state_bytes + costs.activation_bytes
        block = int(np.argmax(needed))
        roomiest = max(offer.kinds, key=lambda kind: kind.memory_bytes)
        needs.append((needed[block] - roomiest.memory_bytes, needed[block], block, roomiest, offer))
    over, needed, block, roomiest, offer = min(needs, key=lambda each: each[0])
    remedy = "use smaller micro-batches, more tensor parallelism, or devices with more memory"
    if over > 0:
        return (
            f"no device can hold block {block}: it needs {needed / 1e9:.3g} GB with tensor parallelism "
            f"{offer.tensor_parallel} and micro-batches of {offer.micro_batch}, and {roomiest.device} has "
            f"{roomiest.memory_bytes / 1e9:.3g} GB; {remedy}"
        )

    def share(offer: Offer) -> tuple[float, float, float]:
        costs = offer.kinds[0].costs
        there = sum(kind.memory_bytes * len(kind.slots) for kind in offer.kinds) * offer.tensor_parallel
        whole = float(costs.state_bytes.sum() + costs.activation_bytes.sum()) * offer.tensor_parallel
        return whole / there, whole, there

    offer = min(offers, key=share)
    part, whole, there = share(offer)
    blocks, slots = len(offer.kinds[0].costs.state_bytes), max(sum(len(k.slots) for k in each.kinds) for each in offers)
    text = (
        f"no plan fits into memory: with tensor parallelism {offer.tensor_parallel} and micro-batches of "
        f"{offer.micro_batch} the model needs at least {whole / 1e9:.4g} GB, the devices have {there / 1e9:.4g} GB"
    )
    if part <= 1 and slots > blocks:
        text += f", but a pipeline of {blocks} blocks has at most {blocks} stages"
    elif part <= 1:
        text += ", but the first stages of a pipeline need more: they keep several micro-batches in flight"
    told = [f"with tensor parallelism {degree}, {problem}" for degree, problem in sorted(problems.items())]
    return "; ".join([text, *told, remedy])
