"""Timelines of an iteration on all ranks: merged from the ranks' clocks, and as a Chrome trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..measure.timeline_sampler import Kind, RankSegments, SampledIterations, Segment

__all__ = [
    "KIND_NAMES",
    "IterationTimeline",
    "Timelines",
    "choose_timelines",
    "chrome_trace",
    "merge_segments",
]


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
    """By global rank, in order of time."""

    @property
    def seconds(self) -> float:
        """From the first rank's start to the last rank's end."""
        return max((segments[-1].end_seconds for segments in self.ranks if segments), default=0.0)


class Timelines(NamedTuple):
    """An iteration before the plan first changed, and the latest one after it."""

    before: IterationTimeline
    after: IterationTimeline | None
    """None if the plan never changed; ``before`` is then the latest iteration."""


# Merging ranks ------------------------------------------------------------------------------------------------------


def choose_timelines(per_rank: Sequence[SampledIterations], groups: Sequence[Sequence[int]]) -> Timelines | None:
    """The latest iterations before and after the first change of a plan that all ranks kept; None without any.

    ``per_rank`` is by global rank, ``groups`` the tensor-parallel groups as lists of global ranks.
    """
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
    """All ranks' segments of one iteration on one time axis, with waiting separated from communication.

    Within a tensor-parallel group a rank waits in a collective until the last rank of the group arrives at it.
    """
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
    """The segments of a group's ranks, with the first part of each collective as waiting.

    The k-th collective is the same one on all ranks. If ranks took part in different numbers of collectives (because
    some ranks also communicate in pairs), a rank's waiting is its total time in them beyond that of the rank with the
    shortest total.
    """
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
    """``segments`` with every collective cut in two where the last rank arrives at it."""
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
    """``timelines`` by title in the Chrome trace event format, for Perfetto: one process each, one thread per rank.

    Timestamps and durations are in microseconds. Processes and threads are numbered from 1, because 0 means the
    system's idle process.
    """
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
