"""Plans in elastic training: from the plugin's arguments and the members that are there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...common.ranks import of_every_rank
from ...common.text import count, say
from ...elastic.config import ElasticConfig
from ...elastic.held_layers import HeldLayers, surviving_topology, with_fewest_moves
from ...planner.cluster.cluster_file import load_cluster
from ...planner.cluster.topology import Topology
from ...planner.cost.plan import Plan
from ...planner.profile.fitted_profiles import on_links
from ...planner.profile.layer_costs import LayerCosts
from ...planner.profile.layer_profile import ModelProfile, load_profile
from ..plan_config import PlanConfig
from ..replicas.unequal_replicas import why_not_unequal
from ..training_objects import check_option
from .members import SECONDS_PER_LOOK, Members

SHARD_COPIES = 2  # ranks that hold each shard of an optimizer's state


class TooFewNodes(Exception):
    """No plan fits the members that are there, and nobody came within the limit."""


class WaitForNodes:
    """Time that this member has been waiting for nodes. If no plan fits the members that are there, they stay in their
    world, and keep what they hold. When a process waits to join, or a member leaves, all form the next world and plan
    again."""

    def __init__(self, members: Members, limit_seconds: float) -> None:
        self._members, self._limit = members, limit_seconds
        self._since: float | None = None

    def end(self) -> None:
        self._since = None

    def wait(self, problem: str) -> None:
        """Wait until a process waits to join, or a member leaves. All ranks call it."""
        self._since = time.monotonic() if self._since is None else self._since
        waited = time.monotonic() - self._since
        there = count(dist.get_world_size(), "member")
        if dist.get_rank() == 0:
            left = max(self._limit - waited, 0.0)
            say(f"there is no plan for {there}; waiting up to {left:.0f} s for more nodes: {problem}")
        while True:
            comes = dist.get_rank() == 0 and self._members.is_somebody_waiting()
            waited = time.monotonic() - self._since
            words_of_all = of_every_rank((comes, self._members.is_leaving(), waited))
            if any(comes or leaves for comes, leaves, _ in words_of_all):
                return
            if max(waited for *_, waited in words_of_all) > self._limit:
                raise TooFewNodes(
                    f"{there}, and no more came within {self._limit:g} s: {problem}. Start more nodes, and then the "
                    "job again from its latest checkpoint"
                )
            time.sleep(SECONDS_PER_LOOK)


def check_elastic(elastic: Any, arguments: Mapping[str, Any]) -> None:
    check_option("elastic", elastic, ElasticConfig, "min_members=...")
    planning, is_auto = arguments["planning"], arguments["plan"] == "auto"
    if not is_auto or not isinstance(planning, PlanConfig) or None in (planning.cluster, planning.profile):
        raise ValueError(
            'elastic training makes a plan whenever members come or go; use plan="auto" with '
            "planning=PlanConfig(cluster=..., profile=..., global_batch_size=...)"
        )
    if arguments["pp_size"] is not None:
        raise ValueError(f"pp_size={arguments['pp_size']} is not possible in elastic training; leave it out")
    reason = why_not_unequal(arguments, arguments["batches"] is not None)
    if reason is not None:
        raise ValueError(f"replicas may differ in elastic training, and then {reason}")


def cluster_of(arguments: Mapping[str, Any]) -> Topology:
    cluster = arguments["planning"].cluster
    return load_cluster(cluster) if isinstance(cluster, str | Path) else cluster


def profile_of(arguments: Mapping[str, Any], own_kind: str) -> ModelProfile:
    """The profile, which must have the kind of this process's device."""
    profile = arguments["planning"].profile
    profile = load_profile(profile) if isinstance(profile, str | Path) else profile
    if own_kind not in profile.devices:
        raise ValueError(
            f"the profile of {profile.name} has no times of {own_kind}, the device of this process; it has those of "
            f"{', '.join(profile.devices)}. Measure all kinds of the cluster file before the job starts"
        )
    return on_links(profile, cluster_of(arguments))


def elastic_planning(
    arguments: Mapping[str, Any], cluster: Topology, profile: ModelProfile, nodes: Sequence[str]
) -> PlanConfig:
    there = surviving_topology(cluster, nodes)
    changes: dict[str, Any] = dict(layer_sums=True, recompute=False, zero_stages=(0,))
    if arguments.get("zero_stage"):
        profile, changes["zero_stages"] = with_copied_shards(profile), (0, 1)
    return dataclasses.replace(arguments["planning"], cluster=there, profile=profile, **changes)


class _CopiedShards(ModelProfile):
    """A profile whose optimizer states have each shard twice; see [Note: copies of shards]."""

    def costs(self, *args: Any, zero_shards: int = 1, **kwargs: Any) -> LayerCosts:
        return super().costs(*args, zero_shards=max(zero_shards // SHARD_COPIES, 1), **kwargs)


def with_copied_shards(profile: ModelProfile) -> ModelProfile:
    """The profile with the memory of ZeRO in elastic training, which is on also where a plan is in stage 0, with all
    shards on each rank."""
    if profile.precision == "fp32" and not profile.master_copies:
        profile = profile.model_copy(update=dict(state_factor=profile.state_factor + 1, master_copies=True))
    return _CopiedShards.model_construct(**dict(profile))


def seated(plan: Plan, topology: Topology, profile: ModelProfile, held: Sequence[HeldLayers | None]) -> Plan:
    """The plan with ranks in those of its places in which the fewest bytes move; see :func:`.with_fewest_moves`."""
    sizes = profile.sizes[0].parameter_bytes
    blocks = [float(size) for size in sizes[profile.before : len(sizes) - profile.after]]
    blocks[0] += sum(sizes[: profile.before])
    blocks[-1] += sum(sizes[len(sizes) - profile.after :])
    return with_fewest_moves(plan, topology, held, blocks)
