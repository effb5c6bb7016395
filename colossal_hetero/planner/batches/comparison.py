"""Divide a global batch with one method, and with the others for comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ...common.text import spans
from ..cluster.topology import MeasuredLink
from .allocation import Allocation, Share, allocate
from .batch_profile import PASSES, BatchProfile
from .ring_order import common_protocol, link_seconds, longest_edge, ring_order
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
    dropped: tuple[int, ...]
    protocol: str
    cost_seconds: float
    steps: tuple[AdaptStep, ...]
    """Configurations that were tried, in order; the first one keeps all devices that hold a sample."""


def adapt(
    curves: Sequence[Curve],
    global_batch_size: int,
    stage: int,
    *,
    links: Iterable[MeasuredLink],
    protocols: Sequence[Sequence[str]],
    message_bytes: float,
    accumulation: str = "shared",
    redistribution: str = "exact",
    curves_for_count: Callable[[int], Sequence[Curve]] | None = None,
) -> AdaptPlan:
    """Drop devices as long as that reduces the predicted time per global batch.

    Each round tries to drop, in this order (the paper tries one of the first two):

    1. the busiest device of those whose communication with both ring neighbors takes longer than their compute;
    2. the device with the fewest samples per second (parts in proportion to speed take equally long);
    3. all devices without NCCL at once: with two CPUs, dropping one does not make NCCL possible.
    """
    if len(protocols) != len(curves):
        raise ValueError(f"protocols has {len(protocols)} entries for {len(curves)} ranks: give one tuple per rank")
    if redistribution not in ("exact", "adapt"):
        raise ValueError(f"unknown redistribution {redistribution!r}; valid are exact, adapt")
    if not message_bytes >= 0:
        raise ValueError(f"message_bytes={message_bytes} must be at least 0")
    links = tuple(links)

    def curves_with(ranks: tuple[int, ...]) -> Sequence[Curve]:
        return curves if curves_for_count is None else curves_for_count(len(ranks))

    def plan(ranks: tuple[int, ...]) -> AdaptPlan:
        found = curves_with(ranks)
        protocol = common_protocol([protocols[rank] for rank in ranks])
        seconds = link_seconds(links, ranks, protocol, message_bytes)
        ring = ring_order(seconds)
        allocation = allocate(
            [found[rank] for rank in ranks],
            global_batch_size,
            stage,
            method=redistribution,
            accumulation=accumulation,
            communication_seconds=longest_edge(seconds, ring),
        )
        share = dict(zip(ranks, allocation.shares, strict=True))
        busy = dict(zip(ranks, allocation.busy_seconds, strict=True))
        whole = replace(
            allocation,
            method="adapt",
            shares=tuple(share.get(rank, Share(())) for rank in range(len(curves))),
            busy_seconds=tuple(busy.get(rank, 0.0) for rank in range(len(curves))),
        )
        order = tuple(ranks[index] for index in ring)
        dropped = tuple(rank for rank in range(len(curves)) if rank not in share)
        return AdaptPlan(whole, order, dropped, protocol, whole.wall_seconds, ())

    able = tuple(rank for rank, curve in enumerate(curves) if curve.max_batch > 0)
    while able and not _all_hold(curves_with(able), able):
        able = tuple(rank for rank in able if curves_with(able)[rank].max_batch > 0)
    if not able:
        raise ValueError(
            f"none of {len(curves)} devices holds one sample in stage {stage}; use a higher stage, or free memory"
        )
    current = plan(able)
    unable = current.dropped
    reason = f"cannot hold one sample: {_names(unable)}" if unable else "all devices"
    steps = [AdaptStep(unable, reason, current.protocol, current.cost_seconds, True)]
    improved = True
    while improved:
        improved = False
        for without, reason in _drop_candidates(current, curves, protocols, links, message_bytes):
            rest = tuple(rank for rank in sorted(current.ring) if rank not in without)
            if not _all_hold(curves_with(rest), rest):
                protocol = common_protocol([protocols[rank] for rank in rest])
                steps.append(AdaptStep(without, reason, protocol, math.inf, False))
                continue
            tried = plan(rest)
            improved = tried.cost_seconds < current.cost_seconds
            steps.append(AdaptStep(without, reason, tried.protocol, tried.cost_seconds, improved))
            if improved:
                current = tried
                break
    return replace(current, steps=tuple(steps))


def _all_hold(curves: Sequence[Curve], ranks: Sequence[int]) -> bool:
    return all(curves[rank].max_batch > 0 for rank in ranks)


def _drop_candidates(
    current: AdaptPlan,
    curves: Sequence[Curve],
    protocols: Sequence[Sequence[str]],
    links: Sequence[MeasuredLink],
    message_bytes: float,
) -> list[tuple[tuple[int, ...], str]]:
    """The ranks to try to drop, in order, each with the reason."""
    ring = current.ring
    if len(ring) == 1:
        return []
    seconds = link_seconds(links, ring, current.protocol, message_bytes)
    nearest = [
        min(seconds[i - 1, i], seconds[i, (i + 1) % len(ring)]) * _synchronizations(current) for i in range(len(ring))
    ]
    busy = current.allocation.busy_seconds
    bound = [rank for rank, near in zip(ring, nearest, strict=True) if near > busy[rank]]
    found: list[tuple[tuple[int, ...], str]] = []
    if bound:
        rank = min(bound, key=lambda rank: (-busy[rank], rank))
        near = nearest[ring.index(rank)]
        reason = f"rank {rank} communicates longer ({near:.3g} s) than it computes ({busy[rank]:.3g} s)"
        found.append(((rank,), reason))
    rank = min(ring, key=lambda rank: (curves[rank].peak_speed, rank))
    if (rank,) not in [without for without, _ in found]:
        found.append(((rank,), f"rank {rank} is the slowest ({curves[rank].peak_speed:.3g} samples/s)"))
    has_nccl = [rank for rank in ring if "nccl" in protocols[rank]]
    lacking = tuple(sorted(set(ring) - set(has_nccl)))
    if current.protocol != "nccl" and has_nccl and lacking not in [without for without, _ in found]:
        found.append((lacking, f"without {_names(lacking)} the others use nccl instead of {current.protocol}"))
    return found


def _synchronizations(plan: AdaptPlan) -> int:
    return 1 if plan.allocation.stage < 2 else plan.allocation.steps


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


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


@dataclass(frozen=True)
class BatchComparison:
    """The division by the chosen method, beside those by the other methods."""

    profile: BatchProfile
    curves: tuple[Curve, ...]
    """Time curve of each rank at the stage of ``chosen``, by rank."""
    chosen: Allocation
    results: tuple[MethodResult, ...]
    """Results of all methods, including ``chosen``."""
    adapt: AdaptPlan | None = None
    """The search that found ``chosen``; None for another method, or without links."""


def compare(
    profile: BatchProfile,
    global_batch_size: int,
    *,
    stage: int | None = None,
    method: str = "exact",
    accumulation: str = "shared",
) -> BatchComparison:
    """Divide a global batch by ``method``, and by the other methods for comparison."""
    _check_sizes(profile, global_batch_size, stage)
    problem = _BatchProblem(profile, global_batch_size, profile.stage if stage is None else stage, method)
    plan: AdaptPlan | None = None
    if method == "adapt" and profile.links:
        plan = problem.adapt(accumulation)
        chosen = plan.allocation
    else:
        chosen = problem.allocate(method, accumulation)

    settings = [("exact", accumulation), ("uniform", accumulation), ("flops", accumulation)]
    if problem.stage < 2:
        settings.insert(1, ("exact", "per_rank" if accumulation == "shared" else "shared"))
    results = [
        MethodResult(name, chosen) if (name, each) == (method, accumulation) else problem.attempt(name, each)
        for name, each in settings
    ]
    if plan is not None:
        results.append(MethodResult("adapt", chosen, _outcome(plan)))
    elif method == "adapt":
        results.append(MethodResult("adapt", chosen, "in proportion to throughput only: the profile has no links"))
    elif profile.links:
        results.append(problem.attempt("adapt", accumulation))
    curves = problem.curves if plan is None else problem.curves_for_count(len(plan.ring))
    return BatchComparison(profile, tuple(curves), chosen, tuple(results), plan)


def _check_sizes(profile: BatchProfile, global_batch_size: int, stage: int | None) -> None:
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


class _BatchProblem:
    def __init__(self, profile: BatchProfile, global_batch_size: int, stage: int, method: str) -> None:
        self.profile, self.global_batch_size, self.stage = profile, global_batch_size, stage
        may_drop = method == "adapt" and bool(profile.links)
        self.curves = profile.curves(stage, global_batch_size, allow_empty=may_drop)
        self._curves_by_count: dict[int, list[Curve]] = {}
        self.communication_seconds = profile.communication(stage)
        self.message_bytes = 0.0
        linked = {link.protocol for link in profile.links}
        measured = [tuple(each for each in kind.protocols if each in linked) for kind in profile.kinds]
        self.protocols = [measured[kind] for kind in profile.ranks]
        """By rank, its protocols for which links were measured."""
        self.link_error = ""
        if profile.links:
            try:
                self._calibrate_links()
            except ValueError as error:
                self.link_error = str(error)

    def _calibrate_links(self) -> None:
        """Set the message size with which the ring in rank order takes the measured time, to compare other rings."""
        profile, ranks = self.profile, range(len(self.profile.ranks))
        protocol = common_protocol(self.protocols)
        if self.communication_seconds > 0:
            # Comm = latency + message · (seconds per byte): solve for the message of each edge and take the smallest.
            latency = link_seconds(profile.links, ranks, protocol, 0.0)
            per_byte = link_seconds(profile.links, ranks, protocol, 1.0) - latency
            after = [(rank, (rank + 1) % len(ranks)) for rank in ranks]
            room = [(self.communication_seconds - latency[edge]) / per_byte[edge] for edge in after]
            self.message_bytes = max(min(room), 0.0)
        else:
            share = (len(ranks) - 1) / len(ranks)
            # In stage 1 the parameters are gathered as often as the gradients are summed, once per global batch.
            passes = PASSES[self.stage] + (self.stage == 1)
            self.message_bytes = passes * share * profile.model.gradient_bytes
        seconds = link_seconds(profile.links, ranks, protocol, self.message_bytes)
        self.communication_seconds = longest_edge(seconds, list(ranks))

    def curves_for_count(self, sharing_ranks: int) -> list[Curve]:
        if sharing_ranks not in self._curves_by_count:
            self._curves_by_count[sharing_ranks] = self.profile.curves(
                self.stage, self.global_batch_size, sharing_ranks=sharing_ranks, allow_empty=True
            )
        return self._curves_by_count[sharing_ranks]

    def allocate(self, method: str, accumulation: str) -> Allocation:
        profile = self.profile
        lacking = [kind.device for index, kind in enumerate(profile.kinds) if index in profile.ranks and not kind.flops]
        if method == "flops" and lacking:
            raise ValueError(f"method flops needs the FLOP/s of every device; the profile has none for {lacking[0]}")
        return allocate(
            self.curves,
            self.global_batch_size,
            self.stage,
            method=method,
            accumulation=accumulation,
            communication_seconds=self.communication_seconds,
            flops=profile.flops,
        )

    def adapt(self, accumulation: str) -> AdaptPlan:
        if self.link_error:
            raise ValueError(self.link_error)
        profile = self.profile
        return adapt(
            self.curves,
            self.global_batch_size,
            self.stage,
            links=profile.links,
            protocols=self.protocols,
            message_bytes=self.message_bytes,
            accumulation=accumulation,
            curves_for_count=self.curves_for_count,
        )

    def attempt(self, method: str, accumulation: str) -> MethodResult:
        """The result of ``method``; if it raises ``ValueError``, the message as note."""
        try:
            if method == "adapt":
                plan = self.adapt(accumulation)
                return MethodResult(method, plan.allocation, _outcome(plan))
            return MethodResult(method, self.allocate(method, accumulation))
        except ValueError as error:
            return MethodResult(method, None, str(error))


def _outcome(plan: AdaptPlan) -> str:
    if not plan.dropped:
        return f"all devices, {plan.protocol}"
    return f"without {'rank' if len(plan.dropped) == 1 else 'ranks'} {spans(plan.dropped)}, {plan.protocol}"
