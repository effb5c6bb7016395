"""Training iterations on a GPU: where the host waits for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.in_process import shard_in_process

# isort: split
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin

from colossal_hetero import BalanceConfig, HeteroHybridParallelPlugin, Pruning
from colossal_hetero.balance.apply import Applier
from colossal_hetero.layers import TimmViTPolicy
from colossal_hetero.planner.profile.estimate import VitSizes
from colossal_hetero.testing import Stragglers, inject_stragglers

from ..part import Case, Machine, Part, Row
from ..ranks import run_ranks
from ..training.host_waits import HostWait, host_waits
from ..training.vit_shard import TINY, VitShard

ABOUT = """
*Hidden waits.* Training iterations of four blocks of ViT-1B under `torch.cuda.set_sync_debug_mode("warn")`, which
reports operations and copies that make the host wait for the GPU; the aim is none. Two ranks form a tensor-parallel
group. A slow rank repeats its products four times; after every six iterations the other one is slow, so that the
balancer judges, changes its plan, and reads its clocks. The first iteration, which sets up memory and connections, is
left out. Ranks that share one GPU send messages through the host; the waits of the transport for that are listed in the
note and do not count. *In one process*, the layers of four ranks run in turn, and one rank prunes columns with changing
ratios; nothing is sent. Colossal-AI's own plugin is the control.
"""

COLUMNS: dict[str, Any] = {"mode": "resize", "pruning": Pruning(resizing="column")}
CONFIGS: Mapping[str, Mapping[str, dict[str, Any] | None]] = {
    "nothing changed": {"Colossal-AI's plugin": None, "off": {"mode": "off"}},
    "resizing": {
        "units": {"mode": "resize"},
        "units by priority": {"mode": "resize", "pruning": Pruning(priority="priority")},
        "columns": COLUMNS,
        "columns by priority-diff": COLUMNS | {"pruning": Pruning(resizing="column", priority="priority-diff")},
    },
    "migrating": {
        "migrate units": {"mode": "migrate"},
        "migrate columns": {"mode": "migrate", "migration": "broadcast-reduce"},
        "auto": {"mode": "auto"},
    },
    "both": {
        "semi": {"mode": "semi"},
        "semi, columns": {"mode": "semi", "migration": "scatter-gather"},
        "auto, prunes up to 0.3": {"mode": "auto", "max_resize": 0.3},
    },
}

TINY_CONFIGS: Mapping[str, Mapping[str, dict[str, Any] | None]] = {
    "some modes": {
        "Colossal-AI's plugin": None,
        "columns by priority-diff": COLUMNS | {"pruning": Pruning(resizing="column", priority="priority-diff")},
        "semi": {"mode": "semi"},
    }
}

FOUR_BLOCKS = VitSizes(hidden=2048, depth=4, heads=32, patch=4)

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


def cases(machine: Machine) -> Sequence[Case]:
    found = [
        Case(f"hidden waits, {name}", partial(_waits_of_plugins, machine, configs), memory_bytes=16 << 30)
        for name, configs in (TINY_CONFIGS if machine.is_tiny else CONFIGS).items()
    ]
    found.append(Case("hidden waits, in one process", partial(_waits_by_rule, machine), memory_bytes=8 << 30))
    return found


def _waits_of_plugins(machine: Machine, configs: Mapping[str, dict[str, Any] | None]) -> list[Row]:
    shard = VitShard(TINY if machine.is_tiny else FOUR_BLOCKS, 1)
    sizes = (4, "fp32", 6, 3) if machine.is_tiny else (32, "bf16", 24, 6)
    ranks = run_ranks(machine, 2, waits_of_plugins, configs, shard, *sizes)
    # Only ranks that share a GPU, or the CPU, send messages through the host.
    through_host = machine.gpus < 2
    return [_row(name, [found[name] for found in ranks], through_host) for name in configs]


def _waits_by_rule(machine: Machine) -> list[Row]:
    shard = VitShard(TINY if machine.is_tiny else FOUR_BLOCKS, 1)
    sizes = (4, torch.float32, 7) if machine.is_tiny else (64, torch.bfloat16, 36)
    found = waits_by_rule(machine.device, shard, *sizes)
    return [_row(f"columns by {rule}", [counted], False) for rule, counted in found.items()]


def _row(name: str, ranks: Sequence[CountedIterations], through_host: bool) -> Row:
    """The largest number of hidden waits of a rank, and what else happened."""
    hidden = [found.places(is_transport=False) for found in ranks]
    sending = [found.places(is_transport=True) for found in ranks]
    if not through_host:
        hidden = [one + other for one, other in zip(hidden, sending, strict=True)]
    first = ranks[0]
    words = [f"{first.iterations} iterations", f"{first.changes} changes of plan", f"{first.measured} measured"]
    if through_host:
        words.append(f"{max(map(Counter.total, sending))} waits of the transport")
    words += _places(hidden)
    return name, max(map(Counter.total, hidden)), 0, "; ".join(words)


def _places(counts: Iterable[Counter[str]]) -> list[str]:
    most = sum(counts, Counter[str]()).most_common(5)
    return [f"{place} × {count}" for place, count in most]


PART = Part("sync", ABOUT, ("case", "what", "measured", "aim ≤", "note"), cases)
