"""Records of all ranks together, the report's bounds against brute force, and sentences about changes of the plan."""

from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import report as reports
from colossal_hetero.balance.latest import SETTLED_AFTER, ChangeTeller, LatestIterations, plan_in_words
from colossal_hetero.balance.plan import BalancePlan, RankTimes


def local(iteration: int = 0, work: float = 1.0, matmul: float = 0.5, **others: Any) -> reports.LocalRecord:
    usual = dict(communication_seconds=0.1, resized=0.0, plan_changed=False)
    usual |= dict(equal_work_seconds=work, equal_matmul_seconds=matmul)
    return reports.LocalRecord(iteration=iteration, work_seconds=work, matmul_seconds=matmul, **(usual | others))


def reported(*per_rank: list[reports.LocalRecord]) -> reports.BalanceReport:
    ranks = list(range(len(per_rank)))
    found = reports.report(reports.merge_records(per_rank, [ranks]), ranks)
    assert found is not None
    return found


def test_a_rank_is_compared_with_its_group() -> None:
    """It waits in collectives beyond the last to arrive. Scores are at equal work: pruning makes a rank no faster."""
    for groups, waits, scores in (
        ([[0, 1, 2, 3]], [0.4, 0.0, 0.2, 0.8], [0.5, 0.125, 1.0, 1 / 3]),
        # Two groups of two ranks each: nobody waits for a rank of the other group.
        ([[0, 1], [2, 3]], [0.4, 0.0, 0.0, 0.6], [1.0, 0.25, 1.0, 1 / 3]),
        ([[0, 2], [1, 3]], [0.2, 0.0, 0.0, 0.8], [0.5, 0.375, 1.0, 1.0]),
    ):
        views = list(zip((0.5, 0.1, 0.3, 0.9), (2.0, 8.0, 1.0, 3.0), strict=True))
        per_rank = [
            [local(i, communication_seconds=waited + i, equal_work_seconds=work) for i in (0, 1)]
            for waited, work in views
        ]
        for record in reports.merge_records(per_rank, groups):
            assert [rank.wait_seconds for rank in record.ranks] == pytest.approx(waits)
            assert [rank.relative_score for rank in record.ranks] == pytest.approx(scores)


seconds = st.floats(0.01, 100)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6))
def test_lossless_seconds_by_bisection(times: list[tuple[float, float]]) -> None:
    """The least ``t ≥ max other`` by which the ranks do e shares of the products."""
    other, matmul = (np.array(values) for values in zip(*times, strict=True))
    low, high = float(other.max()), float(other.max() + matmul.max() * len(other))
    for _ in range(200):
        middle = (low + high) / 2
        done = (np.maximum(0.0, middle - other) / matmul).sum()
        low, high = (middle, high) if done < len(other) else (low, middle)
    assert reports.lossless_seconds(other, matmul) == pytest.approx(high, rel=1e-6)


def test_report_by_hand() -> None:
    """Rank 1 works 4 s at its full share, of which 3 s are products; from iteration 2 on it prunes half of them."""
    healthy, slow = [], []
    for i in range(9):
        pruned = i >= 2
        healthy.append(local(i, work=2.0, matmul=1.0, communication_seconds=0.7 if pruned else 2.2))
        work, matmul = (2.5, 1.5) if pruned else (4.0, 3.0)
        equal = dict(equal_work_seconds=4.0, equal_matmul_seconds=3.0, communication_seconds=0.2)
        slow.append(local(i, work, matmul, resized=0.5 if pruned else 0.0, plan_changed=i == 1, **equal))
    found = reported(healthy, slow)
    assert found.iterations == 9 and found.changes == 1
    assert found.balanced_seconds == pytest.approx(0.2 + 2.5)
    assert found.unbalanced_seconds == pytest.approx(0.2 + 4.0)
    assert found.homogeneous_seconds == pytest.approx(0.2 + 2.0)
    assert found.bound_seconds == pytest.approx(0.2 + 1.0 + 2 / (1 + 1 / 3))
    first, second = found.ranks
    assert (first.rank, first.resized, first.wait_seconds) == (0, 0.0, pytest.approx(0.5))
    assert (second.rank, second.resized, second.wait_seconds) == (1, 0.5, 0.0)
    assert (second.work_seconds, second.matmul_seconds, second.migrated, second.received) == (2.5, 1.5, 0.0, 0.0)


def test_what_was_given_away_for_good_stands_beside_what_migrated() -> None:
    found = reported([local(resharded=0.4)], [local(received=0.4)])
    assert [rank.resharded for rank in found.ranks] == [0.4, 0.0]
    headings = [str(column.header) for column in reports.rank_table(found).columns]
    assert "resharded" in headings and "received" in headings and "migrated" not in headings
    assert reports.moved_shares(0.0, 0.1, 0.0, 0.4) == "migrated 10%, resharded 40%"


SLOW = (RankTimes(1.0, 1.0), RankTimes(6.1, 6.1), RankTimes(1.2, 1.2))
RANKS = (4, 5, 6)
IDLE, PRUNING = BalancePlan.idle(3), BalancePlan.resizing((0.0, 0.5, 0.0))
WORDS = "rank 5 takes 6.1 times as long as the fastest for the same layers: 68% of its work now runs on ranks 4, 6"
FASTER, SLOWER = "; iteration 2.000 s → 1.000 s", "; iteration 1.000 s → 2.000 s"


def test_the_latest_medians_are_those_of_one_plan() -> None:
    """Also if the times of an iteration with the plan before become known later."""
    latest = LatestIterations(Mock(size=lambda: 1, rank=lambda: 0), [[0]], interval=4)
    for iteration in range(3):
        latest.add(local(iteration, work=9.0))
    latest.plan_changed(3)
    for iteration, work in ((3, 9.0), (4, 2.0)):
        latest.add(local(iteration, work=work))
    with patch.object(dist, "all_reduce"):
        latest.end_iteration(8)
    found = latest.report()
    assert found is not None and (found.ranks[0].work_seconds, found.iterations, found.changes) == (2.0, 1, 1)


def migrating(share: float) -> BalancePlan:
    return BalancePlan((0.0,) * 3, (0.0, share, 0.0), (share / 2, 0.0, share / 2))


@pytest.mark.parametrize(
    ("changes", "iterations", "told"),
    [
        # A change is told when its effect is known.
        ({10: migrating(0.68)}, 10 + 2 + SETTLED_AFTER, [WORDS + FASTER]),
        ({10: migrating(0.68)}, 10 + 1 + SETTLED_AFTER, []),
        ({10: migrating(0.68), 20: IDLE}, 40, [WORDS + FASTER, "ranks 4-6: each does its own work again" + SLOWER]),
        # Small changes and changes that do not last are not told.
        ({10: migrating(0.68), 20: migrating(0.65), 30: migrating(0.7)}, 40, [WORDS + FASTER]),
        ({10: migrating(0.4), 12: migrating(0.68)}, 40, [WORDS + FASTER]),
        ({10: PRUNING}, 40, ["50% of its work is skipped, which costs accuracy"]),
    ],
)
def test_changes_are_told(changes: dict[int, BalancePlan], iterations: int, told: list[str]) -> None:
    said: list[str] = []
    teller, moved = ChangeTeller(RANKS, said.append), False
    for iteration in range(iterations):
        teller.took(iteration, 1.0 if moved else 2.0)
        if iteration in changes:
            teller.changed(iteration, changes[iteration], SLOW)
            moved = sum(changes[iteration].migrate) > 0
    assert len(said) == len(told) and all(words in each for words, each in zip(told, said, strict=True)), said
    # Without times, if none are known.
    assert plan_in_words(migrating(0.5), None, RANKS) == "rank 5: 50% of its work now runs on ranks 4, 6"
