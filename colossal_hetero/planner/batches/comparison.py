"""Deal a global batch in one way, and in others for comparison."""

from __future__ import annotations

from dataclasses import dataclass

from ...io.text import spans
from .allocation import Allocation, allocate
from .batch_profile import PASSES, BatchProfile
from .device_dropping import AdaptPlan, adapt
from .ring_order import common_protocol, link_seconds, longest_edge
from .time_curve import Curve

__all__ = ["Candidate", "Report", "compare"]


@dataclass(frozen=True)
class Candidate:
    """One way of dealing a global batch, for comparison."""

    name: str
    allocation: Allocation | None
    note: str = ""
    """Why there is no allocation, or what is to be known of it."""


@dataclass(frozen=True)
class Report:
    """An allocation and all that is said about it."""

    profile: BatchProfile
    curves: tuple[Curve, ...]
    """By rank, at the stage of ``chosen``."""
    chosen: Allocation
    candidates: tuple[Candidate, ...]
    """``chosen`` among them."""
    adapt: AdaptPlan | None = None
    """How ADAPT came to ``chosen``."""


def compare(
    profile: BatchProfile,
    global_batch_size: int,
    *,
    stage: int | None = None,
    method: str = "exact",
    accumulation: str = "shared",
) -> Report:
    """The allocation by ``method`` beside those by the other methods.

    Args:
        profile: of the devices and the model.
        global_batch_size: samples per optimizer step, in all, ≥ 1.
        stage: of ZeRO; None is the profile's. For another one, memory and communication are predicted.
        method: one of ``METHODS``. ``adapt`` needs links in the profile to leave devices out; without, it deals by
            throughput alone.
        accumulation: one of ``ACCUMULATIONS``; ``own`` at stages 0 and 1 only.

    Raises:
        ValueError: as :func:`.allocation.allocate` and :func:`.device_dropping.adapt`; a device holds no sample at that
            stage (``adapt`` with links leaves it out), or its points make no curve.
    """
    dealing = _Dealing(profile, global_batch_size, profile.stage if stage is None else stage, method)
    plan: AdaptPlan | None = None
    if method == "adapt" and profile.links:
        plan = dealing.adapt(accumulation)
        chosen = plan.allocation
    else:
        chosen = dealing.deal(method, accumulation)

    ways = [("exact", accumulation), ("uniform", accumulation), ("flops", accumulation)]
    if dealing.stage < 2:
        ways.insert(1, ("exact", "own" if accumulation == "shared" else "shared"))
    candidates = [
        Candidate(name, chosen) if (name, own) == (method, accumulation) else dealing.attempt(name, own)
        for name, own in ways
    ]
    if plan is not None:
        candidates.append(Candidate("adapt", chosen, _outcome(plan)))
    elif method == "adapt":
        candidates.append(Candidate("adapt", chosen, "by throughput alone: the profile has no links"))
    elif profile.links:
        candidates.append(dealing.attempt("adapt", accumulation))
    curves = dealing.curves if plan is None else dealing.curves_among(len(plan.ring))
    return Report(profile, tuple(curves), chosen, tuple(candidates), plan)


class _Dealing:
    """What all methods are given."""

    def __init__(self, profile: BatchProfile, global_batch_size: int, stage: int, method: str) -> None:
        self.profile, self.global_batch_size, self.stage = profile, global_batch_size, stage
        may_leave_out = method == "adapt" and bool(profile.links)
        self.curves = profile.curves(stage, global_batch_size, allow_none=may_leave_out)
        self.among: dict[int, list[Curve]] = {}
        self.communication_seconds = profile.communication(stage)
        self.message_bytes = 0.0
        linked = {link.protocol for link in profile.links}
        spoken = [tuple(each for each in kind.protocols if each in linked) for kind in profile.kinds]
        self.protocols = [spoken[kind] for kind in profile.ranks]
        """By rank, those that links were measured for."""
        self.unlinked = ""
        if profile.links:
            try:
                self._measure_by_links()
            except ValueError as error:
                self.unlinked = str(error)

    def _measure_by_links(self) -> None:
        """How much one device passes to the next, such that the ring by rank takes as long as was measured.

        So what the links say of other rings compares with what was measured of this one.
        """
        profile, ranks = self.profile, range(len(self.profile.ranks))
        protocol = common_protocol(self.protocols)
        if self.communication_seconds > 0:
            # Comm = latency + message·(seconds per byte), so an edge reaches that time with this message:
            latency = link_seconds(profile.links, ranks, protocol, 0.0)
            per_byte = link_seconds(profile.links, ranks, protocol, 1.0) - latency
            after = [(rank, (rank + 1) % len(ranks)) for rank in ranks]
            room = [(self.communication_seconds - latency[edge]) / per_byte[edge] for edge in after]
            self.message_bytes = max(min(room), 0.0)
        else:
            share = (len(ranks) - 1) / len(ranks)
            self.message_bytes = PASSES[self.stage] * share * profile.model.gradient_bytes
        seconds = link_seconds(profile.links, ranks, protocol, self.message_bytes)
        self.communication_seconds = longest_edge(seconds, list(ranks))

    def curves_among(self, taking_part: int) -> list[Curve]:
        """By rank, when so many share the state: from stage 1 on, the fewer they are the less room is left."""
        if taking_part not in self.among:
            self.among[taking_part] = self.profile.curves(
                self.stage, self.global_batch_size, taking_part=taking_part, allow_none=True
            )
        return self.among[taking_part]

    def deal(self, method: str, accumulation: str) -> Allocation:
        profile = self.profile
        lacking = [kind.device for index, kind in enumerate(profile.kinds) if index in profile.ranks and not kind.flops]
        if method == "flops" and lacking:
            raise ValueError(f"method flops needs the flops of every device; the profile has none for {lacking[0]}")
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
        if self.unlinked:
            raise ValueError(self.unlinked)
        profile = self.profile
        return adapt(
            self.curves,
            self.global_batch_size,
            self.stage,
            links=profile.links,
            protocols=self.protocols,
            message_bytes=self.message_bytes,
            accumulation=accumulation,
            curves_among=self.curves_among,
        )

    def attempt(self, method: str, accumulation: str) -> Candidate:
        """That way of dealing, or why it cannot be."""
        try:
            if method == "adapt":
                plan = self.adapt(accumulation)
                return Candidate(method, plan.allocation, _outcome(plan))
            return Candidate(method, self.deal(method, accumulation))
        except ValueError as error:
            return Candidate(method, None, str(error))


def _outcome(plan: AdaptPlan) -> str:
    if not plan.dropped:
        return f"all devices, {plan.protocol}"
    return f"without {'rank' if len(plan.dropped) == 1 else 'ranks'} {spans(plan.dropped)}, {plan.protocol}"
