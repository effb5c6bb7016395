"""The plan that all ranks run: rank 0 reads or makes it, and the other ranks receive it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...common.ranks import from_rank_0, of_every_rank
from ...common.text import print_words
from ...elastic.held_layers import layers_by_rank
from ...planner.cluster.cluster_file import load_cluster
from ...planner.cluster.topology import Topology
from ...planner.cost.evaluate import why_other_devices
from ...planner.cost.plan import Plan, load_plan
from ...planner.cost.runnable import NoPlanError, why_not_runnable
from ...planner.profile.fitted_profiles import as_profiled, on_links
from ...planner.profile.layer_profile import ModelProfile, load_profile
from ..plan_config import PlanConfig

SEARCHED = 100  # of so many plans, the fastest with ``min_replicas`` is taken


@dataclass(frozen=True)
class Agreement:
    plan: Plan  # with ranks numbered like the devices of the cluster
    topology: Topology | None  # with the profile's kinds of devices; None if it was not given
    profile: ModelProfile | None  # None if it was not given


def agree_on_plan(plan: Plan | str | Path, planning: PlanConfig, **wishes: int | None) -> Agreement:
    """Rank 0's plan, which all ranks run, with the cluster and the profile in ``planning`` if they are given. Only rank
    0 reads files and makes plans, with the ``wishes`` that :func:`best_plan` takes. Called by all ranks."""
    if not isinstance(plan, Plan | str | Path):
        raise TypeError(f'plan={plan!r} is neither a Plan, nor the path of a plan file, nor "auto"')
    agreed = from_rank_0(lambda: _find(plan, planning, wishes), NoPlanError)
    if isinstance(plan, Plan):
        others = [str(rank) for rank, same in enumerate(of_every_rank(plan == agreed.plan)) if not same]
        if others:
            words = f"ranks {', '.join(others)} were given other plans than rank 0; give all ranks the same plan"
            raise ValueError(words)
    return agreed


def agree_on_next_plan(planning: PlanConfig, tp_size: int | None, micro_batch: int | None) -> Agreement:
    """A plan for the devices that there are now; see :func:`agree_on_plan`."""
    if micro_batch is not None:
        with suppress(NoPlanError):
            return agree_on_plan("auto", replace(planning, micro_batch_sizes=(micro_batch,)), tp_size=tp_size)
    return agree_on_plan("auto", planning, tp_size=tp_size)


def _find(plan: Plan | str | Path, planning: PlanConfig, wishes: dict[str, Any]) -> Agreement:
    topology, profile = planning.cluster, planning.profile
    if isinstance(topology, str | Path):
        topology = load_cluster(topology)
    if isinstance(profile, str | Path):
        profile = load_profile(profile)
    if topology is not None and profile is not None:
        topology, profile = as_profiled(topology, profile), on_links(profile, topology)
        profile = profile.model_copy(update={"rank_devices": ()})  # or speeds that are measured later would be lost
    if not isinstance(plan, Plan):
        plan = _make(planning, topology, profile, wishes) if plan == "auto" else load_plan(plan)
    return Agreement(plan, topology, profile)


def _make(
    planning: PlanConfig, topology: Topology | None, profile: ModelProfile | None, wishes: dict[str, Any]
) -> Plan:
    from ...planner.report.plan_table import one_line

    global_batch = planning.global_batch_size
    if topology is None or profile is None or global_batch is None:
        raise ValueError(
            'plan="auto" needs planning=PlanConfig(cluster=…, profile=…, global_batch_size=…), not '
            f"cluster={planning.cluster!r}, profile={planning.profile!r}, global_batch_size={global_batch!r}"
        )
    world = dist.get_world_size()
    if len(topology.devices) != world:
        raise ValueError(
            f"the cluster has {len(topology.devices)} devices, but {world} ranks were started; start one rank per "
            "device, in the order of the cluster file, or describe the devices that are in use"
        )
    plan = best_plan(planning, topology, profile, **wishes)
    print_words(one_line(plan))
    return plan


def best_plan(
    planning: PlanConfig,
    topology: Topology,
    profile: ModelProfile,
    tp_size: int | None = None,
    pp_size: int | None = None,
    unequal: bool = True,
    all_devices: bool = True,
) -> Plan:
    from ...planner.solver.problem import Problem
    from ...planner.solver.search import search

    assert planning.global_batch_size is not None
    problem = Problem(
        topology=topology,
        profile=profile,
        global_batch=planning.global_batch_size,
        micro_batches=planning.micro_batch_sizes,
        tensor_parallel=None if tp_size is None else [tp_size],
        stages=None if pp_size is None else [pp_size],
        schedules=planning.schedules,
        model_chunks=planning.model_chunks,
        method=planning.method,
        unequal=unequal and planning.unequal,
        all_devices=all_devices,
        recompute=planning.recompute,
        zero_stages=planning.zero_stages,
    )
    ranked = search(problem, keep=1 if planning.min_replicas == 1 else SEARCHED).plans
    enough = (each.plan for each in ranked if len(each.plan.replicas) >= planning.min_replicas)
    return next(enough, ranked[0].plan)


def launched_topology(agreed: Agreement) -> Topology | None:
    """The machines with only the devices that the plan uses, numbered like the ranks of :func:`as_launched`."""
    topology, used = agreed.topology, layers_by_rank(agreed.plan).keys()
    if topology is None:
        return None
    if max(used) >= len(topology.devices):
        raise ValueError(
            f"the plan has device {max(used)}, but the cluster has devices 0 to {len(topology.devices) - 1}; "
            "give the cluster that the plan was made for"
        )
    problem = None if agreed.profile is None else why_other_devices(topology, agreed.plan)
    if problem is not None:
        raise ValueError(f"{problem}; give the cluster and the profile that the plan was made with")
    return topology.of_devices(used)


def as_launched(plan: Plan) -> Plan:
    """``plan`` with ranks 0 … ``world_size`` − 1 for the devices that it uses, in the order of the cluster file, but
    rank 0 in the first replica and first in its group. In Colossal-AI the first replica and the first rank of each
    group write checkpoints, and rank 0 what belongs to no group; these must be the same rank. So replicas with the same
    stages may change places, and so may the ranks of a group."""
    problem = why_not_runnable(plan, dist.get_world_size())
    if problem is not None:
        raise ValueError(problem)
    replicas = []
    for replica, order in zip(plan.replicas, plan.launched_order, strict=True):
        # Sorting by bool moves rank 0 to the front and keeps the order of all others.
        stages = (
            stage.model_copy(update={"ranks": tuple(sorted(ranks, key=bool))})
            for stage, ranks in zip(replica.stages, order, strict=True)
        )
        replicas.append(replica.model_copy(update={"stages": tuple(stages)}))
    replicas.sort(key=lambda replica: all(0 not in stage.ranks for stage in replica.stages))
    return plan.model_copy(update={"replicas": tuple(replicas)})
