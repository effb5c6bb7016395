"""The plan that all ranks run: rank 0 reads or makes it, and the other ranks receive it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from ...io.text import spans
from ...pipeline_parallel.config import PlanConfig
from ...planner.cluster.cluster_file import load_cluster
from ...planner.cluster.topology import Topology
from ...planner.plans.plan import Plan, load_plan
from ...planner.profile.as_profiled import as_profiled
from ...planner.profile.layer_profile import ModelProfile, load_model_profile

__all__ = ["Agreement", "agree_on_plan", "runnable"]


MAX_CANDIDATES = 64
"""Plans among which one is looked for that can be run: the best may leave devices idle."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks use."""

    plan: Plan
    """With ranks numbered like the devices of the cluster."""
    topology: Topology | None
    """The cluster; None if it was not given."""
    profile: ModelProfile | None
    """The model's layers; None if they were not given."""


def agree_on_plan(
    plan: Plan | str | Path, planning: PlanConfig, tp_size: int | None = None, pp_size: int | None = None
) -> Agreement:
    """Rank 0's plan, which all ranks run, with the cluster and the profile in ``planning`` if they are given.

    Only rank 0 reads files and makes plans, so only rank 0 needs the files. Called by all ranks.

    Raises:
        TypeError: ``plan`` has another type.
        ValueError: on every rank, if rank 0 could not read or make a plan, or if ranks were given different plans.
    """
    if not isinstance(plan, Plan | str | Path):
        raise TypeError(f'plan={plan!r} is neither a Plan, nor the path of a plan file, nor "auto"')
    found: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            found[0] = _find(plan, planning, tp_size, pp_size)
        except Exception as error:
            # Any error: the other ranks wait for rank 0's answer.
            failure, found[1] = error, str(error)
    dist.broadcast_object_list(found)
    agreed, error_text = found
    if error_text is not None:
        raise failure or ValueError(error_text)
    if isinstance(plan, Plan):
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, plan == agreed.plan)
        if not all(others):
            raise ValueError(
                f"ranks {', '.join(str(rank) for rank, same in enumerate(others) if not same)} were given other plans "
                "than rank 0; give all ranks the same plan"
            )
    return agreed


def _find(plan: Plan | str | Path, planning: PlanConfig, tp_size: int | None, pp_size: int | None) -> Agreement:
    topology, profile = planning.cluster, planning.profile
    if isinstance(topology, str | Path):
        topology = load_cluster(topology)
    if isinstance(profile, str | Path):
        profile = load_model_profile(profile)
    if not isinstance(plan, Plan):
        auto = plan == "auto"
        plan = _make(planning, topology, profile, tp_size, pp_size) if auto else load_plan(plan)
    return Agreement(plan, topology, profile)


def _make(
    planning: PlanConfig,
    topology: Topology | None,
    profile: ModelProfile | None,
    tp_size: int | None,
    pp_size: int | None,
) -> Plan:
    """The best plan that can be run here; with these sizes where they are given."""
    from ...planner.report.plan_table import one_line
    from ...planner.search.make_plans import make_plans

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
    candidates = make_plans(
        as_profiled(topology, profile),
        profile,
        global_batch=global_batch,
        micro_batches=planning.micro_batch_sizes,
        tensor_parallel=None if tp_size is None else [tp_size],
        stages=None if pp_size is None else [pp_size],
        method=planning.method,
        symmetric=True,
        keep=MAX_CANDIDATES,
    )
    problems = []
    for candidate in candidates:
        problem = _why_not(candidate.plan, world)
        if problem is None:
            Console(stderr=True).print(one_line(candidate.plan), soft_wrap=True, highlight=False, markup=False)
            return candidate.plan
        problems.append(problem)
    raise ValueError(
        f"none of the {len(problems)} best plans can be run on these {world} ranks; as to the best: {problems[0]}"
    )


def runnable(plan: Plan) -> Plan:
    """``plan`` with ranks as launched, so ordered that rank 0 is in the first replica, and there first in its group.

    Ranks are those that the plan uses, 0 … ``world_size`` − 1 in the order of the cluster file. Colossal-AI lets the
    first replica and the first rank of groups write checkpoints, and rank 0 what belongs to no group; both must be the
    same. Replicas that are cut alike may change places, and so may the ranks of a group.

    Raises:
        ValueError: the plan is for another number of ranks or leaves devices idle, its replicas are not alike, or they
            have fewer micro-batches than stages.
    """
    problem = _why_not(plan, dist.get_world_size())
    if problem is not None:
        raise ValueError(problem)
    replicas = []
    for replica, order in zip(plan.replicas, plan.launched_order, strict=True):
        stages = (
            # False sorts before True, and sorting moves nothing else.
            stage.model_copy(update={"ranks": tuple(sorted(ranks, key=bool))})
            for stage, ranks in zip(replica.stages, order, strict=True)
        )
        replicas.append(replica.model_copy(update={"stages": tuple(stages)}))
    replicas.sort(key=lambda replica: all(0 not in stage.ranks for stage in replica.stages))
    return plan.model_copy(update={"replicas": tuple(replicas)})


def _why_not(plan: Plan, world: int) -> str | None:
    """Why the plugin cannot run ``plan`` on ``world`` ranks; None if it can."""
    if plan.world_size < world:
        used = {rank for replica in plan.rank_order for group in replica for rank in group}
        idle = [rank for rank in range(world) if rank not in used]
        return (
            f"the plan uses {plan.world_size} devices and leaves others idle (rank {spans(idle)}), but {world} ranks "
            f"were started, and each needs a place; start {plan.world_size} on the devices that it uses, or plan for a "
            "cluster file in which all devices are worth using, with --symmetric"
        )
    if plan.world_size > world:
        return (
            f"the plan is for {plan.world_size} ranks, but {world} were started; start {plan.world_size}, or plan for "
            f"{world} devices"
        )
    if not plan.symmetric:
        shapes = "; ".join(
            f"{'+'.join(str(b - a) for a, b in (stage.blocks for stage in replica.stages))} blocks × "
            f"{replica.micro_batches} micro-batches"
            for replica in plan.replicas[:4]
        )
        return (
            f"the plan's {len(plan.replicas)} replicas are not alike ({shapes}{'; …' if len(plan.replicas) > 4 else ''}"
            "), and Colossal-AI sums the gradients of equal stages only; plan with --symmetric"
        )
    stages, micro_batches = len(plan.layers_per_stage), plan.replicas[0].micro_batches
    if stages > 1 and micro_batches < stages:
        return (
            f"the plan has {micro_batches} micro-batches for {stages} stages, and Colossal-AI's 1F1B schedule needs at "
            f"least one per stage; plan with smaller micro-batches or a larger global batch"
        )
    return None
