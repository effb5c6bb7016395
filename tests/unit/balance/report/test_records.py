"""Records of all ranks together, and the report's bounds against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance.report import (
    IterationRecord,
    LocalRecord,
    ideal_ratio,
    lossless_seconds,
    merge_records,
    moved_shares,
    rank_table,
    report,
)


def local(
    iteration: int,
    work: float = 1.0,
    matmul: float = 0.5,
    communication: float = 0.1,
    resized: float = 0.0,
    exchanged: bool = False,
    changed: bool = False,
    equal_work: float | None = None,
    equal_matmul: float | None = None,
    **others: Any,
) -> LocalRecord:
    return LocalRecord(
        iteration=iteration,
        work_seconds=work,
        matmul_seconds=matmul,
        communication_seconds=communication,
        equal_work_seconds=work if equal_work is None else equal_work,
        equal_matmul_seconds=matmul if equal_matmul is None else equal_matmul,
        resized=resized,
        exchanged=exchanged,
        plan_changed=changed,
        **others,
    )


def test_waiting_is_what_a_rank_spends_in_collectives_beyond_the_last_to_arrive() -> None:
    per_rank = [[local(0, communication=c), local(1, communication=c + 1)] for c in (0.5, 0.1, 0.3, 0.9)]
    together = merge_records(per_rank, [[0, 1, 2, 3]])
    for record in together:
        assert [rank.wait_seconds for rank in record.ranks] == pytest.approx([0.4, 0.0, 0.2, 0.8])
    # Two groups of two ranks each: nobody waits for a rank of the other group.
    for record in merge_records(per_rank, [[0, 1], [2, 3]]):
        assert [rank.wait_seconds for rank in record.ranks] == pytest.approx([0.4, 0.0, 0.0, 0.6])
    for record in merge_records(per_rank, [[0, 2], [1, 3]]):
        assert [rank.wait_seconds for rank in record.ranks] == pytest.approx([0.2, 0.0, 0.0, 0.8])


def test_iterations_that_a_rank_has_not_read_are_left_out() -> None:
    per_rank = [[local(i) for i in range(5)], [local(i) for i in (0, 2, 3)], [local(i) for i in (4, 3, 2)]]
    assert [record.iteration for record in merge_records(per_rank, [[0, 1, 2]])] == [2, 3]
    assert merge_records([[local(0)], []], [[0, 1]]) == []


def test_an_iteration_is_exchanged_or_changed_if_any_group_did() -> None:
    flags = [(False, False), (True, False), (True, True), (False, False)]
    per_rank = [[local(0, exchanged=e, changed=c)] for e, c in flags]
    (record,) = merge_records(per_rank, [[0, 3], [1, 2]])
    assert record.exchanged and record.plan_changed
    (record,) = merge_records([per_rank[0], per_rank[3]], [[0, 1]])
    assert not record.exchanged and not record.plan_changed


seconds = st.floats(0.01, 100)
ranks_times = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6)


def by_bisection(other: np.ndarray, matmul: np.ndarray) -> float:
    """The least ``t ≥ max other`` by which the ranks do e shares of the products."""
    low, high = float(other.max()), float(other.max() + matmul.max() * len(other))
    for _ in range(200):
        middle = (low + high) / 2
        done = (np.maximum(0.0, middle - other) / matmul).sum()
        low, high = (middle, high) if done < len(other) else (low, middle)
    return high


@given(ranks_times)
def test_lossless_seconds_by_bisection(times: list[tuple[float, float]]) -> None:
    other, matmul = (np.array(values) for values in zip(*times, strict=True))
    assert lossless_seconds(other, matmul) == pytest.approx(by_bisection(other, matmul), rel=1e-6)


@given(st.integers(2, 16), st.floats(1, 50), seconds, st.floats(0, 10))
def test_lossless_seconds_of_one_straggler_is_the_papers_bound(
    ranks: int, slowdown: float, matmul: float, other: float
) -> None:
    """``e / (e − 1 + 1/χ)`` of the homogeneous matmul time."""
    bound = ranks / (ranks - 1 + 1 / slowdown)
    found = lossless_seconds([other] * ranks, [matmul] * (ranks - 1) + [slowdown * matmul])
    assert found == pytest.approx(other + matmul * bound)
    assert ideal_ratio({ranks - 1: slowdown}, ranks) == pytest.approx(bound)


def records_of(iterations: int) -> list[IterationRecord]:
    """Rank 1 works 4 s at its full share, of which 3 s are products; from iteration 2 on it prunes half of them."""
    healthy, slow = [], []
    for i in range(iterations):
        pruned = i >= 2
        healthy.append(local(i, work=2.0, matmul=1.0, communication=0.7 if pruned else 2.2))
        work, matmul = (2.5, 1.5) if pruned else (4.0, 3.0)
        resized = 0.5 if pruned else 0.0
        slow.append(local(i, work, matmul, 0.2, resized, equal_work=4.0, equal_matmul=3.0, changed=i == 1))
    return merge_records([healthy, slow], [[0, 1]])


def test_report_by_hand() -> None:
    found = report(records_of(9), [0, 1])
    assert found is not None
    assert found.iterations == 9 and found.changes == 1
    assert found.balanced_seconds == pytest.approx(0.2 + 2.5)
    assert found.unbalanced_seconds == pytest.approx(0.2 + 4.0)
    assert found.homogeneous_seconds == pytest.approx(0.2 + 2.0)
    assert found.bound_seconds == pytest.approx(0.2 + 1.0 + 2 / (1 + 1 / 3))
    healthy, slow = found.ranks
    assert (healthy.rank, healthy.resized, healthy.wait_seconds) == (0, 0.0, pytest.approx(0.5))
    assert (slow.rank, slow.resized, slow.wait_seconds) == (1, 0.5, 0.0)
    assert (slow.work_seconds, slow.matmul_seconds) == (2.5, 1.5)
    assert (slow.migrated, slow.received) == (0.0, 0.0)


def test_the_report_takes_medians_of_all_that_is_in_the_records() -> None:
    scores = [0.5, 1.0, 0.25, 0.3, 0.4]
    views = [local(i, own_score=score, migrated=score, equal_work=4.0) for i, score in enumerate(scores)]
    found = report(merge_records([[local(i) for i in range(5)], views], [[0, 1]]), [0, 1])
    assert found is not None
    assert [rank.own_score for rank in found.ranks] == [1.0, 0.4]
    assert [rank.relative_score for rank in found.ranks] == [1.0, 0.25]
    assert [rank.migrated for rank in found.ranks] == [0.0, 0.4]
    assert found.saved_seconds == pytest.approx(found.unbalanced_seconds - found.balanced_seconds)
    assert found.waiting_seconds == 0.0 and found.notes == ()


def test_the_report_has_every_note_once_and_the_latest_last() -> None:
    notes = ["", "a", "a", "b", "", "a", "c", "b"]
    records = merge_records([[local(i, note=note) for i, note in enumerate(notes)]], [[0]])
    found = report(records, [0])
    assert found is not None and found.notes == ("a", "c", "b")


def test_what_was_given_away_for_good_stands_beside_what_migrated() -> None:
    records = [local(0, resharded=0.4), local(0, received=0.4)]
    (record,) = merge_records([[each] for each in records], [[0, 1]])
    assert [rank.resharded for rank in record.ranks] == [0.4, 0.0]
    found = report([record], [0, 1])
    assert found is not None
    headings = [str(column.header) for column in rank_table(found).columns]
    assert "resharded" in headings and "received" in headings and "migrated" not in headings
    assert moved_shares(0.0, 0.1, 0.0, 0.4) == "migrated 10%, resharded 40%"


def test_scores_are_relative_to_the_fastest_rank_of_the_group() -> None:
    """At equal work: what a rank prunes makes it no faster."""
    views = [[local(0, equal_work=seconds, work=1.0)] for seconds in (2.0, 8.0, 1.0, 3.0)]
    (record,) = merge_records(views, [[0, 1], [2, 3]])
    assert [rank.relative_score for rank in record.ranks] == pytest.approx([1.0, 0.25, 1.0, 1 / 3])
    (record,) = merge_records(views, [[0, 1, 2, 3]])
    assert [rank.relative_score for rank in record.ranks] == pytest.approx([0.5, 0.125, 1.0, 1 / 3])


def test_a_note_of_any_group_is_kept() -> None:
    silent, speaking = local(0), local(0, note="the network is too slow")
    (record,) = merge_records([[silent], [silent], [speaking], [speaking]], [[0, 1], [2, 3]])
    assert record.note == "the network is too slow"
    assert merge_records([[silent]], [[0]])[0].note == ""
