"""The balancer: once per iteration it measures, asks whether anyone's speed moved, and if so decides and applies.

An iteration runs from the first training forward after an optimizer step to the end of the next optimizer step;
loading data, evaluating and saving in between do not count. At the end of iteration *i* every rank

1. reads its clock and scales the times to equal work,
2. reads the group's answer to the flag of iteration *i − 1*: if any rank's speed had moved, all gather their times,
   decide the same plan from the same numbers, and apply it from iteration *i + 1* on,
3. posts its own flag of iteration *i*, without waiting.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from ..layers.linear import HeteroLinear, hetero_layers
from .apply import Resizer
from .clock import IterationClock, IterationTimes
from .config import BalanceConfig
from .decide import Plan, decide
from .exchange import Exchange, make_exchanges
from .records import IterationRecord, LocalRecord, merge_records
from .speed import EqualWork, SpeedWatch
from .timeline import RankSegments, SampledIterations, Timelines, TimelineSampler, choose_timelines

__all__ = ["Balancer", "attach_balancer"]

MAX_RECORDS = 100_000
"""Iterations kept for :meth:`Balancer.collect`; older ones are dropped."""


class Balancer:
    """Balances one rank's tensor-parallel layers against those of its group."""

    def __init__(
        self,
        layers: Mapping[str, HeteroLinear],
        config: BalanceConfig,
        clock: IterationClock,
        exchange: Exchange,
        world: dist.ProcessGroup,
        tp_groups: list[list[int]],
        rank_in_group: int,
        iterations_per_interval: int,
    ) -> None:
        self.config = config
        self._layers = layers
        self._clock = clock
        self._exchange = exchange
        self._world = world
        self._tp_groups = tp_groups
        self._rank = rank_in_group
        self._plan = Plan.idle(exchange.size)
        self._resizer = Resizer(layers, config, iterations_per_interval)
        self._equal_work = EqualWork(config.patience)
        self._watch = SpeedWatch(config)
        self._records: deque[LocalRecord] = deque(maxlen=MAX_RECORDS)
        self._best_seconds = math.inf
        self._timelines = TimelineSampler(config.warmup_iterations, config.patience)
        self._newest = -1
        self._iteration = 0
        self._running = False
        for layer in layers.values():
            layer.clock = clock

    @property
    def plan(self) -> Plan:
        """What the ranks of this tensor-parallel group do in the coming iterations."""
        return self._plan

    @property
    def active(self) -> bool:
        """Whether the balancer may change anything."""
        return self.config.mode != "off" and self._exchange.size > 1 and bool(self._layers)

    def begin(self) -> None:
        """A training forward starts; the first one since :meth:`tick` starts an iteration."""
        if not self._running:
            self._running = True
            self._clock.keep_segments = self._timelines.wants(self._iteration)
            self._clock.start()

    def tick(self) -> None:
        """An optimizer step is done, and with it an iteration. Collective over the tensor-parallel group."""
        if not self._running:
            return
        self._running = False
        self._clock.stop(tag=(self._iteration, self._resizer.resized))
        moved = [self._observe(times) for times in self._clock.read()]
        if self.active:
            # An exchange settles what this iteration's flag would ask for.
            exchanged = self._exchange.take_flag() and self._replan()
            self._exchange.post_flag(any(moved) and not exchanged)
            self._resizer.end_iteration()
        self._iteration += 1

    def _observe(self, times: IterationTimes) -> bool:
        iteration, resized = times.tag
        self._newest = iteration
        equal = self._equal_work.normalise(times.work_seconds, times.matmul_seconds, resized)
        self._best_seconds = min(self._best_seconds, equal.work_seconds)
        if times.segments:
            self._timelines.add(RankSegments(iteration, times.segments, times.time_base))
        self._records.append(
            LocalRecord(
                iteration=iteration,
                work_seconds=times.work_seconds,
                matmul_seconds=times.matmul_seconds,
                communication_seconds=times.communication_seconds,
                equal_work_seconds=equal.work_seconds,
                equal_matmul_seconds=equal.matmul_seconds,
                resized=resized,
                exchanged=False,
                plan_changed=False,
                block_seconds=times.block_seconds,
                own_score=self._best_seconds / equal.work_seconds,
            )
        )
        return self._watch.observe(equal)

    def _replan(self) -> bool:
        """Exchange times, decide and apply; False if some rank has no times yet."""
        times = self._exchange.gather(self._watch.current() if self._watch.ready else None)
        if times is None:
            return False
        self._watch.exchanged()
        plan = decide(times, self.config, self._plan)
        changed = plan != self._plan
        if changed:
            self._timelines.plan_changed(self._iteration)
        if self._records:
            self._records[-1] = replace(self._records[-1], exchanged=True, plan_changed=changed)
        if plan.resize[self._rank] != self._plan.resize[self._rank]:
            self._resizer.prune(plan.resize[self._rank])
        self._plan = plan
        return True

    def collect(self) -> list[IterationRecord] | None:
        """The iterations since the last call, all ranks together, on global rank 0; None elsewhere.

        Collective over all ranks; meant for the end of an epoch or of the run.
        """
        # A GPU's clock knows an iteration late, and not on all ranks at once: what some rank lacks waits for next time.
        newest = torch.tensor(self._newest)
        dist.all_reduce(newest, op=dist.ReduceOp.MIN, group=self._world)
        local = [record for record in self._records if record.iteration <= newest.item()]
        for _ in local:
            self._records.popleft()
        gathered: list[list[LocalRecord]] | None = None
        if dist.get_rank() == 0:
            gathered = [[] for _ in range(dist.get_world_size())]
        dist.gather_object(local, gathered, dst=0, group=self._world)
        return None if gathered is None else merge_records(gathered, self._tp_groups)

    def timelines(self) -> Timelines | None:
        """An iteration before balancing and one after it, on global rank 0; None elsewhere, and before there is one.

        Collective over all ranks; meant for the end of the run.
        """
        gathered: list[SampledIterations | None] | None = None
        if dist.get_rank() == 0:
            gathered = [None] * dist.get_world_size()
        dist.gather_object(self._timelines.kept(), gathered, dst=0, group=self._world)
        return None if gathered is None else choose_timelines(gathered, self._tp_groups)  # type: ignore[arg-type]


def attach_balancer(
    model: nn.Module,
    config: BalanceConfig,
    clock: IterationClock,
    tp_group: dist.ProcessGroup,
    iterations_per_interval: int,
) -> Balancer:
    """A balancer for the tensor-parallel layers of ``model``. Collective over all ranks.

    Raises:
        ValueError: a layer has an option that the mode cannot be combined with, or ranks were given another ``config``.
    """
    layers = hetero_layers(model)
    if config.mode != "off":
        for name, layer in layers.items():
            obstacle = layer.resize_obstacle()
            if obstacle is not None:
                raise ValueError(f"balance mode {config.mode!r} cannot be combined with {obstacle} (layer {name})")
    exchange, world, groups = make_exchanges(tp_group)
    _check_same_on_all_ranks(config, world)
    rank = dist.get_rank(tp_group)
    return Balancer(layers, config, clock, exchange, world, groups, rank, iterations_per_interval)


def _check_same_on_all_ranks(config: BalanceConfig, world: dist.ProcessGroup) -> None:
    """Ranks that decide by different rules would soon wait for each other for ever."""
    configs: list[BalanceConfig] = [config] * dist.get_world_size()
    dist.all_gather_object(configs, config, group=world)
    for rank, other in enumerate(configs):
        if other != configs[0]:
            raise ValueError(f"ranks were given different BalanceConfigs: rank 0 {configs[0]}, rank {rank} {other}")
