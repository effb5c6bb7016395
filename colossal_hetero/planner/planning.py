"""3D plans: how much of each kind of parallelism, which devices in which pipeline, which layers on which device.

AutoHet, Algorithm 1, and beyond it: all tensor-parallel degrees, micro-batches and numbers of pipelines are looked at,
in the order of a lower bound on their time, until what is left cannot be better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .assembling import Assembler, Draft, Offer, write_plan
from .candidates import Bounds, compositions, divisors, slot_kinds, tensor_parallel_degrees
from .layer_profile import ModelProfile
from .mapping import Links
from .plan import Plan
from .topology import Topology

__all__ = ["Candidate", "make_plans"]

MOST_SPLITS = 64


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
        method: How stages are split, one of :data:`.splits.METHODS`.
        symmetric: Only plans whose pipelines are all alike, which is what the plugin can run.
        keep: How many plans.

    Raises:
        ValueError: there is no plan; the message says why, and what would help.
    """
    sizes = _micro_batches(profile, global_batch, micro_batches)
    offers = _offers(topology, profile, global_batch, sizes, _degrees(topology, profile, tensor_parallel))
    assembler = Assembler(topology, method)
    bounds, rows = [], []
    for number, offer in enumerate(offers):
        available = [len(kind.slots) for kind in offer.kinds]
        counts = compositions(available, min(profile.blocks, sum(available)))
        if stages is not None:
            counts = counts[np.isin(counts.sum(axis=1), stages)]
        bound = Bounds(offer.kinds, offer.links.least_seconds)
        for groups in divisors(offer.total_micro_batches):
            fitting = counts[(counts * groups <= available).all(axis=1)]
            if not len(fitting):
                continue
            total = np.full(len(fitting), offer.total_micro_batches // groups)
            bounds.append(bound.seconds(fitting, total))
            rows += [(number, groups, row) for row in fitting]
    if not rows:
        raise ValueError("no plan")
    seconds = np.concatenate(bounds)
    drafts: list[Draft] = []
    problems: list[str] = []
    best = np.inf
    for row in np.argsort(seconds, kind="stable")[:MOST_SPLITS]:
        if seconds[row] >= best:
            break
        number, groups, counts = rows[row]
        draft = assembler.assemble(offers[number], [counts.tolist()] * groups, symmetric=True)
        if isinstance(draft, str):
            problems.append(draft)
            continue
        drafts.append(draft)
        best = min(best, draft.seconds)
    if not drafts:
        raise ValueError(f"no plan fits: {problems[0] if problems else 'memory'}")
    drafts.sort(key=lambda draft: draft.seconds)
    return [
        Candidate(
            write_plan(draft, topology, profile, method, ()),
            "the least predicted time of an iteration"
            if number == 0
            else f"{draft.seconds / drafts[0].seconds - 1:.1%} slower",
        )
        for number, draft in enumerate(drafts[:keep])
    ]


def _micro_batches(profile: ModelProfile, global_batch: int, sizes: Sequence[int] | None) -> list[int]:
    if global_batch < 1:
        raise ValueError(f"global_batch={global_batch}: must be at least 1")
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
        raise ValueError(f"no kind of device was measured with micro_batch {', '.join(map(str, sizes))}")
    return offers
