"""Device dropping of ADAPT, and the comparison of all methods that divide a global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ...common.text import spans
from .allocation import Allocation, Share, allocate
from .batch_profile import BatchProfile
from .ring_order import RingNetwork, ring_cost, ring_order
from .time_curve import Curve

__all__ = ["MAX_GLOBAL_BATCH", "AdaptPlan", "AdaptStep", "BatchComparison", "MethodResult", "adapt", "compare"]


# Device dropping -----------------------------------------------------------------------------------------------------
# Devices that take part, their ring and their batches (ADAPT, chapter 5; docs/algorithms.md, 2.4). If a device is
# dropped, the others run its samples; that is faster if it costs more communication than it saves compute, for example
# if it is the only one without NCCL. The paper's cost, ``max_d B_d·S_d + max_d Comm(d, next(d))`` (Eq. 5.3), is here
# the wall time of :mod:`.allocation`, with the longest edge of the ring as the time of one synchronization.


@dataclass(frozen=True)
class AdaptStep:
    without: tuple[int, ...]
    """The ranks that it drops, in addition to those dropped before."""
    reason: str
    protocol: str
    cost_seconds: float
    """Predicted time per global batch; infinite if the remaining ranks cannot hold a sample each."""
    kept: bool
    """True if the configuration was better than those before it."""


@dataclass(frozen=True)
class AdaptPlan:
    allocation: Allocation
    """The division over all ranks; a dropped rank has ``runs == ()`` and ``busy_seconds == 0``."""
    ring: tuple[int, ...]
    """Ranks in sending order; the last one sends to the first."""
    protocol: str
    steps: tuple[AdaptStep, ...] = ()
    """Configurations that were tried, in order; the first one keeps all devices that hold a sample."""

    @property
    def dropped(self) -> tuple[int, ...]:
        return tuple(rank for rank, share in enumerate(self.allocation.shares) if not share.runs)

    @property
    def cost_seconds(self) -> float:
        return self.allocation.wall_seconds


def adapt(
    curves_of: Callable[[int], Sequence[Curve]],
    global_batch_size: int,
    stage: int,
    network: RingNetwork,
    accumulation: str = "shared",
) -> AdaptPlan:
    """Drop devices as long as that reduces the predicted time per global batch.

    Each round tries to drop, in this order (the paper tries one of the first two):

    1. the busiest device of those whose communication with both ring neighbors takes longer than their compute;
    2. the device with the fewest samples per second (parts in proportion to speed take equally long);
    3. all devices without NCCL at once: with two CPUs, dropping one does not make NCCL possible.

    ``curves_of`` returns the curves of all ranks if so many of them take part.
    """
    everyone = range(len(network.protocols))

    def unable(ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if curves_of(len(ranks))[rank].max_batch < 1]

    def plan(ranks: Sequence[int]) -> AdaptPlan:
        curves, seconds = curves_of(len(ranks)), network.seconds(ranks)
        ring = ring_order(seconds)
        allocation = allocate(
            [curves[rank] for rank in ranks],
            global_batch_size,
            stage,
            accumulation=accumulation,
            communication_seconds=ring_cost(seconds, ring)[0],
        )
        share = dict(zip(ranks, allocation.shares, strict=True))
        busy = dict(zip(ranks, allocation.busy_seconds, strict=True))
        whole = replace(
            allocation,
            method="adapt",
            shares=tuple(share.get(rank, Share(())) for rank in everyone),
            busy_seconds=tuple(busy.get(rank, 0.0) for rank in everyone),
        )
        return AdaptPlan(whole, tuple(ranks[index] for index in ring), network.protocol(ranks))

    able = list(everyone)
    while unable(able):
        able = [rank for rank in able if rank not in unable(able)]
    if not able:
        raise ValueError(
            f"none of {len(everyone)} devices holds one sample in stage {stage}; use a higher stage, or free memory"
        )
    current = plan(able)
    reason = f"cannot hold one sample: {_names(current.dropped)}" if current.dropped else "all devices"
    steps = [AdaptStep(current.dropped, reason, current.protocol, current.cost_seconds, True)]
    improved = True
    while improved:
        improved = False
        for without, reason in _drop_candidates(current, curves_of(len(everyone)), network):
            rest = [rank for rank in sorted(current.ring) if rank not in without]
            if unable(rest):
                steps.append(AdaptStep(without, reason, network.protocol(rest), math.inf, False))
                continue
            tried = plan(rest)
            improved = tried.cost_seconds < current.cost_seconds
            steps.append(AdaptStep(without, reason, tried.protocol, tried.cost_seconds, improved))
            if improved:
                current = tried
                break
    return replace(current, steps=tuple(steps))


def _drop_candidates(
    current: AdaptPlan, curves: Sequence[Curve], network: RingNetwork
) -> list[tuple[tuple[int, ...], str]]:
    """The ranks to try to drop, in order, each with the reason."""
    ring, busy = current.ring, current.allocation.busy_seconds
    if len(ring) == 1:
        return []
    edges = network.seconds(ring) * (1 if current.allocation.stage < 2 else current.allocation.steps)
    near = {rank: min(edges[i - 1, i], edges[i, (i + 1) % len(ring)]) for i, rank in enumerate(ring)}
    found: dict[tuple[int, ...], str] = {}
    bound = [rank for rank in ring if near[rank] > busy[rank]]
    if bound:
        rank = min(bound, key=lambda rank: (-busy[rank], rank))
        found[rank,] = f"rank {rank} communicates longer ({near[rank]:.3g} s) than it computes ({busy[rank]:.3g} s)"
    rank = min(ring, key=lambda rank: (curves[rank].peak_speed, rank))
    found.setdefault((rank,), f"rank {rank} is the slowest ({curves[rank].peak_speed:.3g} samples/s)")
    lacking = tuple(rank for rank in sorted(ring) if "nccl" not in network.protocols[rank])
    if current.protocol != "nccl" and 0 < len(lacking) < len(ring):
        found.setdefault(lacking, f"without {_names(lacking)} the others use nccl instead of {current.protocol}")
    return list(found.items())


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


# Comparison ----------------------------------------------------------------------------------------------------------

MAX_GLOBAL_BATCH = 2**20
"""Largest global batch, in samples: the exact search needs about 60 bytes for each."""
MAX_SIZES = 2**22
"""Largest number of micro-batch sizes, over all kinds of device, whose times are computed."""


@dataclass(frozen=True)
class MethodResult:
    name: str
    allocation: Allocation | None
    """None if the method cannot divide this global batch."""
    note: str = ""
    """Reason why there is no allocation, or a remark about it."""
    adapt: AdaptPlan | None = None
    """The search of method ``adapt``; None for another method, or without links."""


@dataclass(frozen=True)
class BatchComparison:
    """The division by the chosen method, beside those by the other methods."""

    profile: BatchProfile
    curves: tuple[Curve, ...]
    """Time curve of each rank at the stage of ``chosen``, by rank."""
    chosen: Allocation
    adapt: AdaptPlan | None
    """The search that found ``chosen``, if it is that of ``adapt``."""
    results: tuple[MethodResult, ...]
    """Results of all methods, including ``chosen``."""


def compare(
    profile: BatchProfile,
    global_batch_size: int,
    *,
    stage: int | None = None,
    method: str = "exact",
    accumulation: str = "shared",
) -> BatchComparison:
    """Divide a global batch by ``method``, and by the other methods for comparison."""
    stage = profile.stage if stage is None else stage
    _check_sizes(profile, global_batch_size, stage)
    curves = profile.curves(stage, global_batch_size, allow_empty=method == "adapt" and bool(profile.links))
    communication_seconds, network, link_error = profile.communication(stage), None, ""
    if profile.links:
        try:
            network = RingNetwork.of(profile, stage)
            everyone = range(len(curves))
            communication_seconds, _ = ring_cost(network.seconds(everyone), everyone)
        except ValueError as error:
            network, link_error = None, str(error)

    @lru_cache
    def curves_of(ranks: int) -> list[Curve]:
        return profile.curves(stage, global_batch_size, sharing_ranks=ranks, allow_empty=True)

    def divide(name: str, accumulation: str) -> MethodResult:
        if name == "adapt" and profile.links:
            if network is None:
                raise ValueError(link_error)
            plan = adapt(curves_of, global_batch_size, stage, network, accumulation)
            left_out = f"without {'rank' if len(plan.dropped) == 1 else 'ranks'} {spans(plan.dropped)}"
            note = f"{left_out if plan.dropped else 'all devices'}, {plan.protocol}"
            return MethodResult(name, plan.allocation, note, plan)
        lacking = [kind.device for index, kind in enumerate(profile.kinds) if index in profile.ranks and not kind.flops]
        if name == "flops" and lacking:
            raise ValueError(f"method flops needs the FLOP/s of every device; the profile has none for {lacking[0]}")
        allocation = allocate(
            curves, global_batch_size, stage, method=name, accumulation=accumulation,
            communication_seconds=communication_seconds, flops=profile.flops,
        )  # fmt: skip
        note = "in proportion to throughput only: the profile has no links" if name == "adapt" else ""
        return MethodResult(name, allocation, note)

    def attempt(name: str, accumulation: str) -> MethodResult:
        try:
            return divide(name, accumulation)
        except ValueError as error:
            return MethodResult(name, None, str(error))

    settings = [("exact", accumulation), ("uniform", accumulation), ("flops", accumulation)]
    if stage < 2:
        settings.insert(1, ("exact", "per_rank" if accumulation == "shared" else "shared"))
    if method == "adapt" or profile.links:
        settings.append(("adapt", accumulation))
    chosen = divide(method, accumulation)
    assert chosen.allocation is not None
    results = [chosen if each == (method, accumulation) else attempt(*each) for each in settings]
    own_curves = curves if chosen.adapt is None else curves_of(len(chosen.adapt.ring))
    return BatchComparison(profile, tuple(own_curves), chosen.allocation, chosen.adapt, tuple(results))


def _check_sizes(profile: BatchProfile, global_batch_size: int, stage: int) -> None:
    """Raise ``ValueError`` if dividing this global batch would take gigabytes of memory."""
    if global_batch_size > MAX_GLOBAL_BATCH:
        raise ValueError(
            f"a global batch of {global_batch_size:,} samples is too large to be divided; give at most "
            f"{MAX_GLOBAL_BATCH:,} samples"
        )
    sizes = sum(profile.kind_max_batches(stage, global_batch_size)[kind] for kind in set(profile.ranks))
    if sizes > MAX_SIZES:
        raise ValueError(
            f"the devices of the profile hold micro-batches of {sizes:,} sizes in total, more than {MAX_SIZES:,}; give "
            f"a smaller global batch, at most {MAX_SIZES // len(set(profile.ranks)):,} samples"
        )
