"""Plans by hand, and training by them, for the tests of the plugin that runs plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.planner.plans.plan import Plan, Replica, StagePlan
from tests.support.training import Trained, boost, sgd, tiny_vit

SECONDS = 1.0
"""Planned forward and backward time of a stage, each; no stage of a tiny model takes that long."""


def make_plan(
    rank_order: Sequence[Sequence[Sequence[int]]],
    layers: Sequence[int],
    micro_batch: int = 2,
    micro_batches: int = 4,
    forward_seconds: Sequence[float] | None = None,
    **changes: Any,
) -> Plan:
    """Replicas alike, with ``layers`` per stage on the ranks in ``rank_order`` ``[replica][stage][place]``."""
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


def planned(plan: Plan | str | Path, **options: Any) -> HeteroHybridParallelPlugin:
    return HeteroHybridParallelPlugin(**(dict(precision="fp32") | options), plan=plan)


def boosted(plan: Plan, seed: int = 0, **options: Any) -> Trained:
    return boost(planned(plan, **options), tiny_vit(depth=plan.blocks, seed=seed), sgd)
