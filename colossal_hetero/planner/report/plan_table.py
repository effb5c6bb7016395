"""Plans as text: layouts on one line, and tables of stages, plans, simulations, prices and profiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...common.tables import make_table, number_column, word_column
from ...common.text import aligned, byte_unit, count, duration, spans, times
from ..cost.evaluate import HOUR, EvaluatedPlan, devices_in_words, differences
from ..cost.layout_line import device_in_words, joined_ranges, layout_of, write_layout
from ..cost.plan import Plan, StagePlan
from ..cost.ranked_plan import CERTAIN, RankedPlan
from ..cost.simulate import PlanSimulation
from ..profile.layer_profile import LayerTimes, ModelProfile

if TYPE_CHECKING:
    from ..solver.pareto_front import FrontPoint, NodeType

MAX_ROWS = 16  # number of stages above which consecutive ones of one kind with equally many layers share a row


def one_line(plan: Plan) -> str:
    """The layout with predicted iteration time and samples per second.

    For example: ``tp 4 · dp 2 × pp [A100-40 0-15 | V100-16 16-23] · micro-batch 4 × 16 · 1.230 s (104.1 samples/s)``.
    """
    return f"{layout(plan)} · {duration(plan.iteration_seconds)} ({aligned([plan.samples_per_second])[0]} samples/s)"


def layout(plan: Plan) -> str:
    """:func:`one_line` without the predicted times."""
    return write_layout(layout_of(plan), shortened=True)


def short_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks in few characters: "0-3", "0-3, 8-11", and with more than two ranges "0-3 … 59 (16)"."""
    text = spans(ranks)
    parts = text.split(", ")
    return text if len(parts) <= 2 else f"{parts[0]} … {ranks[-1]} ({len(ranks)})"


# Stages --------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Consecutive stages of one form, of replicas that are alike: a row of the table."""

    replicas: tuple[int, ...]
    numbers: tuple[int, ...]
    stages: tuple[StagePlan, ...]  # of the first of these replicas
    everywhere: tuple[StagePlan, ...]  # of all of them

    @property
    def device(self) -> str:
        return device_in_words(self.stages[0].device, self.stages[0].recompute)

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for stage in self.everywhere for rank in stage.ranks)

    @property
    def layers(self) -> str:
        """``[a, b)``: all blocks of these stages, in several ranges if stages hold several chunks."""
        ranges = joined_ranges([stage.block_ranges for stage in self.stages])
        return ", ".join(f"[{start}, {stop})" for start, stop in ranges)


def alike_replicas(plan: Plan) -> list[tuple[int, ...]]:
    """Numbers of replicas that differ only in ranks and nodes. Times that agree in three digits count as equal."""
    groups: dict[object, list[int]] = {}
    for number, replica in enumerate(plan.replicas):
        key = (replica.micro_batches, tuple(_shown(stage) for stage in replica.stages))
        groups.setdefault(key, []).append(number)
    return [tuple(numbers) for numbers in groups.values()]


def _shown(stage: StagePlan) -> tuple[object, ...]:
    seconds = (stage.forward_seconds, stage.backward_seconds, stage.transfer_seconds, stage.update_seconds)
    numbers = (*seconds, stage.memory_bytes, stage.memory_available_bytes)
    return (*_form(stage), stage.block_ranges, *(f"{number:.3g}" for number in numbers))


def _form(stage: StagePlan) -> tuple[object, ...]:
    return stage.device, stage.recompute, tuple(stop - start for start, stop in stage.block_ranges)


def rows(plan: Plan) -> list[Row]:
    groups = alike_replicas(plan)
    fold = sum(len(plan.replicas[numbers[0]].stages) for numbers in groups) > MAX_ROWS
    found = []
    for replicas in groups:
        stages = plan.replicas[replicas[0]].stages
        runs = itertools.groupby(range(len(stages)), key=lambda each: _form(stages[each]) if fold else each)
        for numbers in (tuple(run) for _, run in runs):
            everywhere = tuple(plan.replicas[replica].stages[number] for replica in replicas for number in numbers)
            found.append(Row(replicas, numbers, tuple(stages[number] for number in numbers), everywhere))
    return found


def _stage_table(plan: Plan, rows: Sequence[Row], numbers: Mapping[str, Sequence[str]]) -> Table:
    """A row for each of ``rows``, with further columns of these titles."""
    columns = [word_column(title) for title in ("replica", "stage", "device", "node", "ranks")]
    columns += [number_column(title) for title in ("layers\n[a, b)", *numbers)]
    single = len(plan.replicas) == 1
    lines: list[Sequence[str] | None] = []
    for line, *cells in zip(rows, *numbers.values(), strict=True):
        is_first = 0 in line.numbers
        if is_first and lines:
            lines.append(None)
        alike = f" (×{len(line.replicas)})" if len(line.replicas) > 1 else ""
        nodes = list(dict.fromkeys(stage.node for stage in line.everywhere))
        texts = (
            f"{short_ranks(line.replicas)}{alike}" if is_first else "",
            spans(line.numbers),
            f"{f'{len(line.stages)} × ' if len(line.stages) > 1 else ''}{line.device}",
            ", ".join(nodes) if len(nodes) <= 3 else f"{nodes[0]} … ({len(nodes)})",
            short_ranks(line.ranks),
            line.layers,
            *cells,
        )
        lines.append(texts[single:])
    return make_table(columns[single:], lines)


def _span(values: Sequence[float], decimals: int) -> str:
    low, high = (f"{each(values):,.{decimals}f}" for each in (min, max))
    return low if low == high else f"{low}-{high}"


# Plans ---------------------------------------------------------------------------------------------------------------


def render(plans: Sequence[RankedPlan]) -> RenderableType:
    """The first plan with its stages, and below it all plans with their reasons."""
    plan = plans[0].plan
    parts: list[RenderableType] = [_title(plan), _planned_stages(plan)]
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


def _planned_stages(plan: Plan) -> Table:
    """Of several stages in a row, the longest times, and the range of memory and bubbles."""
    lines = rows(plan)
    second, compute, transfer = times(
        [max(s.forward_seconds + s.backward_seconds for s in line.stages) for line in lines],
        [max(stage.transfer_seconds for stage in line.stages) for line in lines],
    )
    available = [min(stage.memory_available_bytes for stage in line.everywhere) for line in lines]
    size, unit = byte_unit(max(available))
    memory = [
        f"{_span([stage.memory_bytes / size for stage in line.stages], 1)}/{most / size:.1f}"
        for line, most in zip(lines, available, strict=True)
    ]
    bubbles = [[plan.replicas[line.replicas[0]].bubble_shares[number] for number in line.numbers] for line in lines]
    numbers = {
        f"memory\n[{unit}]": memory,
        f"fwd+bwd\n[{second}]": compute,
        f"transfer\n[{second}]": transfer,
        "bubble": [f"{_span([100 * share for share in shares], 0)}%" for shares in bubbles],
    }
    if len({replica.micro_batches for replica in plan.replicas}) > 1:
        numbers["micro-\nbatches"] = [str(plan.replicas[line.replicas[0]].micro_batches) for line in lines]
    return _stage_table(plan, lines, numbers)


def _totals(plan: Plan) -> list[str]:
    longest = max(replica.pipeline_seconds for replica in plan.replicas)
    unit, (iteration, pipeline, sums) = times([plan.iteration_seconds, longest, plan.synchronization_seconds])
    devices = [
        (len(stage.ranks), share)
        for replica in plan.replicas
        for stage, share in zip(replica.stages, replica.bubble_shares, strict=True)
    ]
    bubble = sum(number * share for number, share in devices) / sum(number for number, _ in devices)
    summed = "" if len(plan.replicas) == 1 else f" + synchronization {sums} {unit}"
    sure = "" if plan.relative_error is None else f" ± {CERTAIN * plan.relative_error:.1%}"
    lines = [
        f"predicted: an iteration of {iteration} {unit}{sure}, {aligned([plan.samples_per_second])[0]} samples/s "
        f"(pipeline {pipeline} {unit}{summed}; bubble {bubble:.0%} on average)"
    ]
    if plan.uniform_seconds is not None:
        ratio = plan.uniform_seconds / plan.iteration_seconds
        lines.append(f"{ratio:.2f} × as fast as the best plan with uniform stages ({duration(plan.uniform_seconds)})")
    if plan.gap is not None:
        lines.append(f"within {max(plan.gap, 0.001):.1%} of the best possible under this model")
    return lines


def _ranking(ranked: Sequence[RankedPlan]) -> Table:
    plans = [each.plan for each in ranked]
    unit, seconds = times([plan.iteration_seconds for plan in plans])
    ratios = [plan.iteration_seconds / plans[0].iteration_seconds for plan in plans]
    # A plan that is faster by less than a hundredth shows why it is not the first.
    shown = [f"{ratio:.2f}" if round(ratio, 2) > 1 or math.isclose(ratio, 1.0) else f"{ratio:.4f}" for ratio in ratios]
    several = len({plan.precision for plan in plans}) > 1
    columns = [word_column(""), word_column("layout", 3)]
    columns += map(number_column, (f"iteration\n[{unit}]", "× best\ntime"))
    lines = []
    for index, each in enumerate(ranked):
        precision = f" · {each.plan.precision}" if several else ""
        lines.append([str(index + 1), f"{layout(each.plan)}{precision}", seconds[index], shown[index], each.reason])
    return make_table([*columns, word_column("reason", 2)], lines, {0: "bold"})


# Simulations ---------------------------------------------------------------------------------------------------------


def render_simulation(simulation: PlanSimulation, without: PlanSimulation | None = None) -> RenderableType:
    """The stages' times, and iteration times by simulation and formula (1F1B); ``without`` slow ranks."""
    plan = simulation.plan
    parts: list[RenderableType] = [Text.assemble((plan.model, "bold"), f": {layout(plan)}")]
    if simulation.slow:
        ranks = ", ".join(f"rank {rank} slowed {factor:g} ×" for rank, factor in sorted(simulation.slow.items()))
        parts.append(Text(f"with {ranks}"))
    return Group(*parts, _simulated_stages(simulation), *map(Text, _simulated_totals(simulation, without)))


def _simulated_stages(simulation: PlanSimulation) -> Table:
    """Of several stages in a row, the times of the one that is idle for the shortest time."""
    plan, lines = simulation.plan, rows(simulation.plan)
    columns: list[tuple[float, float, float]] = []
    for line in lines:
        timeline = simulation.timelines[line.replicas[0]]
        share = max((timeline.shares[number] for number in line.numbers), key=lambda each: each.compute + each.transfer)
        compute, transfer = share.compute * timeline.seconds, share.transfer * timeline.seconds
        idle = max(simulation.seconds - compute - transfer - plan.synchronization_seconds, 0.0)
        columns.append((compute, transfer, idle))
    unit, *texts = times(*zip(*columns, strict=True))
    numbers = {f"{name}\n[{unit}]": text for name, text in zip(("busy", "transfer", "idle"), texts, strict=True)}
    numbers["idle\n[%]"] = [f"{100 * idle / simulation.seconds:.0f}" for *_, idle in columns]
    return _stage_table(plan, lines, numbers)


def _simulated_totals(simulation: PlanSimulation, without: PlanSimulation | None) -> list[str]:
    plan, seconds = simulation.plan, simulation.seconds
    (speed,) = aligned([plan.global_batch / seconds])
    line = f"iteration time by event simulation: {duration(seconds)} ({speed} samples/s)"
    if plan.synchronization_seconds:
        line += f", of which {duration(plan.synchronization_seconds)} are sums of gradients"
    if plan.schedule == "1f1b":
        closed = f"{duration(plan.iteration_seconds)} ({plan.iteration_seconds / seconds - 1:+.1%})"
        lines = [f"{line}; by the formula: {closed}"]
    else:
        lines = [f"{line}; stages compute while they send, as Colossal-AI's schedule {plan.schedule} does"]
    if without is not None:
        lines.append(
            f"without slow ranks: {duration(without.seconds)}; with them the iteration takes "
            f"{seconds / without.seconds:.2f} × as long"
        )
    return lines


def render_replanning(present: PlanSimulation, best: PlanSimulation) -> str:
    unit, (now, planned) = times([present.seconds, best.seconds])
    if best is present:
        return f"planned again for these ranks: no plan is faster than the present one ({now} {unit})"
    return (
        f"planned again for these ranks: {planned} {unit} instead of {now} {unit} "
        f"({present.seconds / best.seconds:.2f} × as fast): {layout(best.plan)}"
    )


# Given plans ---------------------------------------------------------------------------------------------------------


def render_evaluation(evaluated: EvaluatedPlan, notes: Sequence[str] = ()) -> RenderableType:
    off = evaluated.plan.iteration_seconds / evaluated.simulated_seconds - 1
    stage, number = evaluated.fullest, len(evaluated.too_large)
    size, unit = byte_unit(stage.memory_available_bytes)
    fits = "every stage fits" if not number else f"{count(number, 'stage')} {'does' if number == 1 else 'do'} not fit"
    lines = [
        f"by event simulation: {duration(evaluated.simulated_seconds)}; the prediction above is {off:+.1%} of it",
        f"memory: {fits}; the fullest, on {stage.device}, needs {stage.memory_bytes / size:.1f} of "
        f"{stage.memory_available_bytes / size:.1f} {unit} ({stage.memory_bytes / stage.memory_available_bytes:.0%})",
    ]
    if (cost := evaluated.cost) is None:
        lines.append("price: unknown, because the cluster file does not have the prices of all nodes")
    else:
        sent = f", of which {cost.egress_dollars * 1000:,.2f} $ for what is sent between clusters"
        lines.append(
            f"price: {cost.dollars_per_hour:,.2f} $ an hour, {cost.dollars_per_iteration * 1000:,.2f} $ for 1,000 "
            f"iterations{sent if cost.egress_dollars else ''}"
        )
    if evaluated.problem is not None:
        lines.append(f"it cannot be run: {evaluated.problem}")
    return Group(render([RankedPlan(evaluated.plan, "")]), *map(Text, (*lines, *notes)))


def render_comparison(plans: Sequence[tuple[str, EvaluatedPlan]]) -> RenderableType:
    """A table of several plans of one cluster, and the difference of each from the fastest that fits in memory."""
    best = min(range(len(plans)), key=lambda each: (not plans[each][1].fits, plans[each][1].plan.iteration_seconds))
    unit, seconds, simulated = times(
        [each.plan.iteration_seconds for _, each in plans], [each.simulated_seconds for _, each in plans]
    )
    priced = all(each.cost is not None for _, each in plans)
    titles = [f"formula\n[{unit}]", f"simulation\n[{unit}]", "× best\ntime", "samples/s"]
    titles += [*(["$ / 1,000\niterations"] if priced else []), "memory\nleft"]
    columns = [word_column("plan"), *map(number_column, titles), word_column("devices"), word_column("layout", 1)]
    lines = []
    for number, (name, each) in enumerate(plans):
        ratio = each.plan.iteration_seconds / plans[best][1].plan.iteration_seconds
        cells = [name, seconds[number], simulated[number], f"{ratio:.3f}", f"{each.plan.samples_per_second:,.2f}"]
        if each.cost is not None and priced:
            cells.append(f"{each.cost.dollars_per_iteration * 1000:,.2f}")
        stage = each.fullest
        size, memory = byte_unit(stage.memory_available_bytes)
        left = (stage.memory_available_bytes - stage.memory_bytes) / size
        cells.append(f"{left:.1f} {memory}" if each.fits else f"{-left:.1f} {memory} too little")
        lines.append([*cells, devices_in_words(each.plan), layout(each.plan)])
    return Group(make_table(columns, lines, {best: "bold"}), *map(Text, _differences(plans, best)))


def _differences(plans: Sequence[tuple[str, EvaluatedPlan]], best: int) -> list[str]:
    name, first = plans[best]
    lines = []
    for other, each in (*plans[:best], *plans[best + 1 :]):
        percent = 100 * (each.plan.iteration_seconds / first.plan.iteration_seconds - 1)
        speed = "slower" if percent >= 0 else "faster, but it does not fit in memory"
        alike = f"as fast as {name}"
        lines.append(f"{other}: {alike if abs(percent) < 0.05 else f'{abs(percent):.1f} % {speed} than {name}'}")
        found = differences(first.plan, each.plan) or ["the same layout on other devices, or the same plan"]
        lines += [f"  {line}" for line in found]
        if each.problem is not None:
            lines.append(f"  it cannot be run: {each.problem}")
    return lines


# Front of prices -----------------------------------------------------------------------------------------------------


def render_front(
    front: Sequence[FrontPoint], types: Sequence[NodeType], chosen: FrontPoint, samples: int | None = None
) -> Table:
    """A row for each point, the fastest first; the chosen one is bold. ``samples`` are those of the whole training."""
    unit, seconds = times([point.seconds for point in front])
    titles = [f"iteration\n[{unit}]", "$ / hour", "$ / 1,000\niterations"]
    titles += [] if samples is None else ["training\n[h]", "training\n[$]"]
    lines = []
    for point, iteration in zip(front, seconds, strict=True):
        nodes = [f"{number} × {each.name}" for each, number in zip(types, point.nodes, strict=True) if number]
        cells = [", ".join(nodes), iteration, f"{point.cost.dollars_per_hour:,.2f}"]
        cells.append(_dollars(1000 * point.dollars))
        if samples is not None:
            iterations = samples / point.plan.global_batch
            cells += [f"{iterations * point.seconds / HOUR:,.1f}", _dollars(iterations * point.dollars)]
        lines.append([*cells, layout(point.plan)])
    bold = next(number for number, point in enumerate(front) if point is chosen)
    columns = [word_column("nodes"), *map(number_column, titles), word_column("layout", 1)]
    return make_table(columns, lines, {bold: "bold"})


def _dollars(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"


# Layer profile -------------------------------------------------------------------------------------------------------


def render_profile(profile: ModelProfile) -> RenderableType:
    """Times by kind of device: blocks, layers before and after them; below, memory per block."""
    titles = ["ranks", "tp", "micro-batch\n[samples]", "before blocks\n[ms]", "per block\n[ms]", "after blocks\n[ms]"]
    titles += ["all, per sample\n[ms]", "update\n[ms]"]
    lines: list[Sequence[str] | None] = []
    for device, of_device in itertools.groupby(profile.times, key=lambda each: each.device):
        ranks = [rank for rank, each in enumerate(profile.rank_devices) if each == device]
        for each in of_device:
            lines.append((device, short_ranks(ranks) if ranks else "–", *_measured(profile, each)))
        lines.append(None)
    title = Text(f"{profile.name}, {profile.precision}: forward plus backward pass, and optimizer step")
    table = make_table([word_column("device"), *map(number_column, titles)], lines)
    return Group(title, table, *map(Text, _sizes(profile)))


def _measured(profile: ModelProfile, measured: LayerTimes) -> list[str]:
    passes = zip(measured.forward_seconds, measured.backward_seconds, strict=True)
    seconds = [forward + backward for forward, backward in passes]
    stop = len(seconds) - profile.after
    blocks = " – ".join(dict.fromkeys(_milliseconds(each(seconds[profile.before : stop])) for each in (min, max)))
    outer = [sum(seconds[: profile.before]), sum(seconds[stop:]), sum(seconds) / measured.micro_batch]
    before, *values = map(_milliseconds, (*outer, sum(measured.update_seconds)))
    return [str(measured.tensor_parallel), str(measured.micro_batch), before, blocks, *values]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _sizes(profile: ModelProfile) -> list[str]:
    lines = []
    for sizes in profile.sizes:
        degree = f" at tensor_parallel {sizes.tensor_parallel}" if len(profile.sizes) > 1 else ""
        state = sum(sizes.parameter_bytes) * profile.state_factor
        lines.append(
            f"{profile.blocks} blocks{degree}; {_bytes(state)} of parameters, gradients and optimizer state; per "
            f"sample, a block keeps {_bytes(sizes.activation_bytes[profile.before])} for the backward pass and sends "
            f"{_bytes(sizes.output_bytes[profile.before])} to the next block"
        )
    return lines


def _bytes(number: float) -> str:
    size, unit = byte_unit(number)
    return f"{number / size:.3g} {unit}"
