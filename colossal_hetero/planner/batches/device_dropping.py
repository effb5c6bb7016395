"""Which devices take part, in which ring, with which batches (ADAPT's data parallelism, chapter 5; ALGORITHMS 2.4).

A device that is dropped gives its samples to the others; that pays where it costs more communication than it saves
compute, above all where it is the only one that does not speak NCCL. The paper's cost of a configuration,
``max_d B_d·S_d + max_d Comm(d, next(d))`` (Eq. 5.3), is the wall time of :mod:`.allocation` here, with the ring's
longest edge as what one synchronization takes: the paper's accumulates no gradients and synchronizes once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from .allocation import Allocation, Share, allocate
from .ring_order import LinkLike, common_protocol, link_seconds, longest_edge, ring_order
from .time_curve import Curve

__all__ = ["AdaptPlan", "AdaptStep", "adapt"]


@dataclass(frozen=True)
class AdaptStep:
    """One configuration that was tried."""

    without: tuple[int, ...]
    """The ranks that it leaves out, beyond those left out before."""
    reason: str
    protocol: str
    cost_seconds: float
    """Per global batch."""
    kept: bool


@dataclass(frozen=True)
class AdaptPlan:
    """The devices that take part, and how."""

    allocation: Allocation
    """Of all ranks: a dropped one has ``runs == ()`` and costs nothing."""
    ring: tuple[int, ...]
    """Ranks in the order in which they pass data on; the last one passes it to the first."""
    dropped: tuple[int, ...]
    protocol: str
    cost_seconds: float
    """Per global batch: the allocation's wall time."""
    steps: tuple[AdaptStep, ...]
    """What was tried, in order; the first is to keep all."""


def adapt(
    curves: Sequence[Curve],
    global_batch_size: int,
    stage: int,
    *,
    links: Iterable[LinkLike],
    protocols: Sequence[Sequence[str]],
    message_bytes: float,
    accumulation: str = "shared",
    redistribution: str = "exact",
    curves_among: Callable[[int], Sequence[Curve]] | None = None,
) -> AdaptPlan:
    """Drop devices as long as that pays.

    Args:
        curves, global_batch_size, stage, accumulation: as for :func:`.allocation.allocate`. A device that holds no
            sample is dropped.
        links: between all pairs of ranks, in each protocol that may be used.
        protocols: by rank, e.g. ``("nccl", "gloo")`` of a GPU and ``("gloo",)`` of a CPU.
        message_bytes: what one device passes to the next in one synchronization.
        redistribution: how the rest is dealt to those who remain: ``exact``, the integers that take the least time,
            or ``adapt``, in proportion to throughput, as the paper does.
        curves_among: the curves of all ranks when that many of them share the sharded state, which leaves less room
            for samples the fewer they are; None is ``curves`` whoever remains.

    Until no drop makes the cost less, or one device remains, it is tried to drop the device with the highest drop
    affinity: the busiest of those that take longer to reach either neighbor in the ring than they compute, then the
    slowest, which is the one with the fewest samples per second, since shares in proportion to speed take equally long.
    The paper tries one of the two. Beyond it, too: all that do not speak NCCL where another does, at once, because with
    two CPUs the first to go does not make NCCL possible.

    Raises:
        ValueError: as ``allocate``; a pair of ranks that remain has no link in their protocol; ranks without a protocol
            in common; not as many protocols as ranks.
    """
    if len(protocols) != len(curves):
        raise ValueError(f"{len(protocols)} protocols for {len(curves)} ranks: give one tuple per rank")
    if redistribution not in ("exact", "adapt"):
        raise ValueError(f"unknown redistribution {redistribution!r}; valid are exact, adapt")
    if not message_bytes >= 0:
        raise ValueError(f"message_bytes={message_bytes} must be at least 0")
    links = tuple(links)

    def among(ranks: tuple[int, ...]) -> Sequence[Curve]:
        return curves if curves_among is None else curves_among(len(ranks))

    def plan(ranks: tuple[int, ...]) -> AdaptPlan:
        own = among(ranks)
        protocol = common_protocol([protocols[rank] for rank in ranks])
        seconds = link_seconds(links, ranks, protocol, message_bytes)
        ring = ring_order(seconds)
        allocation = allocate(
            [own[rank] for rank in ranks],
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
    while able and not _all_hold(among(able), able):
        able = tuple(rank for rank in able if among(able)[rank].max_batch > 0)
    if not able:
        raise ValueError(f"none of {len(curves)} devices holds one sample in stage {stage}; raise it, or free memory")
    current = plan(able)
    unable = current.dropped
    reason = f"holds no sample: {_names(unable)}" if unable else "all devices"
    steps = [AdaptStep(unable, reason, current.protocol, current.cost_seconds, True)]
    pays = True
    while pays:
        pays = False
        for without, reason in _candidates(current, curves, protocols, links, message_bytes):
            rest = tuple(rank for rank in sorted(current.ring) if rank not in without)
            if not _all_hold(among(rest), rest):
                protocol = common_protocol([protocols[rank] for rank in rest])
                steps.append(AdaptStep(without, reason, protocol, math.inf, False))
                continue
            tried = plan(rest)
            pays = tried.cost_seconds < current.cost_seconds
            steps.append(AdaptStep(without, reason, tried.protocol, tried.cost_seconds, pays))
            if pays:
                current = tried
                break
    return replace(current, steps=tuple(steps))


def _all_hold(curves: Sequence[Curve], ranks: Sequence[int]) -> bool:
    """Whether each of the ranks holds a sample."""
    return all(curves[rank].max_batch > 0 for rank in ranks)


def _candidates(
    current: AdaptPlan,
    curves: Sequence[Curve],
    protocols: Sequence[Sequence[str]],
    links: Sequence[LinkLike],
    message_bytes: float,
) -> list[tuple[tuple[int, ...], str]]:
    """What to try to leave out, in order, and why."""
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
    speaks_nccl = [rank for rank in ring if "nccl" in protocols[rank]]
    lacking = tuple(sorted(set(ring) - set(speaks_nccl)))
    if current.protocol != "nccl" and speaks_nccl and lacking not in [without for without, _ in found]:
        found.append((lacking, f"without {_names(lacking)} the others speak nccl instead of {current.protocol}"))
    return found


def _synchronizations(plan: AdaptPlan) -> int:
    """Per global batch."""
    return 1 if plan.allocation.stage < 2 else plan.allocation.steps


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
