"""What is said about a division and its changes."""

from __future__ import annotations

from colossal_hetero.data_parallel.batch_balancer import changes_in_words, division_in_words, slow_data_in_words
from colossal_hetero.planner import Curve, allocate

CURVE = Curve.from_seconds([1.0, 2.0, 3.0, 4.0])


def test_a_division_names_groups_of_equal_ranks() -> None:
    allocation = allocate([CURVE, CURVE, Curve(2.0 * CURVE.seconds)], 10, 1)
    words = division_in_words(allocation, ["A", "A", "B"])
    assert words == "of each global batch of 10: ranks 0-1 (A) 4; rank 2 (B) 2"
    words = division_in_words(allocate([CURVE, CURVE], 16, 1), ["A", "B"])
    assert words == (
        "of each global batch of 16: rank 0 (A) 8 in 2 micro-batches of at most 4; "
        "rank 1 (B) 8 in 2 micro-batches of at most 4"
    )


def test_changes_name_the_ranks_whose_samples_change() -> None:
    before, after = allocate([CURVE] * 2, 6, 1), allocate([CURVE, Curve(2.0 * CURVE.seconds)], 6, 1)
    assert changes_in_words(before, after, [1.0, 2.0], ["A", "B"]) == (
        "global batches of 6 are divided again: rank 0 (A) takes 1.00 times as long as before: 3 → 4 samples; "
        "rank 1 (B) takes 2.00 times as long as before: 3 → 2 samples"
    )
    assert changes_in_words(before, before, [1.1, 1.0], ["A", "B"]) is None


def test_slow_data_names_the_rank_and_the_remedy() -> None:
    assert slow_data_in_words(1, 0.4321, 2) == (
        "rank 1 waits 0.43 s per global batch for its data: more workers would help (num_workers=2)"
    )
