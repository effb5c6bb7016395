"""A global batch divided by all methods, and its report: tables, JSON and a picture of each device's part."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...common.tables import make_table, number_column, word_column
from ...common.text import aligned, byte_unit, count, duration, spans, times
from ..batches.adapt import AdaptPlan, RingNetwork, adapt_profile, ring_cost
from ..batches.allocation import LEAST_GAIN, Allocation, Share, allocate
from ..batches.batch_profile import UNITS, BatchProfile, DeviceProfile

MAX_GLOBAL_BATCH = 2**20  # largest global batch, in samples: the exact search needs about 60 bytes for each
MAX_SIZES = 2**22  # largest number of micro-batch sizes, over all kinds of device, whose times are computed


@dataclass(frozen=True)
class MethodResult:
    name: str
    allocation: Allocation | None
    note: str = ""
    adapt: AdaptPlan | None = None  # the search of method ``adapt``; None for another method, or without links


@dataclass(frozen=True)
class BatchComparison:
    """The division by the chosen method, beside those by the other methods."""

    profile: BatchProfile
    chosen: Allocation
    adapt: AdaptPlan | None
    results: tuple[MethodResult, ...]


def compare(
    profile: BatchProfile,
    global_batch_size: int,
    *,
    stage: int | None = None,
    method: str = "exact",
    accumulation: str = "shared",
) -> BatchComparison:
    """Divide a global batch by ``method``, and by the other methods for comparison."""
    stage = profile.stage if stage is None else stage
    _check_sizes(profile, global_batch_size, stage)
    curves = profile.curves(stage, global_batch_size, allow_empty=method == "adapt" and bool(profile.links))
    communication_seconds, network, link_error = profile.communication(stage), None, ""
    if profile.links:
        try:
            network = RingNetwork.of(profile, stage)
            everyone = range(len(curves))
            communication_seconds, _ = ring_cost(network.seconds(everyone), everyone)
        except ValueError as error:
            network, link_error = None, str(error)

    def divide(name: str, accumulation: str) -> MethodResult:
        if name == "adapt" and profile.links:
            if network is None:
                raise ValueError(link_error)
            plan = adapt_profile(profile, global_batch_size, stage, accumulation)
            left_out = f"without {'rank' if len(plan.dropped) == 1 else 'ranks'} {spans(plan.dropped)}"
            note = f"{left_out if plan.dropped else 'all devices'}, {plan.protocol}"
            return MethodResult(name, plan.allocation, note, plan)
        lacking = [kind.device for index, kind in enumerate(profile.kinds) if index in profile.ranks and not kind.flops]
        if name == "flops" and lacking:
            raise ValueError(f"method flops needs the FLOP/s of every device; the profile has none for {lacking[0]}")
        allocation = allocate(
            curves, global_batch_size, stage, method=name, accumulation=accumulation,
            communication_seconds=communication_seconds, flops=profile.flops, least_gain=LEAST_GAIN,
        )  # fmt: skip
        note = "in proportion to throughput only: the profile has no links" if name == "adapt" else ""
        return MethodResult(name, allocation, note)

    def attempt(name: str, accumulation: str) -> MethodResult:
        try:
            return divide(name, accumulation)
        except ValueError as error:
            return MethodResult(name, None, str(error))

    settings = [("exact", accumulation), ("uniform", accumulation), ("flops", accumulation)]
    if stage < 2:
        settings.insert(1, ("exact", "per_rank" if accumulation == "shared" else "shared"))
    settings.append(("poplar", "per_rank" if stage < 2 else "shared"))
    if method == "adapt" or profile.links:
        settings.append(("adapt", accumulation))
    chosen = divide(method, accumulation)
    assert chosen.allocation is not None
    results = [chosen if each == (method, accumulation) else attempt(*each) for each in settings]
    return BatchComparison(profile, chosen.allocation, chosen.adapt, tuple(results))


def _check_sizes(profile: BatchProfile, global_batch_size: int, stage: int) -> None:
    """Raise ``ValueError`` if dividing this global batch would take gigabytes of memory."""
    if global_batch_size > MAX_GLOBAL_BATCH:
        raise ValueError(
            f"a global batch of {global_batch_size:,} samples is too large to be divided; give at most "
            f"{MAX_GLOBAL_BATCH:,} samples"
        )
    sizes = sum(profile.kind_max_batches(stage, global_batch_size)[kind] for kind in set(profile.ranks))
    if sizes > MAX_SIZES:
        raise ValueError(
            f"the devices of the profile hold micro-batches of {sizes:,} sizes in total, more than {MAX_SIZES:,}; give "
            f"a smaller global batch, at most {MAX_SIZES // len(set(profile.ranks)):,} samples"
        )


SCHEMA = 1
MAX_RING_RANKS = 32


@dataclass(frozen=True)
class DeviceLine:
    """Ranks of one kind with equal parts of the global batch: a row of the table. Values are those of each rank."""

    ranks: tuple[int, ...]
    device: DeviceProfile
    share: Share
    busy_seconds: float
    idle_seconds: float
    used_bytes: int


def device_lines(profile: BatchProfile, allocation: Allocation) -> list[DeviceLine]:
    groups: dict[tuple[int, Share], list[int]] = {}
    for rank, (kind, share) in enumerate(zip(profile.ranks, allocation.shares, strict=True)):
        groups.setdefault((kind, share), []).append(rank)
    states = profile.state_bytes(allocation.stage, sum(bool(share.runs) for share in allocation.shares))
    lines = []
    for (kind, share), ranks in groups.items():
        device, busy = profile.kinds[kind], allocation.busy_seconds[ranks[0]]
        used = states[kind] + max(share.micro_batch, 1) * device.sample_bytes if share.runs else 0
        idle = allocation.idle_seconds[ranks[0]] if share.runs else allocation.wall_seconds
        lines.append(DeviceLine(tuple(ranks), device, share, busy, idle, used))
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
    lines = device_lines(report.profile, report.chosen)
    second, busy, idle = times([line.busy_seconds for line in lines], [line.idle_seconds for line in lines])
    size, unit = byte_unit(max(line.device.memory_bytes for line in lines))
    columns = [word_column("ranks"), word_column("device")]
    columns += map(number_column, ("micro-\nbatch", "micro-\nsteps", "last micro-\nbatch", "samples"))
    columns += map(number_column, (f"busy\n[{second}]", f"idle\n[{second}]", f"memory\n[{unit}]"))
    if any(not line.share.runs for line in lines):
        columns.append(word_column("dropped because"))
    rows: list[Sequence[str]] = []
    steps = report.adapt.steps if report.adapt is not None else ()
    for index, line in enumerate(lines):
        device, share = line.device, line.share
        name = f"{device.device} ({device.host})" if device.host else device.device
        memory = f"/{device.memory_bytes / size:.1f}"
        if share.runs:
            numbers = [f"{n:,}" for n in (share.micro_batch, share.steps, share.last_batch, share.samples)]
            cells = [*numbers, busy[index], idle[index], f"{line.used_bytes / size:.1f}{memory}"]
            rows.append([spans(line.ranks), name, *cells, *[""] * (len(columns) - 9)])
        else:
            reasons = dict.fromkeys(each.reason for each in steps if each.kept and set(each.without) & set(line.ranks))
            rows.append([spans(line.ranks), name, "dropped", *"-----", f"-{memory}", "; ".join(reasons)])
    return make_table(columns, rows, {index: "dim" for index, line in enumerate(lines) if not line.share.runs})


def _comparison(report: BatchComparison) -> Table:
    made = [each.allocation for each in report.results if each.allocation is not None]
    second, walls = times([allocation.wall_seconds for allocation in made])
    speeds = aligned([allocation.samples_per_second for allocation in made])
    uniform = next((allocation for allocation in made if allocation.method == "uniform"), None)
    columns = map(number_column, ("accumulation", f"wall time\n[{second}]", "samples/s", "vs\nuniform"))
    rows: list[Sequence[str]] = []
    styles = {}
    for index, each in enumerate(report.results):
        allocation = each.allocation
        if allocation is None:
            rows.append([each.name, *"----", each.note])
            styles[index] = "dim"
            continue
        accumulation = allocation.accumulation if allocation.stage < 2 else "every micro-step"
        ratio = "-" if uniform is None else f"{uniform.wall_seconds / allocation.wall_seconds:.3f}"
        numbers = (accumulation, walls[made.index(allocation)], speeds[made.index(allocation)], ratio)
        rows.append([each.name, *numbers, each.note])
        if allocation is report.chosen:
            styles[index] = "bold"
    return make_table([word_column("method"), *columns, word_column("note")], rows, styles)


def _notes(report: BatchComparison) -> list[str]:
    profile, chosen = report.profile, report.chosen
    notes = _adapt_notes(report.adapt) if report.adapt is not None else []
    if chosen.communication_seconds > 0:
        notes.append(
            f"in addition to busy and idle, every device spends {duration(chosen.communication_seconds)} "
            f"({chosen.communication_seconds / chosen.wall_seconds:.0%} of the wall time) in communication"
        )
    if chosen.stage != profile.stage:
        notes.append(
            f"measured at stage {profile.stage}; memory, the largest micro-batches and communication at stage "
            f"{chosen.stage} are predicted"
        )
    beyond = [
        line.device
        for line in device_lines(profile, chosen)
        if line.share.runs and line.share.micro_batch > line.device.measured_batch
    ]
    return notes + list(
        dict.fromkeys(
            f"{device.device} was measured up to a micro-batch of {device.measured_batch}; above it, its time is "
            "extrapolated by a straight line"
            for device in beyond
        )
    )


def _adapt_notes(plan: AdaptPlan) -> list[str]:
    ring = " → ".join(map(str, plan.ring[:MAX_RING_RANKS]))
    back = f"… ({len(plan.ring)} ranks)" if len(plan.ring) > MAX_RING_RANKS else plan.ring[0]
    notes = [f"ring over {plan.protocol}: {ring} → {back}"]
    for step in plan.steps[1:]:
        if not step.kept:
            result = (
                f"wall time would be {duration(step.cost_seconds)} over {step.protocol}"
                if math.isfinite(step.cost_seconds)
                else "others could not hold a sample each"
            )
            notes.append(f"not dropped: {step.reason}; without it the {result}")
    return notes


def as_json(report: BatchComparison) -> dict[str, Any]:
    """The allocation and the comparison; ``comparison`` has the rows of the table, ``adapt`` is of that method only."""
    profile, chosen, plan = report.profile, report.chosen, report.adapt
    names = ("method", "stage", "accumulation", "global_batch_size")
    seconds = ("wall_seconds", "communication_seconds", "samples_per_second")
    rows = {
        rank: {
            "rank": rank,
            "device": line.device.device,
            "samples": line.share.samples,
            "runs": line.share.runs,
            "busy_seconds": line.busy_seconds,
            "idle_seconds": line.idle_seconds,
            "memory_bytes": line.used_bytes,
            "available_bytes": line.device.memory_bytes,
        }
        for line in device_lines(profile, chosen)
        for rank in line.ranks
    }
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "units": UNITS,
        "model": profile.model.model_dump(mode="json"),
        "precision": profile.precision,
        "measured_stage": profile.stage,
        "allocation": {name: getattr(chosen, name) for name in (*names, *seconds)},
        "ranks": [rows[rank] for rank in range(len(profile.ranks))],
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
    if plan is not None:
        steps = [asdict(step) for step in plan.steps]
        for step in steps:
            step["cost_seconds"] = step["cost_seconds"] if math.isfinite(step["cost_seconds"]) else None
        content["adapt"] = {"ring": plan.ring, "dropped": plan.dropped, "protocol": plan.protocol, "steps": steps}
    return content
