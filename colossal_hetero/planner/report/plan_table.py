"""What a plan says, for people: a table of its stages, the plans that came next, and a layout on one line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...io.text import aligned, byte_unit, count, spans, times
from ..plans.plan import Plan, Replica, StagePlan
from .launch_commands import training_call

__all__ = [
    "ReplicaGroup",
    "Row",
    "layout",
    "one_line",
    "render",
    "replica_groups",
    "rows",
    "short_ranks",
    "training_call",
]

MAX_PARTS = 8
"""Parts of a pipeline that a one-line layout has, at the most."""

MAX_ROWS = 16
"""Stages that a table has before alike ones share a row."""


class Ranked(Protocol):
    """A plan among others, and why it is not the best."""

    @property
    def plan(self) -> Plan: ...

    @property
    def reason(self) -> str: ...


@dataclass(frozen=True)
class ReplicaGroup:
    """Replicas that are alike but for their ranks and nodes."""

    numbers: tuple[int, ...]
    replicas: tuple[Replica, ...]

    @property
    def first(self) -> Replica:
        """One of them."""
        return self.replicas[0]


def replica_groups(plan: Plan) -> list[ReplicaGroup]:
    """Replicas by what they do, in the order of their first ones; numbers that agree in three digits are equal."""
    groups: dict[object, list[int]] = {}
    for number, replica in enumerate(plan.replicas):
        key = (replica.micro_batches, tuple(_looks(stage) for stage in replica.stages))
        groups.setdefault(key, []).append(number)
    return [
        ReplicaGroup(tuple(numbers), tuple(plan.replicas[number] for number in numbers)) for numbers in groups.values()
    ]


def _looks(stage: StagePlan) -> tuple[object, ...]:
    numbers = (stage.forward_seconds, stage.backward_seconds, stage.transfer_seconds, stage.update_seconds)
    return (
        stage.device,
        stage.blocks,
        *(f"{number:.3g}" for number in (*numbers, stage.memory_bytes, stage.memory_available_bytes)),
    )


def one_line(plan: Plan) -> str:
    """The layout and what it is predicted to reach, e.g. ``tp 4 · dp 2 × pp [A100-40 0-15 | V100-16 16-23] ·
    micro-batch 4 × 16 · 1.230 s (104.1 samples/s)``; layers are numbered, first and last."""
    unit, (seconds,) = times([plan.iteration_seconds])
    return f"{layout(plan)} · {seconds} {unit} ({aligned([plan.samples_per_second])[0]} samples/s)"


def layout(plan: Plan) -> str:
    """:func:`one_line` without what is predicted."""
    shapes: dict[tuple[str, int], int] = {}
    for replica in plan.replicas:
        shape = (_pipeline(replica), replica.micro_batches)
        shapes[shape] = shapes.get(shape, 0) + 1
    counts = {micro_batches for _, micro_batches in shapes}
    alike = len(counts) == 1
    parts = []
    for (pipeline, micro_batches), number in list(shapes.items())[:MAX_PARTS]:
        times_ = "" if number == 1 and len(shapes) > 1 else f"{number} × "
        parts.append(f"{times_}{pipeline}{'' if alike else f' × {micro_batches}'}")
    if len(shapes) > MAX_PARTS:
        parts.append("…")
    replicas = f"dp {parts[0]}" if len(shapes) == 1 else f"dp {len(plan.replicas)} = {' + '.join(parts)}"
    steps = f" × {counts.pop()}" if alike else ""
    return f"tp {plan.tensor_parallel} · {replicas} · micro-batch {plan.micro_batch}{steps}"


def _pipeline(replica: Replica) -> str:
    """``pp [A100-40 0-15 | V100-16 16-23]``; "4 × T4 0-7" for four stages of one kind that hold two layers each."""
    parts = []
    for (device, _), run in itertools.groupby(replica.stages, key=lambda stage: (stage.device, _layers(stage))):
        stages = list(run)
        start, stop = stages[0].blocks[0], stages[-1].blocks[1]
        layers = str(start) if stop - start == 1 else f"{start}-{stop - 1}"
        parts.append(f"{f'{len(stages)} × ' if len(stages) > 1 else ''}{device} {layers}")
    if len(parts) > MAX_PARTS:
        parts = [*parts[: MAX_PARTS - 2], "…", parts[-1]]
    return f"pp [{' | '.join(parts)}]"


def _layers(stage: StagePlan) -> int:
    return stage.blocks[1] - stage.blocks[0]


@dataclass(frozen=True)
class Row:
    """A line of the table: a stage, or several that are alike, of alike replicas."""

    replicas: tuple[int, ...]
    micro_batches: int
    stages: tuple[int, ...]
    device: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    blocks: tuple[int, int]
    memory_bytes: tuple[float, float]
    """Least and most of its stages."""
    available_bytes: float
    compute_seconds: float
    """Forward and backward of a micro-batch, the longest of its stages."""
    transfer_seconds: float
    bubble_shares: tuple[float, float]


def rows(plan: Plan) -> list[Row]:
    """What the table shows; stages of a kind that hold equally many layers share a row only in large plans."""
    groups = replica_groups(plan)
    fold = sum(len(group.first.stages) for group in groups) > MAX_ROWS
    lines = []
    for group in groups:
        bubbles = group.first.bubble_shares
        stages = list(enumerate(group.first.stages))
        runs = (
            [list(run) for _, run in itertools.groupby(stages, key=lambda each: (each[1].device, _layers(each[1])))]
            if fold
            else [[each] for each in stages]
        )
        for run in runs:
            numbers = [index for index, _ in run]
            members = [stage for _, stage in run]
            every = [replica.stages[index] for replica in group.replicas for index in numbers]
            shares = [bubbles[index] for index in numbers]
            memory = [stage.memory_bytes for stage in members]
            lines.append(
                Row(
                    replicas=group.numbers,
                    micro_batches=group.first.micro_batches,
                    stages=tuple(numbers),
                    device=members[0].device,
                    nodes=tuple(dict.fromkeys(stage.node for stage in every)),
                    ranks=tuple(sorted(rank for stage in every for rank in stage.ranks)),
                    blocks=(members[0].blocks[0], members[-1].blocks[1]),
                    memory_bytes=(min(memory), max(memory)),
                    available_bytes=min(stage.memory_available_bytes for stage in every),
                    compute_seconds=max(stage.forward_seconds + stage.backward_seconds for stage in members),
                    transfer_seconds=max(stage.transfer_seconds for stage in members),
                    bubble_shares=(min(shares), max(shares)),
                )
            )
    return lines


def render(candidates: Sequence[Ranked]) -> RenderableType:
    """The first plan's stages and totals, and those that came next with the reasons.

    Args:
        candidates: best first, at least one.
    """
    plan = candidates[0].plan
    parts: list[RenderableType] = [_title(plan), _stages(plan)]
    parts += [Text(line) for line in (*_totals(plan), *plan.notes)]
    if len(candidates) > 1:
        parts += [Text(""), _runners_up(candidates)]
    return Group(*parts)


def _title(plan: Plan) -> Text:
    counts = sorted({replica.micro_batches for replica in plan.replicas})
    steps = count(counts[0], "micro-batch") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} micro-batches"
    return Text.assemble(
        (plan.model, "bold"),
        f", {plan.precision}: {count(plan.blocks, 'layer')} on {count(plan.world_size, 'device')}, a global batch of "
        f"{count(plan.global_batch, 'sample')} as {count(len(plan.replicas), 'replica')} × {steps} of "
        f"{plan.micro_batch}; method {plan.method}, tensor parallel {plan.tensor_parallel}",
    )


def _stages(plan: Plan) -> Table:
    lines = rows(plan)
    second, compute, transfer = times(
        [line.compute_seconds for line in lines], [line.transfer_seconds for line in lines]
    )
    size, unit = byte_unit(max(line.available_bytes for line in lines))
    many = len(plan.replicas) > 1
    unequal = len({replica.micro_batches for replica in plan.replicas}) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    if many:
        table.add_column("\nreplica", overflow="fold", min_width=7)
    if unequal:
        table.add_column("micro-\nbatches", justify="right", no_wrap=True)
    table.add_column("\nstage", no_wrap=True)
    table.add_column("\ndevice", overflow="fold", min_width=min(max(len(_kind(line)) for line in lines), 18))
    table.add_column("\nnode", overflow="fold", min_width=4)
    table.add_column("\nranks", overflow="fold", min_width=5)
    # As texts: what is in brackets would be taken for markup in a string.
    for name in ("layers\n[a, b)", f"memory\n[{unit}]", f"fwd+bwd\n[{second}]", f"transfer\n[{second}]", "\nbubble"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for index, line in enumerate(lines):
        same = index > 0 and lines[index - 1].replicas == line.replicas
        if index > 0 and not same:
            table.add_section()
        cells = []
        if many:
            cells.append("" if same else _replicas(line.replicas))
        if unequal:
            cells.append("" if same else str(line.micro_batches))
        cells += [
            spans(line.stages),
            _kind(line),
            _nodes(line.nodes),
            short_ranks(line.ranks),
            f"[{line.blocks[0]}, {line.blocks[1]})",
            f"{_range([each / size for each in line.memory_bytes])} of {line.available_bytes / size:.1f}",
            compute[index],
            transfer[index],
            _percent(line.bubble_shares),
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _kind(row: Row) -> str:
    return f"{len(row.stages)} × {row.device}" if len(row.stages) > 1 else row.device


def _replicas(numbers: Sequence[int]) -> str:
    return f"{spans(numbers, 3)} (×{len(numbers)})" if len(numbers) > 1 else str(numbers[0])


def _nodes(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … ({len(names)})"


def short_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks in few characters: "0-3", "0-3, 8-11", of more stretches "0-3 … 59 (16)"."""
    text = spans(ranks)
    parts = text.split(", ")
    return text if len(parts) <= 2 else f"{parts[0]} … {ranks[-1]} ({len(ranks)})"


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.1f}" for value in values)
    return low if low == high else f"{low}-{high}"


def _percent(shares: tuple[float, float]) -> str:
    low, high = (f"{share:.0%}" for share in shares)
    return low if low == high else f"{low[:-1]}-{high}"


def _totals(plan: Plan) -> list[str]:
    longest = max(replica.pipeline_seconds for replica in plan.replicas)
    unit, (iteration, pipeline, synchronization) = times(
        [plan.iteration_seconds, longest, plan.synchronization_seconds]
    )
    devices = [
        (len(stage.ranks), share)
        for replica in plan.replicas
        for stage, share in zip(replica.stages, replica.bubble_shares, strict=True)
    ]
    bubble = sum(number * share for number, share in devices) / sum(number for number, _ in devices)
    speed = aligned([plan.samples_per_second])[0]
    summed = "" if len(plan.replicas) == 1 else f" + synchronization {synchronization} {unit}"
    lines = [
        f"predicted: an iteration of {iteration} {unit}, {speed} samples/s "
        f"(pipeline {pipeline} {unit}{summed}; bubble {bubble:.0%} on average)"
    ]
    if plan.uniform_seconds is not None:
        _, (uniform,) = times([plan.uniform_seconds])
        uniform_unit = times([plan.uniform_seconds])[0]
        ratio = plan.uniform_seconds / plan.iteration_seconds
        lines.append(f"{ratio:.2f} × as fast as the best plan with uniform stages ({uniform} {uniform_unit})")
    return lines


def _runners_up(candidates: Sequence[Ranked]) -> Table:
    plans = [each.plan for each in candidates]
    unit, seconds = times([plan.iteration_seconds for plan in plans])
    best = plans[0].iteration_seconds
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("\nlayout", overflow="fold", ratio=3)
    table.add_column(Text(f"iteration\n[{unit}]"), justify="right", no_wrap=True)
    table.add_column("\n× best", justify="right", no_wrap=True)
    table.add_column("\nreason", overflow="fold", ratio=2)
    for index, each in enumerate(candidates):
        # Differences that the digits do not show are told as such.
        ratio = each.plan.iteration_seconds / best
        shown = f"{ratio:.2f}" if index == 0 or round(ratio, 2) > 1 or math.isclose(ratio, 1.0) else f"{ratio:.4f}"
        table.add_row(
            str(index + 1),
            Text(layout(each.plan)),
            seconds[index],
            shown,
            Text(each.reason),
            style="bold" if index == 0 else None,
        )
    return table
