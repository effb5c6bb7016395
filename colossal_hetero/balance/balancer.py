"""The balancer: once per iteration it measures times; if a rank's speed has changed, it decides on a plan. An iteration
lasts from the first training forward pass after an optimizer step to the end of the next optimizer step, without data
loading and evaluation. At its end every rank reads its clock; reads the times of all ranks in the iteration before, and
may decide on a plan for the next iteration, the same on all ranks; and posts its own times, without waiting."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import fsum
from statistics import median

import torch
import torch.distributed as dist

from ..colossalai_support.accelerator import is_out_of_memory
from ..common.ranks import is_lost_connection
from ..layers.linear import HeteroLinear
from ..layers.transport import Transport
from .apply import Applier, Shares
from .clock import IterationClock, IterationTimes, KindTimes
from .config import BalanceConfig
from .group_speed import GroupSpeed, KindWork
from .host_messages import VOTE_TIMEOUT, Groups
from .latest import ChangeTeller, LatestIterations
from .modes import LayerKind, decide, relieved_for, stays_resharded, wants_resharding
from .plan import BalancePlan, Costs, Traffic
from .pretest import CostMeasurement, Form, prepare_costs
from .report import BalanceReport, IterationRecord, LocalRecord, bound_in_words, merge_records
from .resharding import Resharding

log = logging.getLogger(__name__)

MAX_RECORDS = 100_000  # number of iterations kept for :meth:`Balancer.collect`; older ones are dropped
ALWAYS_MEASURED = 16
"""Number of first iterations that are measured in mode "off"."""
MEASURED_EVERY = 8
"""In mode "off" one of so many later iterations is measured, or as few as the clock wants."""
SETTLED_AFTER = 10  # number of iterations with a plan from which its cost of communication is learned
MAX_STARVED = 1 / 3
"""Share of a rank's parts in which its GPU may wait for its host in an iteration that is judged. Even if the host is
never ahead, a third of the parts are none such: those after collectives in which the rank waited for others."""
MIN_RECEIVED = 0.02
"""Minimum share that is migrated to a receiver with little memory; with memory for less it takes nothing."""


class Balancer:
    def __init__(
        self,
        layers: Mapping[str, HeteroLinear],
        config: BalanceConfig,
        clock: IterationClock,
        groups: Groups,
        transport: Transport,
        applier: Applier,
        resharding: Resharding | None,
        report_every: int,
        on_report: Callable[[], None] | None,
        reports: bool,
        may_switch_off: bool,
    ) -> None:
        self.config = config
        self._may_switch_off = may_switch_off
        self._layers = layers
        self._clock = clock
        self._groups = groups
        self._exchange = groups.exchange
        self.traffic, self._applier, self._resharding = transport, applier, resharding
        self.plan = BalancePlan.idle(self._exchange.size)
        self._costs = Costs()
        self._knows_costs = config.mode not in ("semi", "auto")
        if self.active and config.mode != "resize":
            # At boost: NCCL has memory of its own, which torch's cache takes away later.
            self.traffic.connect(next(iter(layers.values())).matrix.device)
        self._relieved_for = (0,) * self._exchange.size
        self._speed = GroupSpeed([kind.full for kind in self._applier.kinds], self._exchange.size, config)
        self._records: deque[LocalRecord] = deque(maxlen=MAX_RECORDS)
        self._best_seconds = math.inf
        self._newest = -1
        self._unsent: deque[tuple[int, list[float]]] = deque()
        self._migration_seconds: list[float] = []
        self._max_received = math.inf
        self._iteration = 0
        self._running = False
        self._passes = 0
        self._not_for_good: BalancePlan | None = None
        self._has_told_obstacle = False
        self._is_starved = False
        """True if the last known iteration, after the first ones, was not judged because a GPU waited for its host."""
        self._starved_ranks: set[int] = set()
        self._is_measured = False
        self._asks_for_heads = False
        self._failure: RuntimeError | None = None  # a lost connection after the optimizer's step, for the next pass
        self._latest = LatestIterations(groups.world, groups.tensor_parallel, report_every)
        self._on_report = on_report
        self._reports = reports  # True if rank 0 has a callback, for which ranks measure in all modes
        self._has_compared = False
        ranks = self._ranks = next(each for each in groups.tensor_parallel if dist.get_rank() in each)
        self._changes = ChangeTeller(ranks, log.info) if dist.get_rank() == ranks[0] else None

    @property
    def shares(self) -> Shares:
        return self._applier.shares

    @property
    def kinds(self) -> list[LayerKind]:
        """Kinds that are divided; the ``units`` of a plan are in the order of those that have units."""
        return self._applier.kinds

    def switch_off(self, reason: str) -> bool:
        """Only measure from now on, if the user has not asked for balancing and nothing is balanced yet; returns
        whether that is so. All ranks of the group do it at once."""
        if not (self._may_switch_off and self._is_idle):
            return False
        if dist.get_rank() == self._ranks[0]:
            log.info("nothing is balanced from now on, and times are only measured: %s", reason)
        self.config = BalanceConfig(mode="off")
        return True

    @property
    def active(self) -> bool:
        """True if the balancer may change anything."""
        return self.config.mode != "off" and self._exchange.size > 1 and bool(self._layers)

    def follow(self, plan: BalancePlan) -> None:
        """Apply ``plan`` from the next iteration on, until another one is decided. Collective over the group."""
        self._exchange.check_same(plan.digest)
        self._agree_on_seen()
        self.plan = self._adopt(plan, self._stays_resharded(plan))

    def begin(self, asks_for_heads: bool = False, number: int = 1) -> None:
        """Begin a training forward pass; the first one since :meth:`tick` begins an iteration. ``number`` is that of
        the pass in a run of a schedule, from 1 on: nobody changes weights before it has ended."""
        self._raise_failure()
        if not self._running:
            is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if is_captured and self.active and not self.switch_off("a CUDA graph would repeat one plan"):
                raise RuntimeError(
                    f"balance mode {self.config.mode!r} cannot be used in a CUDA graph, which would repeat the plan of "
                    "the iteration that was captured; use mode 'off', or train without CUDA graphs"
                )
            self._running = True
            self._measure(not is_captured and self._wants_times())
            self._asks_for_heads = False
            self._passes = 0
        self._passes += 1
        self._keep_seen(asks_for_heads)
        self._applier.units.begin_pass(number)

    @property
    def _is_idle(self) -> bool:
        return not any((*self.plan.resize, *self.plan.migrate))

    def _keep_seen(self, asks_for_heads: bool) -> None:
        """Let all ranks compute their own units of blocks that somebody sees inside in this pass, if a plan applies."""
        self._asks_for_heads |= asks_for_heads
        if self._is_idle or not self._applier.sees_more(asks_for_heads):
            return
        seen = self._groups.votes.anywhere(self._applier.seen(asks_for_heads), VOTE_TIMEOUT)
        if seen is None:
            raise RuntimeError(
                "hooks inside of a block, or what this rank asks of its attention, would see other units than those of "
                f"this rank, and {VOTE_TIMEOUT} later other ranks of its tensor-parallel group do not have them, so "
                "that the plan cannot be changed: add the same hooks on all ranks, or before the first step, or use "
                "balance mode 'off'"
            )
        self._stay(seen)

    def _stay(self, seen: Sequence[bool]) -> None:
        """Let blocks that are seen stay as they are, and others not any more. Collective over the group."""
        if not self._applier.keep(seen):
            return
        if any(seen) and dist.get_rank() == 0:
            log.info(
                "%d of %d blocks are not balanced, because hooks inside of them, or a caller that asks for attention "
                "maps or gives masks of heads, would see other units than those of a rank",
                *(sum(seen), len(seen)),
            )
        if not self._is_idle:
            self.plan = self._adopt(self.plan, self._applier.for_good)

    def _agree_on_seen(self) -> None:
        """Let all ranks know which blocks somebody sees inside. Collective over the group."""
        if seen := self._exchange.anywhere(self._applier.seen(self._asks_for_heads)):
            self._stay(seen)

    @property
    def running_clock(self) -> IterationClock | None:
        """The clock of the iteration that is running, or None if that is not measured."""
        return self._clock if self._running and self._is_measured else None

    def _wants_times(self) -> bool:
        """True if the iteration that begins is measured; the same on all ranks of the group."""
        if self.active:
            # Marks would slow down a host that is late already.
            always, every = self._speed.is_attentive and not self._is_starved, self._clock.sample_every
        else:
            always = self._iteration < ALWAYS_MEASURED or self._reports
            every = max(MEASURED_EVERY, self._clock.sample_every)
        return always or self._iteration % every == 0

    def _measure(self, is_measured: bool) -> None:
        """Let layers mark the clock in this iteration, or not, because a mark costs the host some time."""
        if is_measured != self._is_measured:
            self._is_measured = is_measured
            for layer in self._layers.values():
                layer.clock = self._clock if is_measured else None
        if is_measured:
            self._clock.start()

    def begin_evaluation_pass(self, asks_for_heads: bool = False) -> None:
        """Begin a forward pass without gradients, which belongs to no iteration: ranks compute the units they hold."""
        self._raise_failure()
        if self.has_resharded:
            self._keep_seen(asks_for_heads)

    def weights_changed(self) -> None:
        """Take note of loaded weights, also during an iteration; call it on all ranks of the group."""
        self._applier.units.end_iteration()
        self._running = False

    def forget_gradients(self) -> None:
        """Take note that the loss scale has changed, or that gradients were not finite."""
        for layer in self._layers.values():
            layer.forget_gradients()

    def before_step(self) -> None:
        self._applier.units.before_step()

    def tick(self) -> None:
        """End an iteration, after the optimizer step. Collective over the tensor-parallel group. If a rank is lost, the
        next pass raises the error: the step is made, and must not be taken for one that has failed."""
        try:
            self._end_iteration()
        except RuntimeError as error:
            if not is_lost_connection(str(error)):
                raise
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _end_iteration(self) -> None:
        if not self._running:
            return
        self._running = False
        if self._is_measured:
            self._clock.stop(tag=(self._iteration, self._applier.shares))
        for times in self._clock.read():
            self._record(times)
            if self.active:
                self._unsent.append(_numbers(times, len(self._applier.kinds)))
        if self.active:
            self._relieved_for = relieved_for(self._relieved_for, self.plan)
            # Not any(…), which would stop at the first iteration after which to decide.
            times_of_ranks = self._exchange.take()
            if sum([self._compare(rows) for rows in times_of_ranks]):
                self._replan()
            self._reshard_if_due()
            nothing = (-1, [0.0] * (2 + 3 * len(self._applier.kinds)))
            iteration, numbers = self._unsent.popleft() if self._unsent else nothing
            self._exchange.post(iteration, numbers, self.plan.digest)
            self._applier.end_iteration()
        self._iteration += 1
        if self._latest.end_iteration(self._iteration):
            self._tell_latest()

    def _tell_latest(self) -> None:
        """Let rank 0 know what all ranks did lately: numbers for loggers, and in mode "off" once what is missed."""
        if dist.get_rank() != 0:
            return
        if self._on_report is not None:
            self._on_report()
        if self.config.mode == "off" and not self._has_compared and self._latest.done >= ALWAYS_MEASURED:
            latest = self._latest.report()
            if latest is not None and (words := bound_in_words(latest)):
                self._has_compared = True
                log.info(words)

    def report(self) -> BalanceReport | None:
        """What ranks did lately, and what an iteration would have taken otherwise; None before the first iterations are
        known. Not collective: ranks exchange their numbers after 4, 8, … iterations, then after every interval."""
        found = self._latest.report()
        return found and replace(found, notes=(self.plan.note,) if self.plan.note else (), mode=self.config.mode)

    @property
    def iterations(self) -> int:
        """Number of iterations after which the numbers of :meth:`report` were sent."""
        return self._latest.done

    def _compare(self, rows: Sequence[Sequence[float]]) -> bool:
        """Take in the times of all ranks in one iteration; returns whether to decide. If some rank's GPU waited for its
        host, nothing is learned: its times are those of the host, and moving work adds to what that has to launch."""
        starved = {rank: row[1] for rank, row in enumerate(rows) if row[1] > MAX_STARVED}
        # The first iterations load kernels and allocate memory.
        self._is_starved = bool(starved) and self._iteration > self._clock.sample_every
        if self._is_starved:
            self._tell_starved(starved)
        if starved:
            return False
        # The last rank to arrive does not wait, so the minimum has no waiting for slow ranks.
        self._migration_seconds.append(min(row[0] for row in rows))
        return self._speed.observe([[KindWork(*row[i : i + 3]) for i in range(2, len(row), 3)] for row in rows])

    def _tell_starved(self, shares: Mapping[int, float]) -> None:
        """Warn once of each rank, on the group's first rank, that its GPU waits for its host."""
        for rank in sorted(shares.keys() - self._starved_ranks):
            self._starved_ranks.add(rank)
            if dist.get_rank() == self._ranks[0]:
                log.warning(
                    "rank %d's GPU waited for its host in %.0f %% of its work shortly before iteration %d, so that its "
                    "times say nothing about the GPU: such iterations are not judged, and nothing is balanced by them",
                    *(self._ranks[rank], 100 * shares[rank], self._iteration),
                )

    def _record(self, times: IterationTimes) -> None:
        iteration: int
        shares: Shares
        iteration, shares = times.tag
        self._newest = iteration
        rank = self._ranks.index(dist.get_rank())
        equal = self._speed.at_full_share(rank, times.work_seconds, times.matmul_seconds, shares.loads)
        self._best_seconds = min(self._best_seconds, equal.work_seconds)
        record = LocalRecord(
            iteration=iteration,
            work_seconds=times.work_seconds,
            matmul_seconds=times.matmul_seconds,
            communication_seconds=times.communication_seconds,
            equal_work_seconds=equal.work_seconds,
            equal_matmul_seconds=equal.matmul_seconds,
            resized=shares.resized,
            migrated=shares.migrated,
            resharded=shares.resharded,
            received=shares.received,
            note=self.plan.note,
            own_score=self._best_seconds / equal.work_seconds,
        )
        self._records.append(record)
        if iteration >= self.config.warmup_iterations:
            self._latest.add(record)
            if self._changes is not None:
                self._changes.took(iteration, record.work_seconds + record.communication_seconds)

    def _measure_costs(self) -> Costs:
        first = next(iter(self._layers.values()))
        dtype, device = first.matrix.dtype, first.matrix.device
        ranks = self._exchange.size

        def traffic(share: float) -> Traffic:
            others = (share / (ranks - 1),) * (ranks - 1)
            plan = BalancePlan(resize=(0.0,) * ranks, migrate=(share,) + (0.0,) * (ranks - 1), receive=(0.0, *others))
            return self._applier.traffic(plan, dtype.itemsize, max(1, self._passes))

        shapes = [
            (layer.matrix.shape[0], layer.matrix.shape[1]) for layer in self._layers.values() if layer.kind is not None
        ]
        rows = first.rows // max(1, first.passes)
        form: Form = "block" if self.config.moves_blocks else "column"
        measurement = CostMeasurement(self._groups.migration, shapes, rows, dtype, device, traffic, form)
        return prepare_costs(self.config, measurement)

    def _replan(self) -> None:
        self._agree_on_seen()
        is_settled = len(self._migration_seconds) >= SETTLED_AFTER
        if sum(self.plan.migrate) > 0 and is_settled and not self.has_resharded:
            self._costs = self._costs.corrected(
                self._costs.phi1(fsum(self.plan.migrate)), median(self._migration_seconds)
            )
        plan = self._decide(self._speed.uncertainty)
        if plan != self.plan and not self._knows_costs:
            # What would not pay without costs does not pay with them, so they are measured only now.
            self._knows_costs = True
            self._costs = self._measure_costs()
            self._speed.receive_factor = self._costs.receive_factor
            plan = self._decide(self._speed.uncertainty)
        # Ranks that followed different plans would not agree on whether there is a change.
        self._exchange.check_same(self.plan.digest, plan.digest)
        self._speed.relieved([resize + migrate for resize, migrate in zip(plan.resize, plan.migrate, strict=True)])
        if plan != self.plan:
            self._change_plan(plan, self._stays_resharded(plan))
        else:
            self.plan = plan  # with its note

    @property
    def has_resharded(self) -> bool:
        return self._resharding is not None and self._resharding.is_active

    def _change_plan(self, plan: BalancePlan, for_good: bool) -> None:
        """Follow ``plan``, which differs from the present one or in whether it is applied for good."""
        self.plan = self._adopt(plan, for_good)
        self._latest.plan_changed(self._iteration)
        if self._changes is not None:
            times = self._speed.equal_work() if self._speed.is_known else None
            self._changes.changed(self._iteration, self.plan, times)
        self._migration_seconds = []
        if self._records:
            self._records[-1] = replace(self._records[-1], plan_changed=True)

    def _stays_resharded(self, plan: BalancePlan) -> bool:
        return self.has_resharded and stays_resharded(self.plan, plan)

    def _reshard_if_due(self) -> None:
        """Re-shard the units that migrate permanently if their owners have been slow for long. Collective."""
        sharding = self._resharding
        if sharding is None or self._applier.for_good or self.plan == self._not_for_good:
            return
        if not wants_resharding(self.plan, self._relieved_for, self.config.reshard_after):
            return
        obstacle = sharding.obstacle
        if obstacle is None:
            self._exchange.check_same(self.plan.digest)
            self._change_plan(self.plan, for_good=True)
            obstacle = sharding.obstacle
        if sharding.is_active:
            if dist.get_rank() == 0:
                log.warning(
                    "units were permanently re-sharded, so parameters have other shapes, which masks or averages of "
                    "your own no longer fit; BalanceConfig(reshard_after=None) keeps all shapes"
                )
            return
        self._not_for_good = self.plan
        obstacle = obstacle or "somebody sees inside of all blocks that could move, or no rank would gain"
        if not self._has_told_obstacle and dist.get_rank() == 0:
            log.info("units migrate in each iteration and are not permanently re-sharded: %s", obstacle)
        self._has_told_obstacle = True

    def keep_shapes(self) -> None:
        """Re-shard no units from now on, because a copy of the model is made."""
        if self._resharding is None:
            return
        if self.has_resharded:
            raise RuntimeError(
                "the model cannot be copied after units were permanently re-sharded, because the ordinary shapes of "
                "its parameters may return: copy it before training, which keeps the shapes, or set "
                "BalanceConfig(reshard_after=None)"
            )
        self._resharding.keeps_shapes = True

    def ordinary_shards(self) -> AbstractContextManager[None]:
        """Context in which this rank holds its ordinary shards of parameters, gradients and optimizer states, for code
        that reads or writes shards. Collective over the group, at its beginning and end."""
        return nullcontext() if self._resharding is None else self._resharding.ordinary_shards()

    def _decide(self, uncertainty: float) -> BalancePlan:
        """The plan for the present speeds, within the known memory of receivers; another one only if it saves a larger
        share of the time than ``uncertainty``."""
        units = self._speed.unit_work(self._applier.present_kinds())
        times = self._speed.equal_work()
        return decide(times, self._costs, self.config, self.plan, uncertainty, units, self._max_received)

    def _adopt(self, plan: BalancePlan, for_good: bool = False) -> BalancePlan:
        """Apply ``plan``, or if receivers have too little memory one that migrates less; returns what was applied."""
        while True:
            try:
                self._applier.apply(plan, for_good)
                fits = True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
            if self._exchange.all_agree(fits):
                return plan
            for_good = False
            # Release memory on all ranks before the next attempt.
            self._applier.apply(BalancePlan.idle(self._exchange.size))
            self._max_received = plan.max_received / 2
            if self._max_received < MIN_RECEIVED:
                self._max_received = 0.0
            plan = self._decide(0.0) if plan.units else plan.limited(self._max_received)

    def collect(self) -> list[IterationRecord] | None:
        """The records of all ranks since the last call, on global rank 0; None on others. Collective over all ranks.
        Mode "off" measures the first :data:`ALWAYS_MEASURED` iterations and one of :data:`MEASURED_EVERY` only."""
        # A GPU's clock has times late, which differs between ranks; what some rank lacks is returned by the next call.
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


def _numbers(times: IterationTimes, kinds: int) -> tuple[int, list[float]]:
    iteration, shares = times.tag
    numbers = [times.migration_seconds, times.starved]
    for kind in range(kinds):
        numbers += (shares.loads[kind], *times.kinds.get(kind, KindTimes()))
    return iteration, numbers
