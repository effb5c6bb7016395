"""The hybrid plugin's arguments in elastic training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...elastic.config import ElasticConfig
from ...elastic.held_layers import HeldLayers, surviving_topology, with_fewest_moves
from ...planner.cluster.cluster_file import load_cluster
from ...planner.cluster.topology import Topology
from ...planner.cost.plan import Plan
from ...planner.profile.fitted_profiles import on_links
from ...planner.profile.layer_profile import ModelProfile, load_profile
from ..plan_config import PlanConfig
from ..replicas.unequal_replicas import why_not_unequal
from .joining import KnownKinds


def check_elastic(elastic: Any, arguments: Mapping[str, Any]) -> None:
    if not isinstance(elastic, ElasticConfig):
        raise TypeError(f"elastic={elastic!r} is not an ElasticConfig; write ElasticConfig(min_members=...)")
    planning = arguments["planning"]
    if (
        arguments["plan"] != "auto"
        or not isinstance(planning, PlanConfig)
        or None in (planning.cluster, planning.profile)
    ):
        raise ValueError(
            'elastic training makes a plan whenever members come or go; use plan="auto" with '
            "planning=PlanConfig(cluster=..., profile=..., global_batch_size=...)"
        )
    if arguments["pp_size"] is not None:
        raise ValueError(f"pp_size={arguments['pp_size']} is not possible in elastic training; leave it out")
    if arguments.get("zero_stage"):
        raise ValueError(
            f"zero_stage={arguments['zero_stage']} is not possible in elastic training, because a lost member would "
            "take its part of the optimizer's state along; use zero_stage=0"
        )
    reason = why_not_unequal(arguments, arguments["batches"] is not None)
    if reason is not None:
        raise ValueError(f"replicas may differ in elastic training, and then {reason}")


def cluster_of(arguments: Mapping[str, Any]) -> Topology:
    cluster = arguments["planning"].cluster
    return load_cluster(cluster) if isinstance(cluster, str | Path) else cluster


def profile_of(arguments: Mapping[str, Any]) -> ModelProfile:
    profile = arguments["planning"].profile
    profile = load_profile(profile) if isinstance(profile, str | Path) else profile
    return on_links(profile, cluster_of(arguments))


def elastic_planning(
    arguments: Mapping[str, Any], cluster: Topology, known: KnownKinds, nodes: Sequence[str]
) -> PlanConfig:
    planning: PlanConfig = arguments["planning"]
    there = surviving_topology(cluster, nodes)
    profile = known.with_kinds({device.kind.name for device in there.devices})
    return dataclasses.replace(
        planning, cluster=there, profile=profile, layer_sums=True, recompute=False, zero_stages=(0,)
    )


def seated(plan: Plan, topology: Topology, profile: ModelProfile, held: Sequence[HeldLayers | None]) -> Plan:
    """The plan with ranks in those of its places in which the fewest bytes move; see :func:`.with_fewest_moves`."""
    sizes = profile.sizes[0].parameter_bytes
    blocks = [float(size) for size in sizes[profile.before : len(sizes) - profile.after]]
    blocks[0] += sum(sizes[: profile.before])
    blocks[-1] += sum(sizes[len(sizes) - profile.after :])
    return with_fewest_moves(plan, topology, held, blocks)
