"""Compares the times of a pipeline's stages with the plan, and proposes a new split of the layers if they differ. The
proposal follows ADAPT for devices whose speed changes (chapter 6): the costs of the layers in a stage are scaled by the
stage's measured time / planned time, and the layers are divided again. Stages keep their ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.text import Text

from ...colossalai_support.accelerator import recorded_event
from ...common.methods import wrap_method
from ...common.ranks import of_every_rank, print_on_rank_0
from ...common.text import spans, times
from ...planner.cluster.topology import Channel
from ...planner.cost.plan import Plan, Replica, StagePlan
from ...planner.profile.layer_costs import LayerCosts
from ...planner.profile.layer_profile import ModelProfile
from ...planner.stages.pipeline import Slot, evaluate
from ...planner.stages.split_methods import split


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
class Proposal:
    """The split of the layers with the shortest predicted time, given the measured speeds of the stages."""

    layers_per_stage: tuple[int, ...]
    seconds: float  # predicted time of one iteration, see :func:`.evaluate`
    present_seconds: float  # the same with the present split
    basis: str  # source of the layers' costs: "profile" or "plan"


@dataclass(frozen=True)
class DriftReport:
    threshold: float  # relative difference beyond which a stage has drifted (0.2 = 20 %)
    layers_per_stage: tuple[int, ...]  # the present split
    stages: tuple[StageDrift, ...]  # all measured stages, ordered by replica and stage
    proposal: Proposal | None  # None if no stage has drifted, not all stages were measured, or no split fits in memory

    @property
    def drifted(self) -> tuple[StageDrift, ...]:
        return tuple(stage for stage in self.stages if abs(stage.ratio - 1.0) > self.threshold)

    def differs_from(self, earlier: DriftReport | None) -> bool:
        """True if ``earlier`` has other drifted stages, a time changed by more than the threshold, or another split."""
        if earlier is None or [each.ranks for each in self.drifted] != [each.ranks for each in earlier.drifted]:
            return bool(self.drifted)
        splits = [each.proposal and each.proposal.layers_per_stage for each in (self, earlier)]
        changes = (
            abs(now.measured.seconds / before.measured.seconds - 1.0)
            for now, before in zip(self.drifted, earlier.drifted, strict=True)
        )
        return splits[0] != splits[1] or any(change > self.threshold for change in changes)

    def shown(self) -> Iterator[RenderableType]:
        yield Text(str(self) if self.drifted else "All stages take as long as planned.")

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
        return "\n".join([*lines, self._on_the_split()])

    def _on_the_split(self) -> str:
        present = _as_text(self.layers_per_stage)
        if self.proposal is None:
            return f"no split of the layers other than {present} is known to fit in memory"
        unit, (best,), (now,) = times([self.proposal.seconds], [self.proposal.present_seconds])
        if self.proposal.layers_per_stage == self.layers_per_stage:
            return f"the split {present} is still the best: {now} {unit} per iteration"
        return (
            f"best split now: {_as_text(self.proposal.layers_per_stage)} layers, {best} {unit} per iteration; "
            f"present: {present}, {now} {unit}"
        )


def _as_text(layers: tuple[int, ...]) -> str:
    return "+".join(map(str, layers))


def compare(
    plan: Plan, measured: Mapping[int, PassSeconds], threshold: float, profile: ModelProfile | None = None
) -> DriftReport:
    """Compare the measured times of the stages with ``plan``, with a proposal if any stage has drifted."""
    stages = []
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(replica.stages):
            found = [measured[rank] for rank in stage.ranks if rank in measured]
            planned = PassSeconds(stage.forward_seconds, stage.backward_seconds)
            if found and planned.seconds > 0:
                slowest = max(found, key=lambda each: each.seconds)
                stages.append(StageDrift(number, index, stage.ranks, stage.device, stage.node, planned, slowest))
    report = DriftReport(threshold, plan.layers_per_stage, tuple(stages), None)
    if not report.drifted:
        return report
    base, compared = plan, report.stages
    if not plan.symmetric:
        drifted = max(report.drifted, key=lambda stage: stage.ratio).replica
        base = plan.model_copy(update={"replicas": (plan.replicas[drifted],)})
        compared = tuple(dataclasses.replace(stage, replica=0) for stage in stages if stage.replica == drifted)
    if len(compared) < len(base.replicas) * len(base.layers_per_stage):
        return report
    return DriftReport(threshold, base.layers_per_stage, tuple(stages), propose(base, compared, profile))


def propose(plan: Plan, stages: tuple[StageDrift, ...], profile: ModelProfile | None = None) -> Proposal | None:
    """The best split if every stage is as fast as in the slowest replica; None if no split fits in memory."""
    slowest = [
        max((each for each in stages if each.stage == index), key=lambda each: each.ratio)
        for index in range(len(plan.layers_per_stage))
    ]
    slots, hops, basis = _pipeline(plan, slowest, profile)
    pipeline = slots, hops, plan.replicas[0].micro_batches
    try:
        best = split(*pipeline)
    except ValueError:
        return None
    present = (0, *itertools.accumulate(plan.layers_per_stage))
    blocks = tuple(stop - start for start, stop in itertools.pairwise(best))
    return Proposal(blocks, evaluate(*pipeline, best).seconds, evaluate(*pipeline, present).seconds, basis)


def _pipeline(
    plan: Plan, slowest: list[StageDrift], profile: ModelProfile | None
) -> tuple[list[Slot], list[Channel], str]:
    """Slots of the stages, channels between neighbors, and the origin of the costs."""
    replica = plan.replicas[0]
    placed = [plan.replicas[each.replica].stages[each.stage] for each in slowest]
    basis = "plan"
    cuts = [(index > 0) + (index + 1 < len(placed)) for index in range(len(placed))]
    schedule = [stage.schedule_seconds / max(number, 1) for stage, number in zip(placed, cuts, strict=True)]
    whole = [_costs_of_mean(stage, plan.blocks) for stage in placed]
    if profile is not None and profile.blocks == plan.blocks:
        sizes, shards = (plan.tensor_parallel, plan.micro_batch), len(plan.replicas) if plan.zero_stage else 1
        with suppress(ValueError):  # the plan was made from another profile; its means per stage are used instead
            whole = [
                profile.costs(stage.device, *sizes, recompute=stage.recompute, zero_shards=shards) for stage in placed
            ]
            basis = "profile"
    slots = [
        Slot(
            f"stage {each.stage}",
            _scaled(costs, stage, each.measured, seconds),
            stage.memory_available_bytes - stage.memory_overhead_bytes,
        )
        for each, stage, costs, seconds in zip(slowest, placed, whole, schedule, strict=True)
    ]
    return slots, _channels(replica, [costs.output_bytes for costs in whole]), basis


def _costs_of_mean(stage: StagePlan, blocks: int) -> LayerCosts:
    """Costs of all blocks: each has the mean cost of the stage's blocks, and outputs of one byte."""
    each = np.full(blocks, 1.0 / (stage.blocks[1] - stage.blocks[0]))
    return LayerCosts(
        forward_seconds=each * stage.forward_seconds,
        backward_seconds=each * stage.backward_seconds,
        update_seconds=each * stage.update_seconds,
        state_bytes=each * (stage.memory_bytes - stage.memory_overhead_bytes),
        gradient_bytes=np.zeros(blocks),
        activation_bytes=np.zeros(blocks),
        output_bytes=np.ones(blocks),
    )


def _scaled(costs: LayerCosts, stage: StagePlan, measured: PassSeconds, schedule_seconds: float) -> LayerCosts:
    """``costs``, scaled such that the present blocks of the stage take the measured time; ``schedule_seconds``, the
    planned time of the schedule itself per cut, is scaled by the same ratio."""
    part = slice(*stage.blocks)

    def to(seconds: NDArray[np.float64], total: float) -> NDArray[np.float64]:
        present = float(seconds[part].sum())
        return seconds * (total / present) if present > 0 else seconds

    ratio = measured.seconds / (stage.forward_seconds + stage.backward_seconds)
    return dataclasses.replace(
        costs,
        forward_seconds=to(costs.forward_seconds, measured.forward_seconds),
        backward_seconds=to(costs.backward_seconds, measured.backward_seconds),
        update_seconds=to(costs.update_seconds, stage.update_seconds * ratio),
        schedule_seconds=schedule_seconds * ratio,
        temporary_bytes=0.0,  # like the buckets in the stage's overhead
        bucket_bytes=0.0,
    )


def _channels(replica: Replica, output_bytes: Sequence[NDArray[np.float64]]) -> list[Channel]:
    """Channels between neighbors in the present ``replica``, with the planned speed, whatever the size of the planned
    message was. ``output_bytes``: by stage, what it sends behind each block, ``[blocks]``."""
    channels = []
    for stage, sent, seconds in zip(replica.stages, output_bytes, replica.hop_seconds, strict=False):
        size = float(sent[stage.blocks[1] - 1])
        channels.append(Channel("as planned", size / seconds if seconds > 0 else np.inf))
    return channels


# Drift watch ---------------------------------------------------------------------------------------------------------


WARMUP_ITERATIONS = 2  # not measured, because they allocate memory and exchange shapes

_Pass = tuple[Any, Any]  # events at the start and at the end of a pass


class StageClock:
    """Times the forward and backward passes of a 1F1B schedule, without its waiting for other stages between them.
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


def _mean_seconds(passes: list[_Pass]) -> float:
    return sum(start.elapsed_time(end) for start, end in passes) * 1e-3 / len(passes)


class DriftWatch:
    """Compares the times of a pipeline's stages with the plan, epoch by epoch. Used by all ranks."""

    def __init__(
        self, schedule: Any, plan: Plan, threshold: float, profile: ModelProfile | None, interval: int
    ) -> None:
        self.interval = interval
        self.report: DriftReport | None = None  # for the last epoch that was measured
        self._clock = None if schedule is None else StageClock(schedule)
        self._plan, self._threshold, self._profile = plan, threshold, profile
        self._iterations = 0
        self._printed: DriftReport | None = None

    def tick(self) -> None:
        """Note the end of an iteration; at that of an epoch this is collective, and rank 0 prints what has changed."""
        if self._clock is not None:
            self._clock.end_iteration(counts=self._iterations >= WARMUP_ITERATIONS)
        self._iterations += 1
        if self._iterations % self.interval == 0:
            self._compare(self._iterations // self.interval)

    def _compare(self, epoch: int) -> None:
        times = of_every_rank(None if self._clock is None else self._clock.read())
        measured = {rank: each for rank, each in enumerate(times) if each is not None}
        if not measured:
            return
        self.report = compare(self._plan, measured, self._threshold, self._profile)
        changed = self.report.differs_from(self._printed)
        if changed or not self.report.drifted:
            self._printed = self.report if self.report.drifted else None
        if changed:
            print_on_rank_0(f"epoch {epoch}: stage times differ from the plan\n{self.report}")
