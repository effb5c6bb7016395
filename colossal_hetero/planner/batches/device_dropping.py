"""Choose which devices take part, in which ring, with which batches (ADAPT, chapter 5; docs/algorithms.md, 2.4).

If a device is dropped, the others run its samples. Dropping a device is an advantage if it costs more communication
time than it saves compute time, for example if it is the only one without NCCL. The cost of a configuration in the
paper, ``max_d B_d·S_d + max_d Comm(d, next(d))`` (Eq. 5.3), corresponds here to the wall time of :mod:`.allocation`,
with the longest edge of the ring as the time of one synchronization. The paper has no gradient accumulation, so it
synchronizes once per global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..cluster.link import MeasuredLink
from .allocation import Allocation, Share, allocate
from .ring_order import common_protocol, link_seconds, longest_edge, ring_order
from .time_curve import Curve

__all__ = ["AdaptPlan", "AdaptStep", "adapt"]


@dataclass(frozen=True)
class AdaptStep:
    """One configuration that was tried."""

    without: tuple[int, ...]
    """The ranks that it drops, in addition to those dropped before."""
    reason: str
    """Why these ranks were chosen."""
    protocol: str
    """The protocol of the remaining ranks."""
    cost_seconds: float
    """Predicted time per global batch; infinite if the remaining ranks cannot hold a sample each."""
    kept: bool
    """Whether the configuration was better than those before it."""


@dataclass(frozen=True)
class AdaptPlan:
    """The devices that take part, their ring and their batches."""

    allocation: Allocation
    """The division over all ranks; a dropped rank has ``runs == ()`` and ``busy_seconds == 0``."""
    ring: tuple[int, ...]
    """Ranks in sending order; the last one sends to the first."""
    dropped: tuple[int, ...]
    """Ranks that do not take part."""
    protocol: str
    """The protocol of the ring."""
    cost_seconds: float
    """Predicted wall time per global batch."""
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

    The search repeats until no drop reduces the cost or one device remains. In each round it tries to drop, in this
    order:

    1. the device that is busiest among those whose communication with both ring neighbors takes longer than their
       compute;
    2. the slowest device, which is the one with the fewest samples per second (compute times do not tell, because parts
       in proportion to speed take equally long);
    3. all devices without NCCL at once, if another device has it, because with two CPUs dropping one of them does not
       make NCCL possible.

    The paper tries one of the first two.

    Args:
        curves: time curve of each rank. A device that holds no sample is dropped.
        global_batch_size: samples per optimizer step, over all ranks.
        stage: stage of ZeRO, 0 to 3.
        links: links between all pairs of ranks, in each protocol that may be used.
        protocols: protocols of each rank, e.g. ``("nccl", "gloo")`` for a GPU and ``("gloo",)`` for a CPU.
        message_bytes: bytes that one device sends to the next in one synchronization.
        accumulation: see :func:`.allocation.allocate`.
        redistribution: how the global batch is divided over the remaining devices: ``exact``, in the least time, or
            ``adapt``, in proportion to throughput as in the paper.
        curves_for_count: from a number of ranks to the curves of all ranks if the state is sharded over that many
            ranks; the fewer they are, the less memory remains for samples. None: the curves do not depend on it.

    Raises:
        ValueError: as ``allocate``; a pair of remaining ranks has no link in their protocol; the ranks have no protocol
            in common; the number of protocols differs from the number of ranks.
    """
    if len(protocols) != len(curves):
        raise ValueError(f"protocols has {len(protocols)} entries for {len(curves)} ranks: give one tuple per rank")
    if redistribution not in ("exact", "adapt"):
        raise ValueError(f"unknown redistribution {redistribution!r}; valid are exact, adapt")
    if not message_bytes >= 0:
        raise ValueError(f"message_bytes={message_bytes} must be at least 0")
    links = tuple(links)

    def curves_with(ranks: tuple[int, ...]) -> Sequence[Curve]:
        """The curves of all ranks if only ``ranks`` take part."""
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
    """Whether each of ``ranks`` holds a sample."""
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
    """Number of synchronizations per global batch."""
    return 1 if plan.allocation.stage < 2 else plan.allocation.steps


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
