"""What a plan's degrees of parallelism would take if ranks were laid out as they are launched."""

from __future__ import annotations

from ..cluster.topology import Topology
from ..layout.layout import naive_layout
from ..profile.layer_profile import ModelProfile
from .plan import Plan
from .predict import priced_plan

__all__ = ["as_launched"]


def as_launched(topology: Topology, profile: ModelProfile, plan: Plan) -> str | None:
    """What Colossal-AI's own order of ranks would take: with equal stages, and with those of ``plan``; in words.

    None if there is nothing to compare: the plan is in that order with equal stages, leaves devices out, or its
    replicas are not alike.
    """
    degrees = (plan.tensor_parallel, len(plan.layers_per_stage), len(plan.replicas))
    if not plan.symmetric or plan.world_size != len(topology.devices):
        return None
    ranks = naive_layout(topology, *degrees).ranks
    bounds = (0, *(stage.blocks[1] for stage in plan.replicas[0].stages))
    told: dict[tuple[int, ...], str] = {}
    for name, cut in (("equal stages", None), ("these stages", bounds)):
        try:
            other = priced_plan(
                topology, profile, ranks, micro_batch=plan.micro_batch, global_batch=plan.global_batch, bounds=cut
            )
        except ValueError as error:
            return f"ranks as they are launched could not be laid out like this: {error}"
        if (other.rank_order, other.layers_per_stage) != (plan.rank_order, plan.layers_per_stage):
            told.setdefault(other.layers_per_stage, f"{_in_words(other, plan)} with {name}")
    return f"with ranks as they are launched: {'; '.join(told.values())}" if told else None


def _in_words(other: Plan, plan: Plan) -> str:
    full = next(
        (
            stage
            for replica in other.replicas
            for stage in replica.stages
            if stage.memory_bytes > stage.memory_available_bytes
        ),
        None,
    )
    if full is not None:
        used, available = full.memory_bytes / 2**30, full.memory_available_bytes / 2**30
        return f"too much for memory ({used:.1f} of {available:.1f} GiB)"
    ratio = other.iteration_seconds / plan.iteration_seconds
    return (
        f"{other.iteration_seconds:.4g} s ({ratio:.2f} × as long, of it {other.synchronization_seconds:.3g} s for "
        "gradients)"
    )
