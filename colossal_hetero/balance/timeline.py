"""Timelines of an iteration on all ranks: merged from the ranks' clocks, and as a Chrome trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..common.text import BLUE, GRAY, LIGHT_BLUE, ORANGE, RED, check_matplotlib, check_name, save_figure

# Timeline sampler ----------------------------------------------------------------------------------------------------

Kind = Literal["matmul", "block", "other", "communication", "waiting"]

SAMPLE_EVERY = 8
"""One of this many iterations is kept with its segments; later in a run, one of this many that are measured."""


class Segment(NamedTuple):
    kind: Kind
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class RankSegments:
    iteration: int
    segments: tuple[Segment, ...]
    """Segments in order; waiting is not separated from communication, which takes the times of all ranks."""
    time_base: str
    """Equal and not empty on ranks whose seconds count from the same moment."""


@dataclass(frozen=True)
class SampledIterations:
    iterations: tuple[RankSegments, ...]
    first_change: int | None
    """The iteration at the end of which the rank's group first changed its plan."""


class TimelineSampler:
    """Keeps the segments of the last iteration that is certainly unbalanced, and of the latest ones. The choice depends
    only on the iteration's number, so that all ranks keep the same iterations."""

    def __init__(self, warmup_iterations: int, patience: int, measured_every: int = 1) -> None:
        self._every = SAMPLE_EVERY * measured_every
        # Speeds are judged after `warmup + patience` iterations. The flag raised then is read, and the plan changed, at
        # the end of the following iteration, which has this number.
        self._unbalanced = warmup_iterations + patience
        self._early: RankSegments | None = None
        # Two, because the clocks of ranks may be an iteration apart.
        self._late: deque[RankSegments] = deque(maxlen=2)
        self._first_change: int | None = None

    def wants(self, iteration: int) -> bool:
        # Short runs have a timeline after balancing, too.
        every = SAMPLE_EVERY if iteration < self._every else self._every
        return iteration == self._unbalanced or iteration % every == 0

    def add(self, iteration: RankSegments) -> None:
        if iteration.iteration == self._unbalanced:
            self._early = iteration
        else:
            self._late.append(iteration)

    def plan_changed(self, iteration: int) -> None:
        """Take note that another plan applies from the iteration after this one on."""
        if self._first_change is None:
            self._first_change = iteration

    def kept(self) -> SampledIterations:
        kept = [*self._late] if self._early is None else [self._early, *self._late]
        return SampledIterations(tuple(sorted(kept, key=lambda each: each.iteration)), self._first_change)


KIND_NAMES: dict[Kind, str] = {
    "matmul": "products",
    "block": "between a block's products",
    "other": "other work",
    "communication": "communication",
    "waiting": "waiting for stragglers",
}
"""The names of the kinds in legends and traces, in the order of a legend."""

SHORTEST_SECONDS = 1e-9
"""Shorter parts of a collective are rounding errors and are left out."""


@dataclass(frozen=True)
class IterationTimeline:
    """One iteration on all ranks, from 0 seconds on."""

    iteration: int
    ranks: tuple[tuple[Segment, ...], ...]
    """Segments by global rank, in order of time."""

    @property
    def seconds(self) -> float:
        """Time from the first rank's start to the last rank's end."""
        return max((segments[-1].end_seconds for segments in self.ranks if segments), default=0.0)


class Timelines(NamedTuple):
    """An iteration before the plan first changed, and the latest one after it."""

    before: IterationTimeline
    after: IterationTimeline | None
    """None if the plan never changed; ``before`` is then the latest iteration."""


# Merging ranks ------------------------------------------------------------------------------------------------------


def choose_timelines(per_rank: Sequence[SampledIterations], groups: Sequence[Sequence[int]]) -> Timelines | None:
    """The latest iterations before and after the first change of a plan that all ranks kept; None without any.
    ``per_rank`` is by global rank, ``groups`` the tensor-parallel groups as lists of global ranks."""
    by_iteration = [{each.iteration: each for each in rank.iterations} for rank in per_rank]
    common = set(by_iteration[0]).intersection(*by_iteration[1:])
    change = min((rank.first_change for rank in per_rank if rank.first_change is not None), default=None)
    before = [iteration for iteration in common if change is None or iteration <= change]
    after = common.difference(before)
    if not before:
        return None

    def merged(iteration: int) -> IterationTimeline:
        return merge_segments([rank[iteration] for rank in by_iteration], groups)

    return Timelines(merged(max(before)), merged(max(after)) if after else None)


def merge_segments(per_rank: Sequence[RankSegments], groups: Sequence[Sequence[int]]) -> IterationTimeline:
    """All ranks' segments of one iteration on one time axis. In a collective a rank waits until the last rank of its
    tensor-parallel group arrives; this is separated from communication."""
    ranks = [list(rank.segments) for rank in per_rank]
    for group in groups:
        if not _same_base([per_rank[rank] for rank in group]):
            for rank, aligned in zip(group, _align_ranks([ranks[rank] for rank in group]), strict=True):
                ranks[rank] = aligned
    if not _same_base(per_rank):
        # All groups wait for each other before the optimizer step, which ends the iteration.
        for group in groups:
            end = max((ranks[rank][-1].end_seconds for rank in group if ranks[rank]), default=0.0)
            for rank in group:
                ranks[rank] = _shifted(ranks[rank], -end)
    for group in groups:
        for rank, split in zip(group, _split_waiting([ranks[rank] for rank in group]), strict=True):
            ranks[rank] = split
    start = min((segments[0].start_seconds for segments in ranks if segments), default=0.0)
    return IterationTimeline(per_rank[0].iteration, tuple(tuple(_shifted(segments, -start)) for segments in ranks))


def _same_base(per_rank: Sequence[RankSegments]) -> bool:
    return len(per_rank) == 1 or (bool(per_rank[0].time_base) and len({rank.time_base for rank in per_rank}) == 1)


def _shifted(segments: Sequence[Segment], seconds: float) -> list[Segment]:
    return [Segment(kind, start + seconds, end + seconds) for kind, start, end in segments]


def _collectives(segments: Sequence[Segment]) -> list[Segment]:
    return [segment for segment in segments if segment.kind == "communication"]


def _align_ranks(group: Sequence[Sequence[Segment]]) -> list[list[Segment]]:
    """Shift the ranks' times so that they are zero at the end of the first collective, which all leave together."""
    aligned = []
    for segments in group:
        collectives = _collectives(segments)
        zero = collectives[0].end_seconds if collectives else segments[0].start_seconds if segments else 0.0
        aligned.append(_shifted(segments, -zero))
    return aligned


def _split_waiting(group: Sequence[Sequence[Segment]]) -> list[list[Segment]]:
    """The segments of a group's ranks, with the first part of each collective as waiting. The k-th collective is the
    same on all ranks, unless some also communicate in pairs: then waiting is the time beyond the shortest total."""
    collectives = [_collectives(segments) for segments in group]
    if len({len(of_rank) for of_rank in collectives}) == 1:
        arrivals = [max(each.start_seconds for each in same) for same in zip(*collectives, strict=True)]
        return [_split(segments, arrivals) for segments in group]
    totals = [sum(end - start for _, start, end in of_rank) for of_rank in collectives]
    split = []
    for segments, of_rank, total in zip(group, collectives, totals, strict=True):
        share = 1.0 - min(totals) / total if total > 0 else 0.0
        split.append(_split(segments, [start + share * (end - start) for _, start, end in of_rank]))
    return split


def _split(segments: Sequence[Segment], arrivals: Sequence[float]) -> list[Segment]:
    split = []
    arrival = iter(arrivals)
    for segment in segments:
        if segment.kind != "communication":
            split.append(segment)
            continue
        _, start, end = segment
        cut = min(max(next(arrival), start), end)
        parts = (Segment("waiting", start, cut), Segment("communication", cut, end))
        split.extend(part for part in parts if part.end_seconds - part.start_seconds > SHORTEST_SECONDS)
    return split


# Chrome trace ---------------------------------------------------------------------------------------------------------


def chrome_trace(timelines: Mapping[str, IterationTimeline]) -> dict[str, Any]:
    """``timelines`` by title in the Chrome trace event format, for Perfetto: one process each, one thread per rank,
    times in microseconds. Numbers start at 1, because 0 means the system's idle process."""
    events: list[dict[str, Any]] = []
    thread = 0
    for process, (title, timeline) in enumerate(timelines.items(), start=1):
        name = {"name": f"{title} (iteration {timeline.iteration})"}
        events.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": name})
        events.append(
            {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}
        )
        for rank, segments in enumerate(timeline.ranks):
            thread += 1
            place = {"pid": process, "tid": thread}
            events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": f"rank {rank}"}})
            events.append({"name": "thread_sort_index", "ph": "M", **place, "args": {"sort_index": rank}})
            for kind, start, end in segments:
                times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
                events.append({"name": KIND_NAMES[kind], "cat": kind, "ph": "X", **times, **place, "args": {}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# Picture -------------------------------------------------------------------------------------------------------------
# A bar of time per rank, before and after balancing. matplotlib is optional (``pip install 'colossal-hetero[plot]'``).

COLORS: dict[Kind, str] = {
    "matmul": BLUE,
    "block": LIGHT_BLUE,
    "other": GRAY,
    "communication": ORANGE,
    "waiting": "#FFFFFF",
}

WAITING_EDGE = RED


def plot_timelines(before: IterationTimeline, after: IterationTimeline | None, path: Path | str) -> None:
    """Draw the iterations, with a bar per rank, above each other on the same time axis into the file ``path``, which is
    replaced atomically. ``after`` may be None."""
    path = check_name(path)
    check_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = [("Latest", before)] if after is None else [("Before balancing", before), ("After", after)]
    height = 0.25 + 0.4 * len(before.ranks)
    figure = Figure(figsize=(11, min(0.9 + len(panels) * (0.7 + height), 60)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, timeline) in zip(axes, panels, strict=True):
        _draw(axis, timeline)
        axis.set_title(
            f"{title}: iteration {timeline.iteration}, {timeline.seconds * 1e3:.0f} ms", loc="left", fontsize=11
        )
    axes[-1].set_xlabel("time in the iteration [ms]")
    axes[-1].set_xlim(0, max(timeline.seconds for _, timeline in panels) * 1e3 or 1.0)
    used = {kind for _, timeline in panels for segments in timeline.ranks for kind, _, _ in segments}
    handles = [Patch(label=name, **_style(kind)) for kind, name in KIND_NAMES.items() if kind in used]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    save_figure(figure, path)


def _draw(axis: Any, timeline: IterationTimeline) -> None:
    for rank, segments in enumerate(timeline.ranks):
        for kind in KIND_NAMES:
            bars = [(start * 1e3, (end - start) * 1e3) for part, start, end in segments if part == kind]
            if bars:
                axis.broken_barh(bars, (rank - 0.36, 0.72), **_style(kind))
    axis.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))])
    axis.set_ylim(len(timeline.ranks) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)


def _style(kind: Kind) -> dict[str, Any]:
    if kind == "waiting":
        return {"facecolor": COLORS[kind], "edgecolor": WAITING_EDGE, "hatch": "/////", "linewidth": 0.0}
    return {"facecolor": COLORS[kind], "linewidth": 0.0}
