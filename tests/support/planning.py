"""Plans for tests, searched or given, plugins that run them, training with them, and the same in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from colossalai.pipeline import p2p
from torch import Tensor

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.pass_order import GraphSeconds, zero_bubble_nodes
from colossal_hetero.planner.cost.plan import Plan, Replica, StagePlan
from colossal_hetero.planner.cost.price import price_ranks
from colossal_hetero.planner.cost.ranked_plan import RankedPlan
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search
from tests.support.training import Trained, boost, loss_of, make_step, mean_over_replicas, pipeline_step, sgd, tiny_vit
from tests.support.training import train_alone as train_model_alone

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


# Training -------------------------------------------------------------------------------------------------------------

ITERATIONS = 3
MICRO_BATCH, MICRO_BATCHES = 2, 4
GRAPH = GraphSeconds(forward=1.0, input_gradient=1.0, weight_gradient=1.0, transfer=1.0)
ZERO_BUBBLE = dict(
    pp_style="zbv", num_model_chunks=2, num_microbatches=6, scheduler_nodes=zero_bubble_nodes(2, 6, GRAPH)
)
"""Arguments of the plugin for a schedule of two stages."""


def images_and_labels(number: int, size: int) -> tuple[Tensor, Tensor]:
    """A global batch: images ``[size, 3, 8, 8]`` and labels ``[size]``."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(7, (size,), generator=generator)


def train_alone(depth: int, global_batch: int, iterations: int = ITERATIONS) -> tuple[list[float], dict[str, Tensor]]:
    model = tiny_vit(depth=depth)
    batches = [images_and_labels(iteration, global_batch) for iteration in range(iterations)]
    return train_model_alone(model, sgd(model), batches), model.state_dict()


def share(plugin: Any) -> slice:
    """The samples of this rank's replica in a global batch of its plan."""
    counts = [replica.micro_batches * plugin.plan.micro_batch for replica in plugin.plan.replicas]
    index = plugin.replica()[0]
    return slice(sum(counts[:index]), sum(counts[: index + 1]))


def train_planned(run: Any, iterations: int = ITERATIONS, first: int = 0) -> list[float]:
    """Train on this replica's shares of global batches. Returns the losses of these on every rank."""
    plugin, mine, losses = run.plugin, share(run.plugin), []
    for number in range(first, first + iterations):
        images, labels = (part[mine] for part in images_and_labels(number, plugin.plan.global_batch))
        if plugin.pp_size > 1 or not plugin.plan.symmetric:
            own = pipeline_step(run, iter([(images, labels)]))
            assert p2p.dist.batch_isend_irecv.__self__.kept == 0  # no message is kept for longer than a step
        else:
            loss = loss_of(run.model(images), labels)
            make_step(run.optimizer, loss)
            own = loss.item()
        losses.append(mean_over_replicas(own, len(labels)))
    return losses
