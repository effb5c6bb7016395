"""The balancer: once per iteration it measures, asks whether anyone's speed moved, and if so decides and applies.

An iteration runs from the first training forward after an optimizer step to the end of the next optimizer step;
loading data, evaluating and saving in between do not count. At the end of iteration *i* every rank

1. reads its clock and scales the times to equal work,
2. reads the group's answer to the flag of iteration *i − 1*: if any rank's speed had moved, all gather their times,
   decide the same plan from the same numbers, and apply it from iteration *i + 1* on,
3. posts its own flag of iteration *i*, without waiting.

A while after a plan began to migrate the group exchanges once more: what that really cost corrects the prediction.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from ..layers.block import Block, attach_blocks
from ..layers.linear import HeteroLinear, hetero_layers
from ..layers.transport import Transport
from .apply import Applier, Shares
from .config import BalanceConfig
from .decide.costs import Costs, Traffic
from .decide.modes import decide
from .decide.plan import BalancePlan, RankTimes
from .host_messages import Groups, make_groups
from .measure.clock import IterationClock, IterationTimes
from .measure.pretest import ProductShape, prepare_costs
from .measure.speed import EqualWork, SpeedWatch
from .measure.timeline_sampler import RankSegments, SampledIterations, TimelineSampler
from .report.records import IterationRecord, LocalRecord, merge_records
from .report.timeline import Timelines, choose_timelines

__all__ = ["Balancer", "attach_balancer"]

MAX_RECORDS = 100_000
"""Iterations kept for :meth:`Balancer.collect`; older ones are dropped."""

SETTLED_AFTER = 10
"""Iterations after which a new plan's costs have shown."""

MIN_RECEIVED = 0.02
"""A receiver with memory for less than this share of its own work takes nothing."""


class Balancer:
    """Balances one rank's tensor-parallel layers against those of its group."""

    def __init__(
        self,
        layers: Mapping[str, HeteroLinear],
        blocks: Sequence[Block],
        config: BalanceConfig,
        clock: IterationClock,
        groups: Groups,
        iterations_per_interval: int,
        is_last_pass: Callable[[int], bool],
    ) -> None:
        self.config = config
        self._layers = layers
        self._clock = clock
        self._groups = groups
        self._exchange = groups.exchange
        self._transport = Transport(groups.migration)
        self._plan = BalancePlan.idle(self._exchange.size)
        self._costs = Costs()
        self._applier = Applier(layers, blocks, config, iterations_per_interval, self._transport, is_last_pass)
        self._equal_work = EqualWork(config.patience)
        self._watch = SpeedWatch(config)
        self._records: deque[LocalRecord] = deque(maxlen=MAX_RECORDS)
        self._best_seconds = math.inf
        self._timelines = TimelineSampler(config.warmup_iterations, config.patience)
        self._newest = -1
        self._unmigrated_seconds: float | None = None
        self._most_received = math.inf
        self._check_at = -1
        self._iteration = 0
        self._running = False
        for layer in layers.values():
            layer.clock = clock

    @property
    def plan(self) -> BalancePlan:
        """What the ranks of this tensor-parallel group do in the coming iterations."""
        return self._plan

    @property
    def traffic(self) -> Transport:
        """What carries this rank's migrated work, and counts it."""
        return self._transport

    @property
    def shares(self) -> Shares:
        """What this rank's layers prune, give and take, in whole columns and units."""
        return self._applier.shares

    @property
    def active(self) -> bool:
        """Whether the balancer may change anything."""
        return self.config.mode != "off" and self._exchange.size > 1 and bool(self._layers)

    def follow(self, plan: BalancePlan) -> None:
        """Take on ``plan`` from the next iteration on, until times say otherwise. Collective over the group.

        For studies, with a ``warmup_iterations`` that is never over.

        Raises:
            RuntimeError: ranks were given different plans.
        """
        self._exchange.check_same(plan.digest)
        self._plan = self._adopt(plan)

    def begin(self) -> None:
        """A training forward starts; the first one since :meth:`tick` starts an iteration."""
        if not self._running:
            self._running = True
            self._clock.keep_segments = self._timelines.wants(self._iteration)
            self._clock.start()
            self._applier.begin_iteration()
            self._clock.mark("communication")

    def drop_gradients(self) -> None:
        """Gradients of this iteration are thrown away. To all ranks of the group at once."""
        self._applier.drop_gradients()

    def weights_changed(self) -> None:
        """Weights have been loaded, perhaps amid an iteration. To all ranks of the group at once."""
        self._applier.weights_changed()
        self._running = False

    def before_step(self) -> None:
        """Gradients are about to be used.

        Raises:
            RuntimeError: those of units that are computed elsewhere have not come back.
        """
        self._applier.before_step()

    def tick(self) -> None:
        """An optimizer step is done, and with it an iteration. Collective over the tensor-parallel group."""
        if not self._running:
            return
        self._running = False
        self._clock.stop(tag=(self._iteration, self._applier.shares))
        moved = [self._observe(times) for times in self._clock.read()]
        if self.active:
            if self._iteration == 0 and self.config.mode in ("semi", "auto"):
                self._costs = self._measure_costs()
            # An exchange settles what this iteration's flag would ask for.
            due = self._exchange.take_flag() or self._iteration == self._check_at
            exchanged = due and self._replan()
            self._exchange.post_flag(any(moved) and not exchanged, self._plan.digest)
            self._applier.end_iteration()
        self._iteration += 1

    def _observe(self, times: IterationTimes) -> bool:
        iteration: int
        shares: Shares
        iteration, shares = times.tag
        self._newest = iteration
        # What lies between a block's products goes where its units go.
        movable = times.matmul_seconds + (times.block_seconds if self.config.moves_blocks else 0.0)
        equal = self._equal_work.normalize(times.work_seconds, movable, shares.load)
        equal = replace(equal, communication_seconds=times.communication_seconds)
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
                resized=shares.resized,
                exchanged=False,
                plan_changed=False,
                migrated=shares.migrated,
                received=shares.received,
                note=self._plan.note,
                block_seconds=times.block_seconds,
                own_score=self._best_seconds / equal.work_seconds,
            )
        )
        return self._watch.observe(equal)

    def _measure_costs(self) -> Costs:
        """What balancing costs with the layers, rows and messages of the iteration that is just over."""
        first = next(iter(self._layers.values()))
        dtype, device = first.matrix.dtype, first.matrix.device
        ranks = self._exchange.size

        def traffic(share: float) -> Traffic:
            others = (share / (ranks - 1),) * (ranks - 1)
            plan = BalancePlan(resize=(0.0,) * ranks, migrate=(share,) + (0.0,) * (ranks - 1), receive=(0.0, *others))
            return self._applier.traffic(plan, dtype.itemsize)

        return prepare_costs(
            self.config,
            self._groups.migration,
            [ProductShape(*layer.matrix.shape) for layer in self._layers.values()],
            first.rows // max(1, first.passes),
            dtype,
            device,
            traffic,
            "block" if self.config.moves_blocks else "column",
        )

    def _replan(self) -> bool:
        """Exchange times, decide and apply; False if some rank has no times yet."""
        times = self._exchange.gather(self._watch.current() if self._watch.ready else None)
        if times is None:
            return False
        self._watch.exchanged()
        self._learn(times)
        plan = decide(times, self._costs, self.config, self._plan)
        self._exchange.check_same(plan.digest)
        rank = self._transport.rank
        self._watch.relieved(plan.resize[rank] + plan.migrate[rank])
        changed = plan != self._plan
        if changed:
            plan = self._adopt(plan)
            self._timelines.plan_changed(self._iteration)
            self._check_at = self._iteration + SETTLED_AFTER if sum(plan.migrate) > 0 else -1
        if self._records:
            self._records[-1] = replace(self._records[-1], exchanged=True, plan_changed=changed)
        self._plan = plan
        return True

    def _learn(self, times: Sequence[RankTimes]) -> None:
        """Correct the costs of migrating by what collectives take now and took without."""
        # The last to arrive at a collective does not wait there.
        seconds = min(rank.communication_seconds for rank in times)
        migrated = sum(self._plan.migrate)
        if migrated == 0.0:
            self._unmigrated_seconds = seconds
        elif self._unmigrated_seconds is not None:
            self._costs = self._costs.corrected(self._costs.phi1(migrated), seconds - self._unmigrated_seconds)

    def _adopt(self, plan: BalancePlan) -> BalancePlan:
        """Apply ``plan``, or as much of it as all receivers have memory for."""
        if sum(plan.migrate) > 0:
            self._transport.connect(next(iter(self._layers.values())).matrix.device)
        while True:
            limited = plan.limited(self._most_received)
            try:
                self._applier.apply(limited)
                fits = True
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                fits = False
            if self._exchange.all_agree(fits):
                return limited
            # Released before the others' share of the next attempt is taken.
            self._applier.apply(BalancePlan.idle(self._exchange.size))
            self._most_received = max(limited.receive) / 2
            if self._most_received < MIN_RECEIVED:
                self._most_received = 0.0

    def collect(self) -> list[IterationRecord] | None:
        """The iterations since the last call, all ranks together, on global rank 0; None elsewhere.

        Collective over all ranks; meant for the end of an epoch or of the run.
        """
        # A GPU's clock knows an iteration late, and not on all ranks at once: what some rank lacks waits for next time.
        newest = torch.tensor(self._newest)
        dist.all_reduce(newest, op=dist.ReduceOp.MIN, group=self._groups.world)
        local = [record for record in self._records if record.iteration <= newest.item()]
        for _ in local:
            self._records.popleft()
        gathered: list[list[LocalRecord]] | None = None
        if dist.get_rank() == 0:
            gathered = [[] for _ in range(dist.get_world_size())]
        dist.gather_object(local, gathered, dst=0, group=self._groups.world)
        return None if gathered is None else merge_records(gathered, self._groups.tensor_parallel)

    def timelines(self) -> Timelines | None:
        """An iteration before balancing and one after it, on global rank 0; None elsewhere, and before there is one.

        Collective over all ranks; meant for the end of the run.
        """
        gathered: list[SampledIterations | None] | None = None
        if dist.get_rank() == 0:
            gathered = [None] * dist.get_world_size()
        dist.gather_object(self._timelines.kept(), gathered, dst=0, group=self._groups.world)
        if gathered is None:
            return None
        return choose_timelines(gathered, self._groups.tensor_parallel)  # type: ignore[arg-type]


def attach_balancer(
    model: nn.Module,
    config: BalanceConfig,
    clock: IterationClock,
    tp_group: dist.ProcessGroup,
    iterations_per_interval: int,
    is_last_pass: Callable[[int], bool] = lambda passes: True,
) -> Balancer:
    """A balancer for the tensor-parallel layers of ``model``. Collective over all ranks.

    Args:
        is_last_pass: whether a layer's n-th backward pass since gradients were last used is the last before they are.

    Raises:
        ValueError: a layer has an option that the mode cannot be combined with, or ranks were given another ``config``.
    """
    layers = hetero_layers(model)
    if config.mode != "off":
        for name, layer in layers.items():
            obstacle = layer.resize_obstacle()
            if obstacle is not None:
                raise ValueError(f"balance mode {config.mode!r} cannot be combined with {obstacle} (layer {name})")
    groups = make_groups(tp_group)
    _check_same_on_all_ranks(config, groups.world)
    blocks = attach_blocks(model) if config.moves_blocks else []
    return Balancer(layers, blocks, config, clock, groups, iterations_per_interval, is_last_pass)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a tensor could not be made for lack of memory, on a GPU or the host."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)


def _check_same_on_all_ranks(config: BalanceConfig, world: dist.ProcessGroup) -> None:
    """Ranks that decide by different rules would soon wait for each other for ever."""
    configs: list[BalanceConfig] = [config] * dist.get_world_size()
    dist.all_gather_object(configs, config, group=world)
    for rank, other in enumerate(configs):
        if other != configs[0]:
            raise ValueError(f"ranks were given different BalanceConfigs: rank 0 {configs[0]}, rank {rank} {other}")
