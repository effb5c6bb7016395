"""A plan as text: a table of its stages, a table of the next best plans, and the layout on one line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...common.text import aligned, byte_unit, count, spans, times
from ..cost.layout_line import device_in_words, joined_ranges, layout_of, write_layout
from ..cost.plan import Plan, Replica, StagePlan
from ..cost.ranked_plan import CERTAIN, RankedPlan
from ..cost.simulate import PlanSimulation

__all__ = [
    "ReplicaGroup",
    "Row",
    "layout",
    "one_line",
    "ranges_in_words",
    "render",
    "render_replanning",
    "render_simulation",
    "replica_groups",
    "rows",
    "short_ranks",
]

MAX_ROWS = 16
"""Number of stages above which consecutive ones of one kind with equally many layers share a row."""


@dataclass(frozen=True)
class ReplicaGroup:
    """Replicas that differ only in their ranks and nodes."""

    numbers: tuple[int, ...]
    replicas: tuple[Replica, ...]

    @property
    def first(self) -> Replica:
        return self.replicas[0]


def replica_groups(plan: Plan) -> list[ReplicaGroup]:
    """Groups of replicas that are alike, by their first members. Numbers that agree in three digits count as equal."""
    groups: dict[object, list[int]] = {}
    for number, replica in enumerate(plan.replicas):
        key = (replica.micro_batches, tuple(_shown(stage) for stage in replica.stages))
        groups.setdefault(key, []).append(number)
    return [
        ReplicaGroup(tuple(numbers), tuple(plan.replicas[number] for number in numbers)) for numbers in groups.values()
    ]


def _shown(stage: StagePlan) -> tuple[object, ...]:
    numbers = (stage.forward_seconds, stage.backward_seconds, stage.transfer_seconds, stage.schedule_seconds)
    return (
        *_form(stage),
        stage.block_ranges,
        *(
            f"{number:.3g}"
            for number in (*numbers, stage.update_seconds, stage.memory_bytes, stage.memory_available_bytes)
        ),
    )


def one_line(plan: Plan) -> str:
    """The layout with the first and last layer of each part of a pipeline, predicted iteration time and samples per
    second.

    For example: ``tp 4 · dp 2 × pp [A100-40 0-15 | V100-16 16-23] · micro-batch 4 × 16 · 1.230 s (104.1 samples/s)``.
    """
    unit, (seconds,) = times([plan.iteration_seconds])
    return f"{layout(plan)} · {seconds} {unit} ({aligned([plan.samples_per_second])[0]} samples/s)"


def layout(plan: Plan) -> str:
    """:func:`one_line` without the predicted times; a schedule other than 1F1B is named at the end."""
    return write_layout(layout_of(plan), shortened=True)


def _form(stage: StagePlan) -> tuple[object, ...]:
    layers = tuple(stop - start for start, stop in stage.block_ranges)
    return stage.device, stage.recompute, layers


@dataclass(frozen=True)
class Row:
    """A row of the table: a stage, or several similar stages, of replicas that are alike."""

    replicas: tuple[int, ...]
    micro_batches: int
    """Per replica and iteration."""
    stages: tuple[int, ...]
    device: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    block_ranges: tuple[tuple[int, int], ...]
    """``[a, b)``: all blocks of these stages, in several ranges if stages hold several chunks."""
    memory_bytes: tuple[float, float]
    """Per device: the smallest and the largest of these stages."""
    available_bytes: float
    compute_seconds: float
    """Forward, backward and schedule of a micro-batch: the longest of these stages."""
    transfer_seconds: float
    """Of a micro-batch: the longest of these stages."""
    bubble_shares: tuple[float, float]
    """Share of the iteration in which a stage waits: the smallest and the largest of these stages."""


def rows(plan: Plan) -> list[Row]:
    groups = replica_groups(plan)
    fold = sum(len(group.first.stages) for group in groups) > MAX_ROWS
    lines = []
    for group in groups:
        bubbles = group.first.bubble_shares
        stages = list(enumerate(group.first.stages))
        runs = (
            [list(run) for _, run in itertools.groupby(stages, key=lambda each: _form(each[1]))]
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
                    device=device_in_words(members[0].device, members[0].recompute),
                    nodes=tuple(dict.fromkeys(stage.node for stage in every)),
                    ranks=tuple(sorted(rank for stage in every for rank in stage.ranks)),
                    block_ranges=joined_ranges([stage.block_ranges for stage in members]),
                    memory_bytes=(min(memory), max(memory)),
                    available_bytes=min(stage.memory_available_bytes for stage in every),
                    compute_seconds=max(
                        stage.forward_seconds + stage.backward_seconds + stage.schedule_seconds for stage in members
                    ),
                    transfer_seconds=max(stage.transfer_seconds for stage in members),
                    bubble_shares=(min(shares), max(shares)),
                )
            )
    return lines


def render(plans: Sequence[RankedPlan]) -> RenderableType:
    plan = plans[0].plan
    parts: list[RenderableType] = [_title(plan), _stages(plan)]
    parts += [Text(line) for line in (*_totals(plan), *plan.notes)]
    if len(plans) > 1:
        parts += [Text(""), _ranking(plans)]
    return Group(*parts)


def _title(plan: Plan) -> Text:
    counts = sorted({replica.micro_batches for replica in plan.replicas})
    steps = count(counts[0], "micro-batch") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} micro-batches"
    schedule = (
        "" if plan.schedule == "1f1b" else f", schedule {plan.schedule} with {plan.chunks_per_stage} chunks per stage"
    )
    return Text.assemble(
        (plan.model, "bold"),
        f", {plan.precision}: {count(plan.blocks, 'layer')} on {count(plan.world_size, 'device')}, a global batch of "
        f"{count(plan.global_batch, 'sample')} as {count(len(plan.replicas), 'replica')} × {steps} of "
        f"{plan.micro_batch}; method {plan.method}, tensor parallel {plan.tensor_parallel}{schedule}"
        f"{', ZeRO stage 1' if plan.zero_stage else ''}",
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
    # As Text objects: in a string, brackets would be markup.
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
            ranges_in_words(line.block_ranges),
            f"{_range([each / size for each in line.memory_bytes])} of {line.available_bytes / size:.1f}",
            compute[index],
            transfer[index],
            _percent(line.bubble_shares),
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def ranges_in_words(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"[{start}, {stop})" for start, stop in ranges)


def _kind(row: Row) -> str:
    return f"{len(row.stages)} × {row.device}" if len(row.stages) > 1 else row.device


def _replicas(numbers: Sequence[int]) -> str:
    return f"{spans(numbers, 3)} (×{len(numbers)})" if len(numbers) > 1 else str(numbers[0])


def _nodes(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … ({len(names)})"


def short_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks in few characters: "0-3", "0-3, 8-11", and with more than two ranges "0-3 … 59 (16)"."""
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
    sure = "" if plan.relative_error is None else f" ± {CERTAIN * plan.relative_error:.1%}"
    lines = [
        f"predicted: an iteration of {iteration} {unit}{sure}, {speed} samples/s "
        f"(pipeline {pipeline} {unit}{summed}; bubble {bubble:.0%} on average)"
    ]
    if plan.uniform_seconds is not None:
        _, (uniform,) = times([plan.uniform_seconds])
        uniform_unit = times([plan.uniform_seconds])[0]
        ratio = plan.uniform_seconds / plan.iteration_seconds
        lines.append(f"{ratio:.2f} × as fast as the best plan with uniform stages ({uniform} {uniform_unit})")
    if plan.gap is not None:
        lines.append(f"within {max(plan.gap, 0.001):.1%} of the best possible under this model")
    return lines


def _ranking(ranked: Sequence[RankedPlan]) -> Table:
    plans = [each.plan for each in ranked]
    unit, seconds = times([plan.iteration_seconds for plan in plans])
    best = plans[0].iteration_seconds
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("\nlayout", overflow="fold", ratio=3)
    table.add_column(Text(f"iteration\n[{unit}]"), justify="right", no_wrap=True)
    table.add_column("× best\ntime", justify="right", no_wrap=True)
    table.add_column("\nreason", overflow="fold", ratio=2)
    several = len({plan.precision for plan in plans}) > 1
    for index, each in enumerate(ranked):
        ratio = each.plan.iteration_seconds / best
        shown = f"{ratio:.2f}" if index == 0 or round(ratio, 2) > 1 or math.isclose(ratio, 1.0) else f"{ratio:.4f}"
        table.add_row(
            str(index + 1),
            Text(f"{layout(each.plan)}{f' · {each.plan.precision}' if several else ''}"),
            seconds[index],
            shown,
            Text(each.reason),
            style="bold" if index == 0 else None,
        )
    return table


# Simulation table ----------------------------------------------------------------------------------------------------

MAX_SIMULATED_ROWS = 64


def render_simulation(simulation: PlanSimulation, without: PlanSimulation | None = None) -> RenderableType:
    """A row for each stage of different replicas, and iteration times by simulation and closed form (1F1B)."""
    plan = simulation.plan
    parts: list[RenderableType] = [Text.assemble((plan.model, "bold"), f": {layout(plan)}")]
    if simulation.slow:
        ranks = ", ".join(f"rank {rank} slowed {factor:g} ×" for rank, factor in sorted(simulation.slow.items()))
        parts.append(Text(f"with {ranks}"))
    parts += [_simulated_stages(simulation), *(Text(line) for line in _simulated_totals(simulation, without))]
    return Group(*parts)


def render_replanning(present: PlanSimulation, best: PlanSimulation) -> str:
    unit, (now, planned) = times([present.seconds, best.seconds])
    if best is present:
        return f"planned again for these ranks: no plan is faster than the present one ({now} {unit})"
    return (
        f"planned again for these ranks: {planned} {unit} instead of {now} {unit} "
        f"({present.seconds / best.seconds:.2f} × as fast): {layout(best.plan)}"
    )


def _simulated_stages(simulation: PlanSimulation) -> Table:
    plan, whole = simulation.plan, simulation.seconds
    groups = replica_groups(plan)
    lines = [(group, index) for group in groups for index in range(len(group.first.stages))]
    shown = lines[:MAX_SIMULATED_ROWS]
    columns: list[list[float]] = [[], [], [], []]
    for group, index in shown:
        timeline = simulation.timelines[group.numbers[0]]
        share = timeline.shares[index]
        compute, transfer = share.compute * timeline.seconds, share.transfer * timeline.seconds
        idle = max(whole - compute - transfer - plan.synchronization_seconds, 0.0)
        for column, value in zip(columns, (compute, transfer, idle, plan.synchronization_seconds), strict=True):
            column.append(value)
    unit, *texts = times(*columns)
    many = len(plan.replicas) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in (*(["\nreplica"] if many else []), "\nstage", "\ndevice", "\nranks"):
        table.add_column(name, overflow="fold")
    names = ("layers\n[a, b)", f"busy\n[{unit}]", f"transfer\n[{unit}]", f"idle\n[{unit}]")
    for name in (*names, *([f"sync.\n[{unit}]"] if many else []), "idle\n[%]"):
        # In a plain string rich would read the brackets as markup.
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row, (group, index) in enumerate(shown):
        stage = group.first.stages[index]
        if row and index == 0:
            table.add_section()
        ranks = sorted(rank for replica in group.replicas for rank in replica.stages[index].ranks)
        number = f" (×{len(group.numbers)})" if len(group.numbers) > 1 else ""
        cells = [f"{short_ranks(group.numbers)}{number}" if index == 0 else ""] if many else []
        cells += [
            str(index),
            device_in_words(stage.device, stage.recompute),
            short_ranks(ranks),
            ranges_in_words(stage.block_ranges),
        ]
        cells += [column[row] for column in texts[: 4 if many else 3]]
        cells.append(f"{100 * columns[2][row] / whole:.0f}")
        table.add_row(*(Text(cell) for cell in cells))
    if len(shown) < len(lines):
        table.caption = f"{len(shown)} of {count(len(lines), 'stage')}"
    return table


def _simulated_totals(simulation: PlanSimulation, without: PlanSimulation | None) -> list[str]:
    plan = simulation.plan
    unit, (simulated, closed) = times([simulation.seconds, plan.iteration_seconds])
    off = plan.iteration_seconds / simulation.seconds - 1
    (speed,) = aligned([plan.global_batch / simulation.seconds])
    line = f"iteration time by event simulation: {simulated} {unit} ({speed} samples/s)"
    if plan.schedule == "1f1b":
        lines = [f"{line}; by the closed form: {closed} {unit} ({off:+.1%})"]
    else:
        lines = [f"{line}; stages compute while they send, as Colossal-AI's schedule {plan.schedule} does"]
    if without is not None:
        unit, (before,) = times([without.seconds])
        ratio = simulation.seconds / without.seconds
        lines.append(f"without slow ranks: {before} {unit}; with them the iteration takes {ratio:.2f} × as long")
    return lines
