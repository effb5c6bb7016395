"""Timelines of all ranks: waiting told from communication, clocks brought together, the Chrome trace's fields."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance.timeline import (
    KIND_NAMES,
    SAMPLE_EVERY,
    IterationTimeline,
    RankSegments,
    SampledIterations,
    Segment,
    TimelineSampler,
    choose_timelines,
    chrome_trace,
    merge_segments,
)


def stretches(*parts: tuple[str, float], start: float = 0.0) -> tuple[Segment, ...]:
    """Segments one after the other from ``start`` on, given by kind and seconds."""
    segments = []
    for kind, seconds in parts:
        segments.append(Segment(kind, start, start + seconds))  # type: ignore[arg-type]
        start += seconds
    return tuple(segments)


def rank(*parts: tuple[str, float], start: float = 0.0, base: str = "here", iteration: int = 0) -> RankSegments:
    return RankSegments(iteration, stretches(*parts, start=start), base)


FAST = (("matmul", 2.0), ("communication", 5.0), ("other", 1.0), ("communication", 0.5))
SLOW = (("matmul", 6.0), ("communication", 1.0), ("other", 1.2), ("communication", 0.3))
"""The slow rank arrives at the first collective four seconds after the fast one, at the second 0.2 after it."""

FAST_MERGED = [
    ("matmul", 0.0, 2.0),
    ("waiting", 2.0, 6.0),
    ("communication", 6.0, 7.0),
    ("other", 7.0, 8.0),
    ("waiting", 8.0, 8.2),
    ("communication", 8.2, 8.5),
]


def assert_like(segments: tuple[Segment, ...], expected: list[tuple[str, float, float]]) -> None:
    assert [segment.kind for segment in segments] == [kind for kind, _, _ in expected]
    for segment, (_, start, end) in zip(segments, expected, strict=True):
        assert segment[1:] == pytest.approx((start, end))


def seconds_of(segments: tuple[Segment, ...], kind: str) -> float:
    return sum(end - start for own, start, end in segments if own == kind)


def test_a_rank_waits_until_the_last_of_its_group_arrives_at_the_same_collective() -> None:
    merged = merge_segments([rank(*FAST, iteration=7), rank(*SLOW, iteration=7)], [[0, 1]])
    assert merged.iteration == 7 and merged.seconds == pytest.approx(8.5)
    assert_like(merged.ranks[0], FAST_MERGED)
    assert_like(merged.ranks[1], [tuple(segment) for segment in stretches(*SLOW)])  # the last one never waits


def test_ranks_of_one_machine_keep_their_times_and_the_first_starts_at_zero() -> None:
    merged = merge_segments([rank(*FAST, start=1000.0), rank(*SLOW, start=999.5)], [[0, 1]])
    assert merged.ranks[1][0].start_seconds == 0.0 and merged.ranks[0][0].start_seconds == pytest.approx(0.5)
    # It arrives at 2.5, the other at 6.
    assert seconds_of(merged.ranks[0][:2], "waiting") == pytest.approx(3.5)


@pytest.mark.parametrize("bases", [("here", "there"), ("", "")])
def test_ranks_with_clocks_of_their_own_leave_their_first_collective_together(bases: tuple[str, str]) -> None:
    fast, slow = rank(*FAST, start=-40.0, base=bases[0]), rank(*SLOW, start=1e6, base=bases[1])
    merged = merge_segments([fast, slow], [[0, 1]])
    assert_like(merged.ranks[0], FAST_MERGED)
    assert merged.ranks[1][0].start_seconds == pytest.approx(0.0, abs=1e-6)


def test_groups_with_clocks_of_their_own_end_the_iteration_together() -> None:
    late = (("other", 3.0), *FAST)
    merged = merge_segments(
        [rank(*FAST, base=""), rank(*SLOW, base=""), rank(*late, start=50.0, base=""), rank(*SLOW, base="")],
        [[0, 1], [2, 3]],
    )
    assert merged.ranks[2][0].start_seconds == 0.0
    assert merged.ranks[0][0].start_seconds == pytest.approx(3.0)
    assert [segments[-1].end_seconds for segments in merged.ranks] == pytest.approx([11.5] * 4)


def test_where_ranks_take_part_in_different_collectives_waiting_is_what_goes_beyond_the_least() -> None:
    few = rank(("matmul", 4.0), ("communication", 1.0))
    many = rank(("matmul", 1.0), ("communication", 3.0), ("matmul", 0.5), ("communication", 1.0))
    merged = merge_segments([few, many], [[0, 1]])
    assert seconds_of(merged.ranks[0], "waiting") == 0.0
    assert seconds_of(merged.ranks[1], "waiting") == pytest.approx(3.0)
    assert seconds_of(merged.ranks[1], "communication") == pytest.approx(1.0)
    assert merged.ranks[1][1] == Segment("waiting", 1.0, pytest.approx(1.0 + 3.0 * 3 / 4))


def test_without_collectives_nobody_waits() -> None:
    for group in ([[0, 1]], [[0], [1]]):
        merged = merge_segments([rank(("matmul", 1.0), base=""), rank(("other", 2.0), base="")], group)
        assert [segments[0].kind for segments in merged.ranks] == ["matmul", "other"]
    assert merge_segments([rank(), rank()], [[0, 1]]) == IterationTimeline(0, ((), ()))


durations = st.lists(
    st.tuples(st.sampled_from(["matmul", "block", "other", "communication"]), st.floats(1e-6, 10)), max_size=12
)


@given(st.lists(durations, min_size=1, max_size=4), st.booleans())
def test_merging_neither_loses_time_nor_makes_any(ranks: list[list[tuple[str, float]]], shared: bool) -> None:
    views = [rank(*parts, start=3.0 * number, base="here" if shared else "") for number, parts in enumerate(ranks)]
    merged = merge_segments(views, [list(range(len(ranks)))])
    for parts, segments in zip(ranks, merged.ranks, strict=True):
        for first, second in pairwise(segments):
            assert first.end_seconds == pytest.approx(second.start_seconds)
        together = sum(seconds for kind, seconds in parts if kind == "communication")
        apart = seconds_of(segments, "communication") + seconds_of(segments, "waiting")
        assert apart == pytest.approx(together, abs=1e-9)
        for kind in ("matmul", "block", "other"):
            own = sum(seconds for name, seconds in parts if name == kind)
            assert seconds_of(segments, kind) == pytest.approx(own, abs=1e-9)
        assert all(end > start >= -1e-9 for _, start, end in segments)


def sampled(*iterations: int, change: int | None = None) -> SampledIterations:
    return SampledIterations(tuple(rank(("matmul", 1.0), iteration=number) for number in iterations), change)


def chosen(*per_rank: SampledIterations) -> tuple[int | None, int | None] | None:
    """The iterations before and after."""
    found = choose_timelines(per_rank, [[number] for number in range(len(per_rank))])
    return None if found is None else (found.before.iteration, found.after.iteration if found.after else None)


def test_before_and_after_are_the_latest_that_all_ranks_kept() -> None:
    assert chosen(sampled(4, 8, 16, change=4), sampled(4, 8, 16, change=4)) == (4, 16)
    assert chosen(sampled(4, 8, 16, change=4), sampled(4, 8, change=4)) == (4, 8)
    assert chosen(sampled(4, 80, 88, change=300), sampled(4, 80, 88, change=300)) == (88, None)
    # A group that never changes its plan is shown beside one that does.
    assert chosen(sampled(4, 8, 16, change=12), sampled(4, 8, 16), sampled(4, 8, 16, change=4)) == (4, 16)


def test_where_no_plan_changed_the_latest_iteration_stands_alone() -> None:
    assert chosen(sampled(4, 8, 16), sampled(4, 8, 16)) == (16, None)
    assert chosen(sampled(0), sampled(0)) == (0, None)


def test_the_sampler_keeps_one_iteration_before_any_plan_and_the_latest() -> None:
    sampler = TimelineSampler(warmup_iterations=2, patience=3)
    kept = []
    for iteration in range(5 * SAMPLE_EVERY + 1):
        if sampler.wants(iteration):
            sampler.add(rank(("matmul", 1.0), iteration=iteration))
        if iteration in (5, 20):
            sampler.plan_changed(iteration)
        kept.append([each.iteration for each in sampler.kept().iterations])
    assert kept[0] == [0] and kept[4] == [0] and kept[5] == [0, 5]
    assert kept[-1] == [5, 4 * SAMPLE_EVERY, 5 * SAMPLE_EVERY]
    assert sampler.kept().first_change == 5


def test_segments_are_rare_where_iterations_are_measured_rarely() -> None:
    sampler = TimelineSampler(warmup_iterations=0, patience=3, measured_every=16)
    wanted = [iteration for iteration in range(400) if sampler.wants(iteration)]
    assert wanted == [0, 3, *range(8, 128, 8), 128, 256, 384]


def test_the_chrome_trace_has_the_fields_that_the_format_requires() -> None:
    before = merge_segments([rank(*FAST, iteration=4), rank(*SLOW, iteration=4)], [[0, 1]])
    after = merge_segments([rank(*FAST, iteration=16), rank(*FAST, iteration=16)], [[0, 1]])
    trace = json.loads(json.dumps(chrome_trace({"before": before, "after": after}), allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: dict[str, dict[tuple[int, ...], str]] = {"process_name": {}, "thread_name": {}}
    complete = []
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            place = (event["pid"],) if event["name"].startswith("process") else (event["pid"], event["tid"])
            if event["name"] in named:
                named[event["name"]][place] = event["args"]["name"]
            else:
                assert isinstance(event["args"]["sort_index"], int)
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0 and event["dur"] > 0
            assert event["cat"] in KIND_NAMES and event["name"] == KIND_NAMES[event["cat"]]
            complete.append(event)
    assert list(named["process_name"].values()) == ["before (iteration 4)", "after (iteration 16)"]
    assert list(named["thread_name"].values()) == ["rank 0", "rank 1"] * 2
    threads = [thread for _, thread in named["thread_name"]]
    assert len(set(threads)) == 4 and 0 not in threads
    assert {(event["pid"], event["tid"]) for event in complete} == set(named["thread_name"])
    assert len(complete) == sum(len(segments) for shown in (before, after) for segments in shown.ranks)
    # In microseconds: the fast rank's first products end, and its waiting begins, after two seconds.
    first, second, *_ = complete
    assert (first["cat"], first["ts"], first["dur"]) == ("matmul", 0.0, pytest.approx(2e6))
    assert (second["cat"], second["ts"], second["dur"]) == ("waiting", pytest.approx(2e6), pytest.approx(4e6))
