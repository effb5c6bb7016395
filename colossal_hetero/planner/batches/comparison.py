"""Comparison of all methods that divide a global batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...common.text import spans
from .adapt import AdaptPlan, RingNetwork, adapt, ring_cost
from .allocation import Allocation, allocate
from .batch_profile import BatchProfile
from .time_curve import Curve

__all__ = ["MAX_GLOBAL_BATCH", "BatchComparison", "MethodResult", "compare"]

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
