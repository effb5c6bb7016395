"""Plans for tests, searched or given, plugins that run them, and a console that records what is printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan, Replica, StagePlan
from colossal_hetero.planner.cost.price import price_ranks
from colossal_hetero.planner.cost.ranked_plan import RankedPlan
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search
from tests.support.training import Trained, boost, sgd, tiny_vit

SECONDS = 1.0
"""Planned forward time of a stage; the backward time is twice as long. Stages of a tiny model take less."""


def make_plan(
    rank_order: Sequence[Sequence[Sequence[int]]],
    layers: Sequence[int],
    micro_batch: int = 2,
    micro_batches: int = 4,
    forward_seconds: Sequence[float] | None = None,
    **changes: Any,
) -> Plan:
    """A plan in which stage ``i`` of each replica has ``layers[i]`` layers. ``rank_order``: ranks by replica, stage
    and place in the tensor-parallel group; times are planned ones by stage, backward passes take twice as long as
    forward."""
    bounds = [sum(layers[:stage]) for stage in range(len(layers) + 1)]
    forward = forward_seconds or [SECONDS] * len(layers)
    replicas = tuple(
        Replica(
            stages=tuple(
                StagePlan(
                    blocks=(bounds[stage], bounds[stage + 1]),
                    device="cpu",
                    ranks=tuple(ranks),
                    node="here",
                    forward_seconds=forward[stage],
                    backward_seconds=2 * forward[stage],
                    transfer_seconds=0.0,
                    update_seconds=0.0,
                    memory_bytes=0.0,
                    memory_available_bytes=1e9,
                )
                for stage, ranks in enumerate(replica)
            ),
            micro_batches=micro_batches,
            pipeline_seconds=1.0,
        )
        for replica in rank_order
    )
    fields = dict(
        model="tiny ViT",
        blocks=sum(layers),
        method="exact",
        tensor_parallel=len(rank_order[0][0]),
        micro_batch=micro_batch,
        global_batch=micro_batch * micro_batches * len(replicas),
        replicas=replicas,
        synchronization_seconds=0.0,
        iteration_seconds=1.0,
    )
    return Plan(**(fields | changes))


def make_plans(
    topology: Topology,
    profile: ModelProfile,
    *,
    keep: int = 5,
    compare: bool = False,
    bound_seconds: float = 0.0,
    gap: float | None = None,
    **wishes: Any,
) -> list[RankedPlan]:
    """The best plans; ``wishes`` are fields of :class:`.Problem`. Without recomputation and ZeRO if none says else."""
    simple = {"recompute": False, "zero_stages": (0,)}
    problem = Problem(topology=topology, profile=profile, **(simple | wishes))
    return list(search(problem, keep=keep, compare=compare, bound_seconds=bound_seconds, gap=gap).plans)


def predict_plan(*given: Any, **sizes: Any) -> Plan:
    """The 1F1B plan of equal replicas with given ranks; arguments of :func:`.price_ranks`."""
    return price_ranks(*given, **sizes)


def unequal_plan(*replicas: Plan) -> Plan:
    """The replicas of these plans in one plan; each has ranks of its own, and the same model and micro-batch."""
    return replicas[0].model_copy(
        update={
            "replicas": tuple(replica for plan in replicas for replica in plan.replicas),
            "global_batch": sum(plan.global_batch for plan in replicas),
        }
    )


def planned(plan: Plan | str | Path, **options: Any) -> HeteroHybridParallelPlugin:
    return HeteroHybridParallelPlugin(**(dict(precision="fp32") | options), plan=plan)


def boosted(plan: Plan, seed: int = 0, **options: Any) -> Trained:
    return boost(planned(plan, **options), tiny_vit(depth=plan.blocks, seed=seed), sgd)
