"""Training iterations in which the host's waits for the device are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (prepares Colossal-AI for a CPU)

# isort: split
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin

from benchmarks.in_process import shard_in_process
from colossal_hetero import BalanceConfig, HeteroHybridParallelPlugin, Pruning
from colossal_hetero.balance.apply import Applier
from colossal_hetero.layers import TimmViTPolicy
from colossal_hetero.testing import Stragglers, inject_stragglers

from .host_waits import HostWait, host_waits
from .vit_shard import VitShard

__all__ = ["RULES", "CountedIterations", "waits_by_rule", "waits_of_plugins"]

RULES = ("random", "priority", "priority-diff", "norm-product")
INTERVAL = 4
"""Iterations between two updates of priorities."""

SLOWDOWN = 4.0
TRANSPORT = "layers/transport.py"


@dataclass
class CountedIterations:
    """What happened in the iterations of one rank."""

    iterations: int
    waits: list[HostWait]
    changes: int = 0
    """How often the plan, or the pruned share, changed."""
    measured: int = 0
    """Iterations whose times the clock has read."""

    def places(self, is_transport: bool) -> Counter[str]:
        """How often the host waited, by place: those that the transport leads to, or all others."""
        return Counter(wait.place for wait in self.waits if wait.is_in(TRANSPORT) == is_transport)


def waits_of_plugins(
    device: torch.device,
    configs: Mapping[str, dict[str, Any] | None],
    shard: VitShard,
    images: int,
    precision: str,
    iterations: int,
    period: int,
) -> dict[str, CountedIterations]:
    """Train a model with each plugin on two ranks, one of which is slow; runs on every rank.

    Args:
        device: the rank's.
        configs: arguments of ``BalanceConfig`` by name; None: Colossal-AI's own plugin, without a slow rank.
        shard: the whole model.
        images: the batch.
        precision: of the plugin.
        iterations: that are counted.
        period: after so many iterations the other rank is slow.
    """
    return {
        name: _train(device, choices, shard, images, precision, iterations, period) for name, choices in configs.items()
    }


def _train(
    device: torch.device,
    choices: dict[str, Any] | None,
    shard: VitShard,
    images: int,
    precision: str,
    iterations: int,
    period: int,
) -> CountedIterations:
    arguments: dict[str, Any] = {"tp_size": 2, "pp_size": 1, "precision": precision}
    plugin: Any
    if choices is None:
        plugin = HybridParallelPlugin(custom_policy=TimmViTPolicy(), **arguments)
    else:
        config = BalanceConfig(warmup_iterations=1, patience=1, measure_costs=False, **choices)
        if config.rules.priority in ("priority", "priority-diff"):
            config = replace(config, pruning=replace(config.rules, priority_interval=INTERVAL))
        plugin = HeteroHybridParallelPlugin(balance=config, **arguments)
    torch.manual_seed(0)
    whole = shard.build(device, torch.float32)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(whole, torch.optim.SGD(whole.parameters(), lr=1e-3, momentum=0.9))
    if choices is not None:
        slow = Stragglers(slowdowns={1: SLOWDOWN}, schedule="round-robin")
        inject_stragglers(model, optimizer, slow, period)
    x, labels = shard.batch(images, device, torch.float32)
    balancer = getattr(plugin, "balancer", None)
    plan = None
    found = CountedIterations(iterations, [])

    def iterate() -> None:
        nonlocal plan
        booster.backward(F.cross_entropy(model(x).float(), labels), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if balancer is not None:
            found.changes += plan is not None and balancer.plan != plan
            plan = balancer.plan

    # The first iteration sets up memory and connections.
    iterate()
    with host_waits(device) as found.waits:
        for _ in range(iterations):
            iterate()
    if balancer is not None:
        found.measured = len(balancer.collect() or ())
    return found


def waits_by_rule(
    device: torch.device, shard: VitShard, images: int, dtype: torch.dtype, iterations: int
) -> dict[str, CountedIterations]:
    """Train with the layers of four ranks in this process, one of which prunes columns, by each of :data:`RULES`."""
    found = {}
    for rule in RULES:
        model = shard.build(device, dtype)
        pruning = shard_in_process(model, 4)[-1]
        config = BalanceConfig(mode="resize", pruning=Pruning(resizing="column", priority=rule))  # type: ignore[arg-type]
        applier = Applier(pruning, [], config, INTERVAL)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x, labels = shard.batch(images, device, dtype)
        with host_waits(device) as waits:
            for number in range(iterations):
                if number % 6 == 0:
                    applier.prune((0.5, 0.25, 0.0)[number // 6 % 3])
                F.cross_entropy(model(x).float(), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                applier.end_iteration()
        found[rule] = CountedIterations(iterations, waits, changes=-(-iterations // 6))
    return found
