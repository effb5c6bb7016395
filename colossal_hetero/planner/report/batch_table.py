"""Tables and JSON of an allocation: the part of each device, and the results of all methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...common.files import write_json
from ...common.text import aligned, byte_unit, count, spans, times
from ..batches.allocation import Allocation, Share
from ..batches.batch_profile import UNITS, BatchProfile
from ..batches.comparison import AdaptPlan, BatchComparison

__all__ = ["DeviceLine", "device_lines", "render", "save_report"]

SCHEMA = 1
MAX_RING_RANKS = 32


@dataclass(frozen=True)
class DeviceLine:
    """Ranks of one kind with equal parts of the global batch: a row of the table. Values are those of each rank."""

    ranks: tuple[int, ...]
    kind: int
    share: Share
    busy_seconds: float
    idle_seconds: float
    memory_bytes: int
    """Predicted memory use: the state and the largest micro-batch."""
    available_bytes: int

    @property
    def dropped(self) -> bool:
        return not self.share.runs


def device_lines(profile: BatchProfile, allocation: Allocation) -> list[DeviceLine]:
    groups: dict[tuple[int, Share], list[int]] = {}
    for rank, (kind, share) in enumerate(zip(profile.ranks, allocation.shares, strict=True)):
        groups.setdefault((kind, share), []).append(rank)
    states = profile.state_bytes(allocation.stage, sum(bool(share.runs) for share in allocation.shares))
    idle = allocation.idle_seconds
    lines = []
    for (kind, share), ranks in groups.items():
        device = profile.kinds[kind]
        used = states[kind] + max(share.micro_batch, 1) * device.sample_bytes if share.runs else 0
        lines.append(
            DeviceLine(
                tuple(ranks),
                kind,
                share,
                allocation.busy_seconds[ranks[0]],
                idle[ranks[0]] if share.runs else allocation.wall_seconds,
                used,
                device.memory_bytes,
            )
        )
    return lines


def render(report: BatchComparison) -> RenderableType:
    profile, chosen = report.profile, report.chosen
    title = Text.assemble(
        (f"{profile.model.name}", "bold"),
        f", stage {chosen.stage}, {profile.precision}: global batch of {count(chosen.global_batch_size, 'sample')} "
        f"over {count(len(profile.ranks), 'device')}, method {chosen.method}",
    )
    parts: list[RenderableType] = [title, _devices(report), _comparison(report)]
    parts += [Text(note) for note in _notes(report)]
    return Group(*parts)


def _devices(report: BatchComparison) -> Table:
    profile, chosen = report.profile, report.chosen
    lines = device_lines(profile, chosen)
    second, busy, idle = times([line.busy_seconds for line in lines], [line.idle_seconds for line in lines])
    size, unit = byte_unit(max(line.available_bytes for line in lines))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("ranks", overflow="fold")
    table.add_column("device", overflow="fold")
    counts = ("micro-batch", "micro-steps", "last micro-batch", "samples")
    for column in (*counts, f"busy [{second}]", f"idle [{second}]", f"memory [{unit}]"):
        # A Text, because in a plain string rich takes brackets as markup.
        table.add_column(Text(column), justify="right", no_wrap=True)
    if any(line.dropped for line in lines):
        table.add_column("dropped because", overflow="fold")
    for index, line in enumerate(lines):
        device, share = profile.kinds[line.kind], line.share
        name = Text(f"{device.device} ({device.host})" if device.host else device.device)
        available = f"{line.available_bytes / size:.1f}"
        if line.dropped:
            because = _drop_reasons(report.adapt, line.ranks)
            table.add_row(spans(line.ranks), name, "dropped", *"-----", f"- of {available}", because, style="dim")
            continue
        numbers = [f"{n:,}" for n in (share.micro_batch, share.steps, share.last_batch, share.samples)]
        memory = f"{line.memory_bytes / size:.1f} of {available}"
        table.add_row(spans(line.ranks), name, *numbers, busy[index], idle[index], memory)
    return table


def _comparison(report: BatchComparison) -> Table:
    made = [each.allocation for each in report.results if each.allocation is not None]
    second, walls = times([allocation.wall_seconds for allocation in made])
    speeds = aligned([allocation.samples_per_second for allocation in made])
    uniform = next(
        (each.allocation for each in report.results if each.name == "uniform" and each.allocation is not None), None
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    for column in ("accumulation", f"wall time [{second}]", "samples/s", "vs uniform"):
        table.add_column(Text(column), justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for each in report.results:
        allocation = each.allocation
        if allocation is None:
            table.add_row(each.name, "-", "-", "-", "-", Text(each.note), style="dim")
            continue
        ratio = "-" if uniform is None else f"{uniform.wall_seconds / allocation.wall_seconds:.3f}"
        table.add_row(
            each.name,
            allocation.accumulation if allocation.stage < 2 else "every micro-step",
            walls[made.index(allocation)],
            speeds[made.index(allocation)],
            ratio,
            Text(each.note),
            style="bold" if allocation is report.chosen else None,
        )
    return table


def _notes(report: BatchComparison) -> list[str]:
    profile, chosen = report.profile, report.chosen
    notes = []
    if report.adapt is not None:
        notes += _adapt_notes(report.adapt)
    if chosen.communication_seconds > 0:
        second, (time,) = times([chosen.communication_seconds])
        share = chosen.communication_seconds / chosen.wall_seconds
        notes.append(
            f"in addition to busy and idle, every device spends {time} {second} ({share:.0%} of the wall time) in "
            "communication"
        )
    if chosen.stage != profile.stage:
        notes.append(
            f"measured at stage {profile.stage}; memory, the largest micro-batches and communication at stage "
            f"{chosen.stage} are predicted"
        )
    beyond = {
        line.kind: profile.kinds[line.kind]
        for line in device_lines(profile, chosen)
        if line.share.runs and line.share.micro_batch > profile.kinds[line.kind].measured_batch
    }
    for device in beyond.values():
        notes.append(
            f"{device.device} was measured up to a micro-batch of {device.measured_batch}; above it, its time is "
            "extrapolated by a straight line"
        )
    return notes


def _adapt_notes(plan: AdaptPlan) -> list[str]:
    ring = " → ".join(map(str, plan.ring[:MAX_RING_RANKS]))
    back = f"… ({len(plan.ring)} ranks)" if len(plan.ring) > MAX_RING_RANKS else plan.ring[0]
    notes = [f"ring over {plan.protocol}: {ring} → {back}"]
    for step in plan.steps[1:]:
        if not step.kept and math.isinf(step.cost_seconds):
            notes.append(f"not dropped: {step.reason}; without it the others could not hold a sample each")
        elif not step.kept:
            second, (cost,) = times([step.cost_seconds])
            notes.append(
                f"not dropped: {step.reason}; without it the wall time would be {cost} {second} over {step.protocol}"
            )
    return notes


def _drop_reasons(plan: AdaptPlan | None, ranks: Sequence[int]) -> str:
    steps = plan.steps if plan is not None else ()
    reasons = [step.reason for step in steps if step.kept and set(step.without) & set(ranks)]
    return "; ".join(dict.fromkeys(reasons))


def save_report(report: BatchComparison, path: Path | str) -> None:
    write_json(as_json(report), path)


def as_json(report: BatchComparison) -> dict[str, Any]:
    """The allocation and the comparison; ``comparison`` has the rows of the table, ``adapt`` is of that method only."""
    profile, chosen = report.profile, report.chosen
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "units": UNITS,
        "model": profile.model.model_dump(mode="json"),
        "precision": profile.precision,
        "measured_stage": profile.stage,
        "allocation": {
            "method": chosen.method,
            "stage": chosen.stage,
            "accumulation": chosen.accumulation,
            "global_batch_size": chosen.global_batch_size,
            "wall_seconds": chosen.wall_seconds,
            "communication_seconds": chosen.communication_seconds,
            "samples_per_second": chosen.samples_per_second,
        },
        "ranks": [None] * len(profile.ranks),
        "comparison": [
            {
                "method": each.name,
                "accumulation": each.allocation and each.allocation.accumulation,
                "wall_seconds": each.allocation and each.allocation.wall_seconds,
                "samples_per_second": each.allocation and each.allocation.samples_per_second,
                "note": each.note,
            }
            for each in report.results
        ],
    }
    if report.adapt is not None:
        plan = report.adapt
        content["adapt"] = {
            "ring": plan.ring,
            "dropped": plan.dropped,
            "protocol": plan.protocol,
            "steps": [
                {**asdict(step), "cost_seconds": step.cost_seconds if math.isfinite(step.cost_seconds) else None}
                for step in plan.steps
            ],
        }
    for line in device_lines(profile, chosen):
        for rank in line.ranks:
            content["ranks"][rank] = {
                "rank": rank,
                "device": profile.kinds[line.kind].device,
                "samples": line.share.samples,
                "runs": line.share.runs,
                "busy_seconds": line.busy_seconds,
                "idle_seconds": line.idle_seconds,
                "memory_bytes": line.memory_bytes,
                "available_bytes": line.available_bytes,
            }
    return content
