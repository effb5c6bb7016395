"""Plans from several profiles of one model, one for each precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..chunks.ranking import merged_by_time
from ..cluster.topology import Topology
from ..plans.ranked_plan import RankedPlan
from ..plans.runnable import NoPlanError
from ..profile.layer_profile import ModelProfile
from .make_plans import make_plans

__all__ = ["plans_of_profiles"]


def plans_of_profiles(
    topology: Topology, profiles: Sequence[tuple[str, ModelProfile]], *, keep: int, **options: Any
) -> list[RankedPlan]:
    """The plans with the shortest predicted iteration over all profiles, best first.

    Args:
        topology: Machines.
        profiles: Name of the file, and profile; of one model in different precisions.
        keep: How many plans to return, at most.
        options: Further arguments of :func:`.make_plans.make_plans`.

    Raises:
        NoPlanError: There is a plan from none of them.
        ValueError: The profiles are not of one model in different precisions, or an argument is not possible.
    """
    (first, model), *others = profiles
    seen = {model.precision: first}
    for name, other in others:
        if other.blocks != model.blocks:
            raise ValueError(f"{first} has {model.blocks} blocks and {name} {other.blocks}; give profiles of one model")
        if other.precision in seen:
            raise ValueError(
                f"{seen[other.precision]} and {name} both have the precision {other.precision}; give one profile for "
                "each precision"
            )
        seen[other.precision] = name
    ranked: list[RankedPlan] = []
    bounds: list[float | None] = []
    problems: list[NoPlanError] = []
    for name, each in profiles:
        try:
            found = make_plans(topology, each, keep=keep, profile_file=name, **options)
        except NoPlanError as problem:
            problems.append(problem)
            continue
        ranked = merged_by_time(ranked, found, keep) if ranked else found
        bounds.append(found[0].plan.bound_seconds)
    if not ranked:
        raise problems[0]
    # What holds for the plans of every profile is the lowest bound.
    lowest = min((bound for bound in bounds if bound is not None), default=None) if None not in bounds else None
    return [replace(each, plan=each.plan.model_copy(update={"bound_seconds": lowest})) for each in ranked]
