"""Divide a global batch with one method, and with the others for comparison."""

from __future__ import annotations

from dataclasses import dataclass

from ...io.text import spans
from .allocation import Allocation, allocate
from .batch_profile import PASSES, BatchProfile
from .device_dropping import AdaptPlan, adapt
from .ring_order import common_protocol, link_seconds, longest_edge
from .time_curve import Curve

__all__ = ["MAX_GLOBAL_BATCH", "BatchComparison", "MethodResult", "compare"]

MAX_GLOBAL_BATCH = 2**20
"""Largest global batch, in samples, that is divided here. The exact search needs memory in proportion to it: about 60
bytes per sample."""
MAX_SIZES = 2**22
"""Largest number of micro-batch sizes, over all kinds of device, whose times are computed."""


@dataclass(frozen=True)
class MethodResult:
    """The division that one method finds."""

    name: str
    """Name of the method."""
    allocation: Allocation | None
    """None if the method cannot divide this global batch."""
    note: str = ""
    """Why there is no allocation, or a remark about it."""


@dataclass(frozen=True)
class BatchComparison:
    """The division by the chosen method, beside those by the other methods."""

    profile: BatchProfile
    """The profile that it was made from."""
    curves: tuple[Curve, ...]
    """Time curve of each rank at the stage of ``chosen``, by rank."""
    chosen: Allocation
    """The division by the chosen method."""
    results: tuple[MethodResult, ...]
    """Results of all methods, including ``chosen``."""
    adapt: AdaptPlan | None = None
    """How ADAPT found ``chosen``; None for another method, or without links."""


def compare(
    profile: BatchProfile,
    global_batch_size: int,
    *,
    stage: int | None = None,
    method: str = "exact",
    accumulation: str = "shared",
) -> BatchComparison:
    """Divide a global batch by ``method``, and by the other methods for comparison.

    Args:
        profile: profile of the devices and the model.
        global_batch_size: samples per optimizer step over all ranks, 1 to :data:`MAX_GLOBAL_BATCH`.
        stage: stage of ZeRO; None is the profile's. For another one, memory and communication are predicted.
        method: one of ``METHODS``. If the profile has no links, ``adapt`` drops no devices and divides in proportion to
            throughput.
        accumulation: one of ``ACCUMULATIONS``; ``per_rank`` at stages 0 and 1 only.

    Raises:
        ValueError: as :func:`.allocation.allocate` and :func:`.device_dropping.adapt`; a device holds no sample at that
            stage (``adapt`` with links drops it), no curve fits its points, or the global batch or the number of
            sizes of micro-batches is too large to compute with.
    """
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
    """The inputs that all methods share."""

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
        """Set the message size such that the ring in rank order takes the measured time of a synchronization.

        The times of other rings, computed from links, are then comparable with the measured time of this one.
        """
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
        """The curves of all ranks if the state is sharded over that many ranks; fewer ranks leave less memory."""
        if sharing_ranks not in self._curves_by_count:
            self._curves_by_count[sharing_ranks] = self.profile.curves(
                self.stage, self.global_batch_size, sharing_ranks=sharing_ranks, allow_empty=True
            )
        return self._curves_by_count[sharing_ranks]

    def allocate(self, method: str, accumulation: str) -> Allocation:
        """The division by ``method`` over all ranks."""
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
        """The plan of ADAPT, which may drop devices."""
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
        """The result of ``method``; if it raises ``ValueError``, without an allocation and with the message."""
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
