"""Layers that move between ranks while training: exact against one process, both ways, with every stage slowed."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import nn
from torch.optim import Optimizer

from colossal_hetero import HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.plugin.hybrid import drift
from colossal_hetero.plugin.hybrid.drift import PassSeconds
from tests.support.checks import Checks
from tests.support.layer_profiles import layer_times

checks = Checks()

MICRO_BATCH, MICRO_BATCHES, BLOCKS = 2, 4, 8
BLOCK_SECONDS = 0.1  # planned, a third of it forward


def cluster(devices: int) -> Topology:
    memory, network = Channel("shared memory", 1e10, 1e-6), Channel("Ethernet", 1e10, 1e-6)
    kind = DeviceKind("cpu", 10**12, 1e9)
    nodes = tuple(Node(f"n{number}", 0, (number,), memory, (network,)) for number in range(devices))
    return Topology(tuple(Device(kind, number, 0) for number in range(devices)), nodes, ("here",))


def profile(blocks: int = BLOCKS) -> ModelProfile:
    sizes = LayerSizes(
        parameter_bytes=(0, *(1000,) * blocks, 0),
        activation_bytes=(1000,) * (blocks + 2),
        output_bytes=(1000,) * (blocks + 1) + (0,),
    )
    seconds = (0.0, *(BLOCK_SECONDS / 3,) * blocks, 0.0)
    return ModelProfile(name="model", times=(layer_times("cpu", seconds, micro_batch=MICRO_BATCH),), sizes=(sizes,))


class Slow:
    """A clock that shows what stages take whose ranks are ``factors`` times slower than planned."""

    factors: dict[int, float] = {}
    plugin: Any = None

    def __init__(self, schedule: Any) -> None: ...

    def end_iteration(self, counts: bool = True) -> None: ...

    def read(self) -> PassSeconds:
        rank = dist.get_rank()
        blocks = next(
            stage.blocks[1] - stage.blocks[0]
            for replica in Slow.plugin.plan.replicas
            for stage in replica.stages
            if rank in stage.ranks
        )
        seconds = BLOCK_SECONDS * blocks * Slow.factors.get(rank, 1.0)
        return PassSeconds(seconds / 3, seconds * 2 / 3)


@checks.on(2)
def vit() -> None:
    from tests.support.planned_runs import images_and_labels
    from tests.support.training import adamw, by_labels, loss_of, tiny_vit

    samples = MICRO_BATCH * MICRO_BATCHES
    alone = tiny_vit(depth=BLOCKS).double()
    optimizer = adamw(alone)
    batches = [images_and_labels(number, samples) for number in range(60)]
    expected = []
    for images, labels in batches:
        loss = loss_of(alone(images.double()).double(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    with patch.object(drift, "StageClock", Slow):
        planning = PlanConfig(cluster=cluster(2), profile=profile(), global_batch_size=samples)
        plugin = HeteroHybridParallelPlugin(precision="fp32", pp_size=2, plan="auto", planning=planning)
        Slow.plugin = plugin
        booster = Booster(plugin=plugin)
        model = tiny_vit(depth=BLOCKS).double()
        model, optimizer, *_ = booster.boost(model, adamw(model), loss_of)
        losses, splits = [], []
        for number, (images, labels) in enumerate(batches):
            Slow.factors = {} if not 10 <= number < 30 else {1: 3.0}
            result = booster.execute_pipeline(iter([(images.double(), labels)]), model, by_labels, optimizer, return_loss=True)
            optimizer.step()
            optimizer.zero_grad()
            splits.append(plugin.plan.layers_per_stage)
            if result["loss"] is not None:
                losses.append(result["loss"].item())
        print(dist.get_rank(), splits, [c.step for c in plugin.plan_changes])
        if losses:
            print(max(abs(a - b) for a, b in zip(losses, expected)))


test_live = checks.test()
