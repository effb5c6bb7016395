"""Compares the times of stages with the plan, and says what plan is better if they differ."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text

from ...colossalai_support.accelerator import get_accelerator, recorded_event
from ...common.methods import wrap_method
from ...common.ranks import of_every_rank, print_on_rank_0
from ...common.text import spans, times
from ...planner.cluster.topology import Topology
from ...planner.cost.layout_line import layout_of
from ...planner.cost.plan import Plan
from ...planner.solver.follow import CALM, LinkDrift, Proposal
from ...profiling.device_profiler import sustained_flops
from .link_times import LinkClock, compare_links


@dataclass(frozen=True)
class PassSeconds:
    """Seconds that one stage takes for one micro-batch, without waiting for other stages."""

    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class StageDrift:
    replica: int
    stage: int
    ranks: tuple[int, ...]
    device: str
    node: str
    planned: PassSeconds
    measured: PassSeconds

    @property
    def ratio(self) -> float:
        return self.measured.seconds / self.planned.seconds


@dataclass(frozen=True)
class DriftReport:
    threshold: float  # relative difference beyond which a stage has drifted (0.2 = 20 %)
    plan: Plan  # the present one
    stages: tuple[StageDrift, ...]  # all measured stages, ordered by replica and stage
    links: tuple[LinkDrift, ...] = ()  # all measured links between stages
    idle: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    """Of ranks that the plan leaves idle: how many times slower they are than when it was made."""
    proposal: Proposal | None = None  # None if no stage has drifted, or there is no cluster and profile to plan from

    @property
    def drifted(self) -> tuple[StageDrift, ...]:
        return tuple(stage for stage in self.stages if abs(stage.ratio - 1.0) > self.threshold)

    @property
    def has_drifted(self) -> bool:
        return bool(self._drifted_ranks)

    @property
    def _drifted_ranks(self) -> list[tuple[int, ...]]:
        return [*(stage.ranks for stage in self.drifted), *(link.ranks for link in self.changed_links)]

    @property
    def changed_links(self) -> tuple[LinkDrift, ...]:
        return tuple(link for link in self.links if link.matters)

    def differs_from(self, earlier: DriftReport | None) -> bool:
        """True if ``earlier`` has other drifted stages or links, a time changed by more than the threshold, or another
        split."""
        if earlier is None or self._drifted_ranks != earlier._drifted_ranks:
            return self.has_drifted
        splits = [each.proposal and layout_of(each.proposal.plan) for each in (self, earlier)]
        changes = (
            abs(now.measured.seconds / before.measured.seconds - 1.0)
            for now, before in zip(self.drifted, earlier.drifted, strict=True)
        )
        return splits[0] != splits[1] or any(change > self.threshold for change in changes)

    def shown(self) -> Iterator[RenderableType]:
        yield Text(str(self) if self.has_drifted else "All stages take as long as planned.")

    def numbers(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for each in self.stages:
            name = f"replica{each.replica}/stage{each.stage}"
            found |= {f"{name}/planned_seconds": each.planned.seconds, f"{name}/seconds": each.measured.seconds}
        return found

    def __str__(self) -> str:
        several = len({stage.replica for stage in self.stages}) > 1
        lines = []
        for stage in self.drifted:
            unit, (measured,), (planned,) = times([stage.measured.seconds], [stage.planned.seconds])
            where = f"stage {stage.stage}" + (f" of replica {stage.replica}" if several else "")
            who = f"{stage.device}, rank{'s' if len(stage.ranks) > 1 else ''} {spans(sorted(stage.ranks))}"
            lines.append(
                f"{where} ({who} on {stage.node}) takes {measured} {unit} per micro-batch, planned {planned} {unit} "
                f"({stage.ratio - 1:+.0%})"
            )
        return "\n".join([*lines, *map(str, self.changed_links), *self._on_the_plan()])

    def _on_the_plan(self) -> Iterator[str]:
        if self.proposal is None:
            return
        unit, (best,), (now,) = times([self.proposal.plan.iteration_seconds], [self.proposal.present_seconds])
        if self.proposal.gain <= 0:
            yield f"the present plan is still the best: {split_in_words(self.plan)} layers, {now} {unit} per iteration"
            return
        yield (
            f"best plan now: {split_in_words(self.proposal.plan)} layers, {best} {unit} per iteration; present: "
            f"{split_in_words(self.plan)}, {now} {unit}"
        )


def split_in_words(plan: Plan) -> str:
    """Layers per stage of each replica, once if they are the same: ``6+6`` or ``8 | 5+3``."""
    splits = ["+".join(map(str, replica.layers_per_stage)) for replica in plan.replicas]
    return splits[0] if len(set(splits)) == 1 else " | ".join(splits)


def compare(
    plan: Plan, times_of: Mapping[int, PassSeconds | float], threshold: float, links: tuple[LinkDrift, ...] = ()
) -> DriftReport:
    """Compare what ranks measured with ``plan``: times, or where they are idle, how many times slower they are."""
    measured = {rank: each for rank, each in times_of.items() if isinstance(each, PassSeconds)}
    idle: dict[tuple[int, ...], float] = {
        (rank,): each for rank, each in times_of.items() if not isinstance(each, PassSeconds)
    }
    stages = []
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(replica.stages):
            found = [measured[rank] for rank in stage.ranks if rank in measured]
            planned = PassSeconds(stage.forward_seconds, stage.backward_seconds)
            if found and planned.seconds > 0:
                slowest = max(found, key=lambda each: each.seconds)
                stages.append(StageDrift(number, index, stage.ranks, stage.device, stage.node, planned, slowest))
    return DriftReport(threshold, plan, tuple(stages), links, idle)


# Drift watch ---------------------------------------------------------------------------------------------------------


WARMUP_ITERATIONS = 2  # not measured, because they allocate memory and exchange shapes

_Pass = tuple[Any, Any]  # events at the start and at the end of a pass


class StageClock:
    """Times the forward and backward passes of 1F1B or of one stage, without waiting for other stages between them.
    Events are read when the device has reached them, so that the host never waits. The times of an iteration are means
    over its micro-batches: if a device is stopped now and then, the mean shows it, but the median rarely does."""

    def __init__(self, schedule: Any) -> None:
        self._passes: tuple[list[_Pass], list[_Pass]] = [], []  # forward and backward
        self._running: deque[tuple[list[_Pass], list[_Pass]]] = deque()
        self._finished: list[PassSeconds] = []
        for number, name in enumerate(("forward_step", "backward_step")):
            wrap_method(schedule, name, partial(self._timed, number))

    def _timed(self, number: int, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return step(*args, **kwargs)
        start = recorded_event()
        result = step(*args, **kwargs)
        self._passes[number].append((start, recorded_event()))
        return result

    def end_iteration(self, counts: bool = True) -> None:
        """End an iteration: the passes since the last call. They are dropped unless the iteration ``counts``."""
        if counts and all(self._passes):
            self._running.append(self._passes)
        self._passes = [], []
        while self._running and all(passes[-1][1].query() for passes in self._running[0]):
            self._finished.append(PassSeconds(*(_mean_seconds(passes) for passes in self._running.popleft())))

    def read(self) -> PassSeconds | None:
        """The medians over the iterations whose times were read since the last call; None if there are none."""
        finished, self._finished = self._finished, []
        if not finished:
            return None
        return PassSeconds(
            median(each.forward_seconds for each in finished), median(each.backward_seconds for each in finished)
        )


class IdleClock:
    """Tells how many times slower the device of an idle rank is than with ``rate`` (:meth:`work_per_second`), the speed
    that the plan knows of; it looks every :data:`CALM` steps."""

    def __init__(self, rate: float) -> None:
        self._rate, self._present, self._iterations = rate, rate, 0

    def end_iteration(self, counts: bool = True) -> None:
        self._iterations += 1
        if self._iterations % CALM == 0:
            self._present = self.work_per_second()

    def read(self) -> float:
        return self._rate / self._present

    def settled(self) -> IdleClock:
        """A clock for a plan that knows what this one tells."""
        return IdleClock(self._present)

    @staticmethod
    def work_per_second() -> float:
        return sustained_flops(get_accelerator().get_current_device())


def _mean_seconds(passes: list[_Pass]) -> float:
    return sum(start.elapsed_time(end) for start, end in passes) * 1e-3 / len(passes)


class DriftWatch:
    """Compares the times of stages, and of links if the machines are known, with the plan after every ``interval``
    iterations. If ``propose`` finds better plans, what differs is printed with one. Used by all ranks; ``passes`` is
    the schedule of this rank's passes, or the clock of an idle rank."""

    def __init__(
        self,
        passes: Any,
        plan: Plan,
        topology: Topology | None,
        threshold: float,
        interval: int,
        propose: Callable[[DriftReport], Proposal | None] | None,
    ) -> None:
        self.interval = interval
        self.report: DriftReport | None = None  # the last one
        self._clock = passes if isinstance(passes, IdleClock) else StageClock(passes)
        has_links = topology is not None and hasattr(passes, "comm")
        self._links = LinkClock(passes.comm) if has_links else None
        self._plan, self._topology, self._threshold, self._propose = plan, topology, threshold, propose
        self._iterations = 0
        self._printed: DriftReport | None = None

    def tick(self) -> None:
        """Note the end of an iteration; after every ``interval`` of them this is collective."""
        for clock in (self._clock, self._links):
            if clock is not None:
                clock.end_iteration(counts=self._iterations >= WARMUP_ITERATIONS)
        self._iterations += 1
        if self._iterations % self.interval == 0:
            self._compare(self._iterations // self.interval)

    def _compare(self, epoch: int) -> None:
        found = of_every_rank((self._clock.read(), {} if self._links is None else self._links.read()))
        measured = {rank: each for rank, (each, _) in enumerate(found) if each is not None}
        if not measured:
            return
        messages = [each for _, each in found]
        links = () if self._topology is None else compare_links(self._plan, self._topology, messages)
        self.report = compare(self._plan, measured, self._threshold, links)
        if self._propose is None:
            return
        if self.report.has_drifted:
            self.report = replace(self.report, proposal=self._propose(self.report))
        changed = self.report.differs_from(self._printed)
        if changed or not self.report.has_drifted:
            self._printed = self.report if self.report.has_drifted else None
        if changed:
            print_on_rank_0(f"epoch {epoch}: measured times differ from the plan\n{self.report}")
