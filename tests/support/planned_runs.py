"""Training with plans, of equal or unequal replicas, in a pipeline or without one, and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
from colossalai.pipeline import p2p
from torch import Tensor

from colossal_hetero.planner.cost.pass_order import GraphSeconds, zero_bubble_nodes
from tests.support.training import loss_of, make_step, mean_over_replicas, pipeline_step, sgd, tiny_vit
from tests.support.training import train_alone as train_model_alone

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
