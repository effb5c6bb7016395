"""A plan compared with Colossal-AI's own order of ranks: the same degrees, with ranks placed as they are launched."""

from __future__ import annotations

from ..cluster.topology import Topology
from ..profile.layer_profile import ModelProfile
from .plan import Plan
from .predict import predict_plan
from .runnable import why_unlike_stages

__all__ = ["compare_with_launch_order"]


def compare_with_launch_order(
    topology: Topology, profile: ModelProfile, plan: Plan, *, overlap: bool = False
) -> str | None:
    """Note on the time in Colossal-AI's own order of ranks, with equal stages and with the plan's stages.

    None if there is nothing to compare: the plan is in that order and has equal stages, leaves devices idle, its
    replicas or the forms of its stages are not alike, it uses ZeRO, or its schedule is not 1F1B.
    """
    if plan.schedule != "1f1b" or plan.zero_stage or why_unlike_stages(plan) is not None:
        return None
    if not plan.symmetric or plan.world_size != len(topology.devices):
        return None
    stages, degree = len(plan.layers_per_stage), plan.tensor_parallel
    groups = [tuple(range(first, first + degree)) for first in range(0, plan.world_size, degree)]
    ranks = [groups[first : first + stages] for first in range(0, len(groups), stages)]
    planned_bounds = (0, *(stage.blocks[1] for stage in plan.replicas[0].stages))
    comparisons: dict[tuple[int, ...], str] = {}
    for name, bounds in (("equal stages", None), ("these stages", planned_bounds)):
        try:
            other = predict_plan(
                topology,
                profile,
                ranks,
                micro_batch=plan.micro_batch,
                global_batch=plan.global_batch,
                bounds=bounds,
                overlap=overlap,
            )
        except ValueError as error:
            return f"with ranks in the order of launch this plan is not possible: {error}"
        if (other.rank_order, other.layers_per_stage) != (plan.rank_order, plan.layers_per_stage):
            comparisons.setdefault(other.layers_per_stage, f"{_in_words(other, plan)} with {name}")
    return f"with ranks in the order of launch: {'; '.join(comparisons.values())}" if comparisons else None


def _in_words(other: Plan, plan: Plan) -> str:
    too_large = next(
        (
            stage
            for replica in other.replicas
            for stage in replica.stages
            if stage.memory_bytes > stage.memory_available_bytes
        ),
        None,
    )
    if too_large is not None:
        used, available = too_large.memory_bytes / 2**30, too_large.memory_available_bytes / 2**30
        return f"too much memory ({used:.1f} GiB of {available:.1f} GiB)"
    ratio = other.iteration_seconds / plan.iteration_seconds
    return (
        f"{other.iteration_seconds:.4g} s ({ratio:.2f} × as long, including {other.synchronization_seconds:.3g} s for "
        "gradients)"
    )
