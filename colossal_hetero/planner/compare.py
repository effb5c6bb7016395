"""Deal a global batch in one way, and in others for comparison."""

from __future__ import annotations

from functools import partial

from .allocation import allocate
from .batch_profile import BatchProfile
from .batch_report import Candidate, Report

__all__ = ["compare"]


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
        method: one of ``METHODS``; ``adapt`` by throughput alone where the profile has no links.
        accumulation: one of ``ACCUMULATIONS``; ``own`` at stages 0 and 1 only.

    Raises:
        ValueError: as :func:`.allocate`, or a device holds no sample at that stage, or its points make no curve.
    """
    stage = profile.stage if stage is None else stage
    curves = profile.curves(stage, global_batch_size)
    deal = partial(
        allocate,
        curves,
        global_batch_size,
        stage,
        communication_seconds=profile.communication(stage),
        flops=profile.flops,
    )
    lacking = [kind.device for index, kind in enumerate(profile.kinds) if index in profile.ranks and not kind.flops]
    if method == "flops" and lacking:
        raise ValueError(f"method flops needs the FLOP/s of every device; the profile has none for {lacking[0]}")
    chosen = deal(method=method, accumulation=accumulation)
    candidates = []
    for name in ("exact", "uniform", "flops", "adapt"):
        if name == "flops" and lacking:
            candidates.append(Candidate(name, None, f"needs the flops of {lacking[0]}, which the profile lacks"))
            continue
        if name == "adapt" and method != "adapt" and not profile.links:
            continue
        own = chosen if name == method else deal(method=name, accumulation=accumulation)
        candidates.append(Candidate(name, own))
        if name == "exact" and stage < 2:
            other = "own" if accumulation == "shared" else "shared"
            candidates.append(Candidate(name, deal(method=name, accumulation=other)))
    return Report(profile, tuple(curves), chosen, tuple(candidates))
